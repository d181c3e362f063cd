"""Injects faults into a real server under a mixed load and compares every answer with the undisturbed text.

    python tests/long/chaos.py --minutes 30 --seed 1 [--plant leak|corruption] [--drafts suffix|draft] [--set KEY=VALUE]

By default two replicas serve the tiny model, each with a group of two agents. The faults are:

- Agents are killed, stopped and delayed, and their frames are damaged.
- A request kills its agent each time it runs.
- Clients disconnect, or send floods of requests.
- The server has no descriptors, memory or disk space left.
- The weights are reloaded, and profiles are made, under the load.

Prints one JSON line and the ledger. For each kind of fault, the ledger has the longest detection, the longest recovery,
and the numbers of failed requests and of equal texts. Exits with 1 after a loss that no fault explains, a wrong text,
or a leak of processes, descriptors, threads, shared memory or memory. ``--plant`` plants a bug, which the run must
find. The same seed repeats the schedule. With ``--drafts``, steps verify drafts, and the texts must also be those of a
server without drafts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from support.chaos_drafts import add_drafts_option, draft_figures, texts_without_drafts  # noqa: E402
from support.chaos_faults import KINDS, FaultRig, Injection, Outcome, schedule  # noqa: E402
from support.chaos_ledger import HEADINGS, Holdings, Ledger, MemoryWatch  # noqa: E402
from support.chaos_load import ChaosLoad, Texts  # noqa: E402
from support.draft_models import method_settings  # noqa: E402
from support.fault_environment import fault_environment  # noqa: E402
from support.fault_module.sitecustomize import CORRUPTS  # noqa: E402
from support.long_program import run_program  # noqa: E402
from support.server_process import ServerProcess, running_server  # noqa: E402

OVERRIDES = (
    "parallel_config.tensor_parallel=2",
    "parallel_config.data_parallel=2",
    "model_config.cpu_threads=1",
    "serving_config.agent_restart_limit=1000",
    "serving_config.step_timeout_s=120",  # steps are much slower during a profile
    "serving_config.confine_agents=off",  # a confined agent cannot read the files with fault orders
)
WARM_UP_S = 8.0
SAMPLE_S = 1.0
AFTER_RELOAD_S = 2.0
"""Seconds after a reload in which the server still returns the memory of the old version."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plant", choices=("leak", "corruption"), help="plant a bug that the run must find")
    add_drafts_option(parser)
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of faults, separated by commas")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    kinds = tuple(arguments.only.split(","))
    if not set(kinds) <= set(KINDS):
        parser.error(f"--only takes {','.join(KINDS)}")
    with tempfile.TemporaryDirectory(prefix="chaos_") as name:
        folder = Path(name)
        (folder / "orders").mkdir()
        orders = folder / "orders"
        settings, reference = [*OVERRIDES, *arguments.overrides], None
        if arguments.drafts is not None:
            reference = texts_without_drafts(folder / "reference", settings)
            settings = [*method_settings(folder, arguments.drafts), *settings]
        faults = fault_environment(CHAOS_FOLDER=str(orders), CHAOS_PLANT=arguments.plant or "")
        with faults, running_server(folder / "server", settings, forks=False) as server:
            return run(server, orders, arguments, kinds, reference)


def run(
    server: ServerProcess,
    orders: Path,
    arguments: argparse.Namespace,
    kinds: tuple[str, ...],
    reference: list[Texts] | None,
) -> int:
    """Runs the faults of a seed for some minutes and prints the ledger. Returns the exit code.

    ``reference`` are the texts without drafts, or None if they need not be compared.
    """
    minutes, seed = arguments.minutes, arguments.seed
    load, watch = ChaosLoad(server.url, seed, reference=reference), MemoryWatch()
    (orders / CORRUPTS).touch()  # a planted corruption must not change the texts that answers are compared with
    with load:
        rig = FaultRig(server, orders, load)
        rig.send_large_bodies()
        rig.fill_receipts()
        time.sleep(WARM_UP_S)
        before = holdings(server, load)
        with watching(watch, server):
            outcomes = inject_faults(rig, load, minutes, schedule(seed, 4, kinds))
        after = holdings(server, load)
        drafts = draft_figures(server) if arguments.drafts is not None else {}
    if len(outcomes) >= len(kinds):
        watch.first_round_end = outcomes[len(kinds) - 1].ended
    watch.reloads = [(each.began, each.ended + AFTER_RELOAD_S) for each in outcomes if each.injection.kind == "reload"]
    ledger = Ledger(load, outcomes)
    leaks = [*before.leaks(after), *filter(None, [watch.leak()])]
    print(HEADINGS)
    for kind, row in ledger.rows.items():
        print(row.text(kind))
    for line in (*ledger.losses[:40], *leaks):
        print(f"  {line}")
    is_good = not ledger.losses and not leaks and (not drafts or drafts["accepted_drafts"] > 0)
    slopes = {"slope_mib_10min": watch.slope_mib(), "agents_slope_mib_10min": watch.agents_slope_mib()}
    figures = {"minutes": minutes, "seed": seed, **ledger.figures(), "leaks": len(leaks), **drafts}
    figures |= {name: round(slope, 2) for name, slope in slopes.items()}
    print(json.dumps({**figures, "pass": is_good}), flush=True)
    return 0 if is_good else 1


def inject_faults(rig: FaultRig, load: ChaosLoad, minutes: float, faults: Iterator[Injection]) -> list[Outcome]:
    """Injects one fault after the other until the time is over.

    Stops early if the server does not recover from a fault. Returns the outcome of each fault.
    """
    outcomes: list[Outcome] = []
    until = time.monotonic() + 60.0 * minutes
    for injection in faults:
        if time.monotonic() >= until or (outcomes and outcomes[-1].problem):
            break
        outcome = rig.inject(injection)
        outcomes.append(outcome)
        load.answers += rig.extra_answers
        rig.extra_answers.clear()
        detected = "" if outcome.detected_s is None else f"detected after {outcome.detected_s:.2f} s, "
        print(
            f"{injection.kind} {injection.order} agent {injection.rank}: {detected}recovered after "
            f"{outcome.recovered_s:.2f} s; {len(load.answers)} answers {outcome.problem}",
            flush=True,
        )
        time.sleep(injection.gap_s)
    return outcomes


def holdings(server: ServerProcess, load: ChaosLoad) -> Holdings:
    """Pauses the load, and returns the processes, descriptors, threads and segments that the idle server has."""
    assert load.pause(timeout_s=240.0), "a client waits for its response without end"
    server.wait_until_idle()
    found = Holdings.of(server)
    load.resume()
    return found


@contextmanager
def watching(watch: MemoryWatch, server: ServerProcess) -> Iterator[None]:
    """Samples the memory of the server and its agents in a thread, until the ``with`` block ends."""
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(SAMPLE_S):
            watch.add(server)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


if __name__ == "__main__":
    sys.exit(run_program(main))
