"""Measures how well the host's work for a decode step overlaps with the device's work (``agent.run_ahead``).

The CPU acts as a device with a queue (``performance/artificial_device``), on which a step takes --device-ms. The host
needs --host-ms for each step: two thirds for the launch and one third for the result. The agent's worker always has two
steps. In the first run ("steps ahead"), it launches the second step before the first has ended. In the second run, it
waits for the result of each step. The period is the time from the end of one step to the end of the next. With steps
ahead, the period should be equal to the device's time for a step. Period and device time are medians, so that other
programs on the machine disturb them less. The exit code is 1 if the period exceeds --limit times the device's time.

With --temperature, a step also launches the graphs that find candidates and draw tokens. These graphs take three
eighths of the device's time and a third of the host's time for launches. If the device draws a wrong token, the next
step is launched again, which also takes device time. --wrong-every makes the device draw wrong tokens. The figure "ms a
step" is the mean time of a completed step, so it includes second launches.

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
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np

from agent.backends.runtime import start_runtime
from agent.model_runner import ModelRunner
from agent.task_queue import TaskQueue
from agent.warm_up import make_step
from agent.worker import Worker
from llm_serving.config import Config, load_config
from llm_serving.ipc.exchange import ExchangeLayout, ExchangeMemory
from llm_serving.ipc.messages import Decode, Shutdown, StepDone
from llm_serving.ipc.shm import LAST_TOKEN, NUM_SLOTS
from performance.artificial_device.queue import STEP, ArtificialDevice, Busy, sleep_until
from performance.program import exits_with_errors, new_parser, write_json
from performance.terminal import format_table

WARM_STEPS = 20
"""Number of first steps that are not measured."""
CONTEXT, SEQUENCES, IN_FLIGHT = 64, 4, 2
"""Tokens of each context, number of sequences, and number of steps in flight."""
RUNS_AHEAD = (True, False)
HEAD = ("steps ahead", "device ms", "period ms", "period / device", "ms a step", "second launches")
PROGRAM = Path(__file__).resolve().parents[1] / "bench_step_ahead.py"
TRACED = 4
"""Number of steps in the trace."""
SAMPLING_GRAPHS = 2
"""Number of graphs that sampling with a temperature launches in each step: candidates and draws."""
SAMPLING_DEVICE, SAMPLING_HOST = 3 / 8, 1 / 3
"""The fraction of a step's time on the device, and of its launch time on the host, that these graphs take together.

