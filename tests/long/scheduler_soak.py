"""Runs random scripts through the scheduler for a given number of steps and checks every invariant.

    python tests/long/scheduler_soak.py --steps 1000000 [--seed N] [--jobs 2]

Prints progress. At the end, it prints the configurations and events that occurred. If a script fails, the program
reduces it as far as possible, prints it with its seed as JSON, and exits with 1. ``--script FILE`` runs this JSON
again. The program also exits with 1 if an expected configuration or event did not occur.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from support.long_program import run_program  # noqa: E402
from support.scheduler_scripts import Script, minimise, play  # noqa: E402
from support.script_drawing import draw_script  # noqa: E402

BATCH = 100
"""Number of scripts that a worker runs between two reports."""

MUST_MEET = ("decode steps", "prefill steps", "mixed steps", "move steps", "COPY moves", "SWAP_OUT moves",
             "SWAP_IN moves", "chunks", "cached starts", "preemptions", "swaps", "deadlines", "failed steps",
             "agents lost", "void steps", "skipped steps", "ends from outside", "refused for good",
             "refused for now", "preemptions on the way back")  # fmt: skip

_CROSSED = ("policy", "batching", "preemption", "admission", "page_attention", "prefix_cache", "decode_steps_ahead")


@dataclass
class Report:
    """The configurations and events that occurred in some scripts, and the seed of the first failure."""

    steps: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    configurations: Counter[tuple[object, ...]] = field(default_factory=Counter)
    block_sizes: Counter[int] = field(default_factory=Counter)
    failed_seed: int | None = None

    def add(self, other: Report) -> None:
        self.steps += other.steps
        self.seen += other.seen
        self.configurations += other.configurations
        self.block_sizes += other.block_sizes
        self.failed_seed = other.failed_seed if self.failed_seed is None else self.failed_seed


def play_seeds(seeds: Iterable[int]) -> Report:
    """Runs the scripts of these seeds until one fails. Returns what occurred in them."""
    report = Report()
    for seed in seeds:
        script = draw_script(seed)
        try:
            simulation = play(script)
        except Exception:
            report.failed_seed = seed
            return report
        report.steps += len(simulation.steps)
        report.seen += simulation.seen
        report.configurations[tuple(script.limits[name] for name in _CROSSED)] += 1
        report.block_sizes[script.limits["block_size"]] += 1
    return report


def soak(steps: int, seed: int, jobs: int) -> Report:
    """Runs scripts until ``steps`` steps have run, or one script has failed."""
    total, begin = Report(), time.monotonic()
    with ProcessPoolExecutor(jobs) as pool:
        batches = _batches(seed)
        while total.steps < steps and total.failed_seed is None:
            for report in pool.map(play_seeds, islice(batches, jobs)):
                total.add(report)
            rate = total.steps / (time.monotonic() - begin)
            print(f"{total.steps} steps, {sum(total.block_sizes.values())} scripts, {rate:.0f} steps/s", flush=True)
    return total


def _batches(seed: int) -> Iterator[range]:
    return (range(start, start + BATCH) for start in count(seed, BATCH))


def failure_of(script: Script) -> str | None:
    """Returns the error type and the function that raised it if the script fails.

    Returns None if the script succeeds.
    """
    try:
        play(script)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {Path(frame.filename).name}, {frame.name}"
    return None


def explain(script: Script) -> None:
    """Prints the smallest script that fails in the same way as ``script``, and its traceback."""
    failure = failure_of(script)
    small = minimise(script, lambda candidate: failure_of(candidate) == failure)
    print(f"{failure}; {len(script.operations)} operations, {len(small.operations)} are enough:")
    print(small.to_json())
    try:
        play(small)
    except Exception:
        traceback.print_exc(file=sys.stdout)


def summarise(total: Report) -> list[str]:
    """Prints the configurations and events that occurred. Returns the expected events that did not occur."""
    print(f"configurations {' x '.join(_CROSSED)}: {len(total.configurations)} different ones")
    for place, name in enumerate(_CROSSED):
        scripts: Counter[str] = Counter()
        for values, number in total.configurations.items():
            scripts[str(values[place])] += number
        print(f"  {name}: {', '.join(f'{value} {number}' for value, number in sorted(scripts.items()))}")
    print(f"  block_size: {', '.join(f'{size} {number}' for size, number in sorted(total.block_sizes.items()))}")
    print(f"met: {', '.join(f'{number} {name}' for name, number in sorted(total.seen.items()))}")
    return [name for name in MUST_MEET if not total.seen[name]]


def main() -> int:
    parser = argparse.ArgumentParser(description="Random scripts through the scheduler, everything checked.")
    parser.add_argument("--steps", type=int, default=1_000_000, help="steps to run at least")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first script; each next is one more")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--script", type=Path, help="play this JSON file only")
    arguments = parser.parse_args()
    if arguments.script is not None:
        play(Script.from_json(arguments.script.read_text()))
        return 0
    total = soak(arguments.steps, arguments.seed, arguments.jobs)
    print(json.dumps({"steps": total.steps, "failed": int(total.failed_seed is not None)}))
    if total.failed_seed is not None:
        print(f"the script of seed {total.failed_seed} failed (--seed {total.failed_seed} plays it first)")
        explain(draw_script(total.failed_seed))
        return 1
    missed = summarise(total)
    if missed and arguments.steps >= 100_000:
        print(f"never met: {', '.join(missed)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
