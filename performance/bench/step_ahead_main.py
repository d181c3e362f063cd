"""Measures how well the host's work for a decode step overlaps with the device's work (``agent.run_ahead``).

The CPU acts as a device with a queue (``performance/artificial_device``), on which a step takes --device-ms. The host
needs --host-ms for each step: two thirds for the launch and one third for the result. The agent's worker always has two
steps. In the first run ("steps ahead"), it launches the second step before the first has ended. In the second run, it
waits for the result of each step. The period is the time from the end of one step to the end of the next. With steps
ahead, the period should be equal to the device's time for a step. Both times are medians, so that other programs on the
machine disturb them less. The exit code is 1 if the period exceeds --limit times the device's time.

With --tensor-parallel, several agents share the model, each with its own artificial device. The figures are those of
the first agent, which samples. Its device also waits for the sums of the other devices.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from agent.backends.runtime import start_runtime
from agent.model_runner import ModelRunner
from agent.task_queue import TaskQueue
from agent.warm_up import make_step
from agent.worker import Worker
from llm_serving.config import Config, load_config
from llm_serving.ipc.exchange import ExchangeLayout, ExchangeMemory
from llm_serving.ipc.messages import Decode, Shutdown, StepDone
from llm_serving.ipc.shm import LAST_TOKEN, NUM_SLOTS
from performance.artificial_device.queue import ArtificialDevice, Busy, sleep_until
from performance.program import exits_with_errors, new_parser, write_json
from performance.terminal import format_table

WARM_STEPS = 20
CONTEXT, SEQUENCES, IN_FLIGHT = 64, 4, 2
RUNS_AHEAD = (True, False)
PROGRAM = Path(__file__).resolve().parents[1] / "bench_step_ahead.py"
TRACED = 4
"""Number of steps in the trace."""
Span = tuple[float, float, str]
"""Start and end in seconds of ``time.perf_counter``, and the work that was done."""


@exits_with_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the measurement and returns the exit code.

    0: success. 1: the period with steps ahead exceeds the limit. 2: a config is wrong.
    """
    parsed = _parse(arguments)
    settings = ("op_table=native", "model_dtype=bfloat16")
    config = load_config(
        parsed.config,
        [*(f"model_config.{each}" for each in settings), f"parallel_config.tensor_parallel={parsed.tensor_parallel}"],
    )
    if parsed.rank:
        start_runtime(config)
        for runs_ahead, name in zip(RUNS_AHEAD, parsed.exchanges, strict=True):
            measure(config, parsed, name, runs_ahead=runs_ahead)
        return 0
    with other_agents(config, parsed, sys.argv[1:] if arguments is None else arguments) as exchanges:
        start_runtime(config)
        measured = [
            measure(config, parsed, name, runs_ahead=runs_ahead)
            for runs_ahead, name in zip(RUNS_AHEAD, exchanges, strict=True)
        ]
    return report(parsed, measured)


def report(parsed: argparse.Namespace, measured: Sequence[tuple[list[Span], list[Busy]]]) -> int:
    """Prints the figures of the run with steps ahead and of the run without. Returns the exit code of ``main``."""
    rows, results = [], []
    for runs_ahead, (spans, periods) in zip(RUNS_AHEAD, measured, strict=True):
        busy = median(each.end - each.start for each in periods)
        period = median(after.end - before.end for before, after in pairwise(periods))
        results.append({"runs_ahead": runs_ahead, "device_ms": 1000 * busy, "period_ms": 1000 * period})
        figures = (1000 * busy, 1000 * period, period / busy)
        rows.append(["yes" if runs_ahead else "no", *(f"{figure:.3f}" for figure in figures)])
        if parsed.trace and runs_ahead:
            print(timeline(spans, periods))
    print(format_table(["steps ahead", "device ms", "period ms", "period / device"], rows))
    write_json(parsed.json, {"device_ms": parsed.device_ms, "host_ms": parsed.host_ms, "results": results})
    ratio = results[0]["period_ms"] / results[0]["device_ms"]
    return 1 if ratio > parsed.limit else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--config", default="llama_tiny_cpu.yaml", help="config (default llama_tiny_cpu.yaml)")
    parser.add_argument("--device-ms", type=float, default=8.0, help="time of a launch on the device (default 8)")
    parser.add_argument("--host-ms", type=float, default=3.0, help="time of a step on the host (default 3)")
    parser.add_argument("--steps", type=int, default=200, help="number of measured steps (default 200)")
    parser.add_argument("--limit", type=float, default=1.04, help="largest period / device time (default 1.04)")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="number of agents (default 1)")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--exchanges", nargs=len(RUNS_AHEAD), help=argparse.SUPPRESS)
    parser.add_argument("--trace", action="store_true", help="print what host and device did in the last steps")
    return parser.parse_args(arguments)