The artificial device really runs each graph on the CPU. This takes about 1 ms, so a shorter time is impossible.
"""
WORK = {
    STEP: "device computes a step",
    "candidates": "device finds candidates",
    "draws": "device draws tokens",
    "rows": "device copies logits",
}
Span = tuple[float, float, str]
"""Start and end in seconds of ``time.perf_counter``, and the work that was done."""


@dataclass
class Measured:
    """The measured times of a run, and the number of steps that were launched again."""

    spans: list[Span] = field(default_factory=list)
    """The spans in which the host worked."""
    periods: list[Busy] = field(default_factory=list)
    """The periods in which the device was busy, in their order."""
    second_launches: int = 0
    seconds: float = 0.0
    """The time from the end of the first step to the end of the last."""

    def device_steps(self) -> list[tuple[float, float]]:
        """Returns, for each launch of a step, the seconds for which it kept the device busy, and the time of its end.

        Sampling graphs that follow the step in the device's queue count as a part of the launch.
        """
        steps: list[tuple[float, float]] = []
        for each in self.periods:
            seconds = each.end - each.start
            if each.graph == STEP:
                steps.append((seconds, each.end))
            elif steps:
                steps[-1] = (steps[-1][0] + seconds, each.end)
        return steps


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


def report(parsed: argparse.Namespace, measured: Sequence[Measured]) -> int:
    """Prints the figures of the run with steps ahead and of the run without. Returns the exit code of ``main``."""
    rows, results = [], []
    for runs_ahead, each in zip(RUNS_AHEAD, measured, strict=True):
        steps = each.device_steps()
        busy = median(seconds for seconds, _ in steps)
        period = median(after - before for (_, before), (_, after) in pairwise(steps))
        mean = each.seconds / (parsed.steps - 1)
        figures = {"device_ms": 1000 * busy, "period_ms": 1000 * period, "step_ms": 1000 * mean}
        results.append({"runs_ahead": runs_ahead, **figures, "second_launches": each.second_launches})
        numbers = (figures["device_ms"], figures["period_ms"], period / busy, figures["step_ms"])
        rows.append(
            ["yes" if runs_ahead else "no", *(f"{number:.3f}" for number in numbers), str(each.second_launches)]
        )
        if parsed.trace and runs_ahead:
            print(timeline(each))
    print(format_table(HEAD, rows))
    given = {"device_ms": parsed.device_ms, "host_ms": parsed.host_ms, "temperature": parsed.temperature}
    write_json(parsed.json, {**given, "results": results})
    ratio = results[0]["period_ms"] / results[0]["device_ms"]
    return 1 if ratio > parsed.limit else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--config", default="llama_tiny_cpu.yaml", help="config (default llama_tiny_cpu.yaml)")
    parser.add_argument("--device-ms", type=float, default=8.0, help="time of a launch on the device (default 8)")
    parser.add_argument("--host-ms", type=float, default=3.0, help="time of a step on the host (default 3)")
    parser.add_argument("--steps", type=int, default=200, help="number of measured steps (default 200)")
    parser.add_argument(
        "--limit",
        type=float,
        default=1.04,
        help="the program fails if the period is longer than this multiple of the device's time (default 1.04)",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="temperature of all sequences (default 0)")
    parser.add_argument("--top-k", type=int, default=50, help="top_k of all sequences with a temperature (default 50)")
    parser.add_argument(
        "--wrong-every",
        type=int,
        default=0,
        metavar="N",
        help="let the device draw wrong tokens in every Nth step, which causes a second launch of the next step; needs "
        "--temperature (default 0: never)",
    )
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
) -> Measured:
    """Runs the steps, with or without steps ahead (``runs_ahead``), and returns the times.

    ``exchange_name`` is the name of the shared memory through which the agents of a group add their arrays. None: this
    agent has the whole model.
    """
    device = ArtificialDevice()
    runner = started_runner(config, device, exchange_name, options.rank, runs_ahead=runs_ahead)
    measured = Measured(periods=device.periods)
    note_launches(runner, measured.spans)
    run_steps(config, runner, WARM_STEPS, Measured(), options)
    measured.spans.clear()
    device.periods.clear()
    slow_down(device, options)
    run_steps(config, runner, options.steps, measured, options, answer_s=options.host_ms / 1000 / 3)
    return measured


def slow_down(device: ArtificialDevice, options: argparse.Namespace) -> None:
    """Makes the launches of a step as slow as the options demand, on the device and on the host."""
    device_s, launch_s = options.device_ms / 1000, options.host_ms / 1000 * 2 / 3
    if options.temperature > 0:
        device.sampling_device_s = device_s * SAMPLING_DEVICE / SAMPLING_GRAPHS
        device.sampling_launch_s = launch_s * SAMPLING_HOST / SAMPLING_GRAPHS
    device.device_s = device_s - SAMPLING_GRAPHS * device.sampling_device_s
    device.launch_s = launch_s - SAMPLING_GRAPHS * device.sampling_launch_s
    device.wrong_every = options.wrong_every


def started_runner(
    config: Config, device: ArtificialDevice, exchange_name: str | None, rank: int, *, runs_ahead: bool
) -> ModelRunner:
    """Returns a model runner, ready for steps, whose graphs run on ``device``."""
    from performance.artificial_device.ops import use_artificial_device  # imported here, as it imports mindspore

    use_artificial_device(device, runs_ahead=runs_ahead)
    exchange = None
    if exchange_name is not None:
        layout = ExchangeLayout.of(config.shape, config.slot_limits(), config.parallel_config)
        exchange = ExchangeMemory.attach(exchange_name, layout)
    runner = ModelRunner(config, lambda *_: None, rank, exchange)
    runner.load()
    runner.compile()
    runner.warm_up()
    return runner


def note_launches(runner: ModelRunner, spans: list[Span]) -> None:
    """Adds the span of each launch of a step graph to ``spans``."""
    launch = runner.step_graph().run

    def noted_launch(*arguments: Any) -> Any:
        start = time.perf_counter()
        scores = launch(*arguments)
        spans.append((start, time.perf_counter(), "host launches a step"))
        return scores

    runner.step_graph().run = noted_launch  # type: ignore[method-assign]


def run_steps(
    config: Config,
    runner: ModelRunner,
    number: int,
    measured: Measured,
    options: argparse.Namespace,
    answer_s: float = 0.0,
) -> None:
    """Runs ``number`` decode steps in an agent's worker. Adds the spans in which the host handled results, and the
    number of second launches, to ``measured``. The host needs ``answer_s`` seconds for the result of a step.
    """
    slots = [_slot(config, options) for _ in range(NUM_SLOTS)]
    queue, state = TaskQueue("fcfs", max_steps=NUM_SLOTS), SimpleNamespace(sent=0, done=0, first=0.0)

    def send_next() -> None:
        if state.sent < number:
            slot = slots[state.sent % NUM_SLOTS]
            slot.header[1] = state.sent
            slot.sample_position[:SEQUENCES] = state.sent
            if state.sent > 0:
                slot.token_ids[:SEQUENCES] = LAST_TOKEN
            queue.put(Decode(seq=state.sent, slot=state.sent % NUM_SLOTS))
            state.sent += 1

    def answered(message: Any) -> None:
        assert isinstance(message, StepDone), message
        start = time.perf_counter()
        sleep_until(start + answer_s)
        measured.spans.append((start, time.perf_counter(), "host answers a step"))
        state.first = state.first or start
        measured.seconds = start - state.first
        measured.second_launches += message.second_launches
        state.done += 1
        send_next()
        if state.done == number:
            queue.put(Shutdown(seq=number))

    worker = Worker(lambda report: runner, queue, SimpleNamespace(send=answered), {})  # type: ignore[arg-type]
    for _ in range(IN_FLIGHT):
        send_next()
    worker._serve(SimpleNamespace(slots=slots), runner)  # type: ignore[arg-type]


def _slot(config: Config, options: argparse.Namespace) -> Any:
    slot = make_step(config, [1] * SEQUENCES, [CONTEXT] * SEQUENCES)
    slot.num_top_logits[:SEQUENCES] = -1
    if options.temperature > 0:
        slot.arrays["temperature"][:SEQUENCES] = options.temperature
        slot.arrays["top_k"][:SEQUENCES] = options.top_k
        slot.arrays["seed"][:SEQUENCES] = np.arange(SEQUENCES)
    return slot


def events_of(measured: Measured) -> list[Span]:
    """Returns the spans in which host and device worked, in the order of their starts."""
    return sorted([*measured.spans, *((each.start, each.end, WORK[each.graph]) for each in measured.periods)])


def timeline(measured: Measured) -> str:
    """Returns a table of what host and device did in the last steps, in the order of time."""
    steps = [each for each in measured.periods if each.graph == STEP][-TRACED:]
    origin, end = steps[0].start, measured.periods[-1].end
    shown = [span for span in events_of(measured) if origin <= span[0] <= end]
    rows = [[f"{1000 * (start - origin):.2f}", f"{1000 * (end - origin):.2f}", what] for start, end, what in shown]
    return format_table(["from ms", "to ms", "what"], rows)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # does not wait for the threads of MindSpore and of the artificial device