@contextmanager
def other_agents(config: Config, parsed: argparse.Namespace, arguments: Sequence[str]) -> Iterator[list[str | None]]:
    """Starts this program once for each further agent of the group.

    Yields a list with two elements: one for the run with steps ahead, and one for the run without. An element is the
    name of the shared memory through which the agents add their arrays, or None with a single agent. At the end, waits
    for the agents. After an error, kills them.
    """
    if parsed.tensor_parallel == 1:
        yield [None] * len(RUNS_AHEAD)
        return
    layout = ExchangeLayout.of(config.shape, config.slot_limits(), config.parallel_config)
    with ExitStack() as stack:
        exchanges = [ExchangeMemory.create(layout) for _ in RUNS_AHEAD]
        for exchange in exchanges:
            stack.callback(exchange.close)
        names = [exchange.name for exchange in exchanges]
        agents = []
        for rank in range(1, parsed.tensor_parallel):
            given = [*arguments, "--rank", str(rank), "--exchanges", *names]
            agents.append(subprocess.Popen([sys.executable, str(PROGRAM), *given], stdin=subprocess.DEVNULL))
            stack.callback(agents[-1].kill)
        yield list(names)
        for agent in agents:
            agent.wait()


def measure(
    config: Config, options: argparse.Namespace, exchange_name: str | None, *, runs_ahead: bool
) -> tuple[list[Span], list[Busy]]:
    """Runs the steps. Returns the spans in which the host worked, and the periods in which the device was busy.

    ``exchange_name`` is the name of the shared memory through which the agents of a group add their arrays. None: this
    agent has the whole model.
    """
    from performance.artificial_device.ops import use_artificial_device  # imported here, as it imports mindspore

    device = ArtificialDevice()
    use_artificial_device(device, runs_ahead=runs_ahead)
    exchange = None
    if exchange_name is not None:
        layout = ExchangeLayout.of(config.shape, config.slot_limits(), config.parallel_config)
        exchange = ExchangeMemory.attach(exchange_name, layout)
    runner = ModelRunner(config, lambda *_: None, options.rank, exchange)
    runner.load()
    runner.compile()
    runner.warm_up()
    spans: list[Span] = []
    launch = runner.step_graph().run

    def noted_launch(*arguments: Any) -> Any:
        start = time.perf_counter()
        scores = launch(*arguments)
        spans.append((start, time.perf_counter(), "host launches a step"))
        return scores

    runner.step_graph().run = noted_launch  # type: ignore[method-assign]
    run_steps(config, runner, WARM_STEPS, lambda: None)
    spans.clear()
    device.periods.clear()
    device.device_s, device.launch_s = options.device_ms / 1000, options.host_ms / 1000 * 2 / 3
    run_steps(config, runner, options.steps, partial(_answer, options.host_ms / 1000 / 3, spans))
    return spans, device.periods


def _answer(seconds: float, spans: list[Span]) -> None:
    start = time.perf_counter()
    sleep_until(start + seconds)
    spans.append((start, time.perf_counter(), "host answers a step"))


def run_steps(config: Config, runner: ModelRunner, number: int, answer: Any) -> None:
    """Runs ``number`` greedy decode steps in an agent's worker. The device's thread calls ``answer`` after each step.
    """
    slots = [_slot(config) for _ in range(NUM_SLOTS)]
    queue, state = TaskQueue("fcfs", max_steps=NUM_SLOTS), SimpleNamespace(sent=0, done=0)

    def send_next() -> None:
        if state.sent < number:
            slot = slots[state.sent % NUM_SLOTS]
            slot.header[1] = state.sent
            if state.sent > 0:
                slot.token_ids[:SEQUENCES] = LAST_TOKEN
            queue.put(Decode(seq=state.sent, slot=state.sent % NUM_SLOTS))
            state.sent += 1

    def answered(message: Any) -> None:
        assert isinstance(message, StepDone), message
        answer()
        state.done += 1
        send_next()
        if state.done == number:
            queue.put(Shutdown(seq=number))

    worker = Worker(lambda report: runner, queue, SimpleNamespace(send=answered), {})  # type: ignore[arg-type]
    for _ in range(IN_FLIGHT):
        send_next()
    worker._serve(SimpleNamespace(slots=slots), runner)  # type: ignore[arg-type]


def _slot(config: Config) -> Any:
    slot = make_step(config, [1] * SEQUENCES, [CONTEXT] * SEQUENCES)
    slot.num_top_logits[:SEQUENCES] = -1
    return slot


def timeline(spans: Sequence[Span], periods: Sequence[Busy]) -> str:
    """Returns a table of what host and device did in the last steps, in the order of time."""
    periods = periods[-TRACED:]
    origin = periods[0].start
    everything = [*spans, *((each.start, each.end, "device computes a step") for each in periods)]
    shown = sorted(span for span in everything if origin <= span[0] <= periods[-1].end)
    rows = [[f"{1000 * (start - origin):.2f}", f"{1000 * (end - origin):.2f}", what] for start, end, what in shown]
    return format_table(["from ms", "to ms", "what"], rows)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # does not wait for the threads of MindSpore and of the artificial device
