"""Extracts from a flight recording how long steps took, and how much time the server process added.

The time of a step is the time that its agent measured (graph and sampler) plus the agent's overhead. The overhead is
calculated from steps that ran directly after another step. The overhead is the time between the two steps' results
minus the measured time of the second step. The remaining time between the scheduling of a step and its result is
transfer time. The mean transfer time is divided equally between the two directions. The recording also has each
request's time from arrival to the queue, and shows which steps ran when requests arrived. The recording does not have
the time to deliver tokens; the clients measure this time (``with_delivery``).
"""

from __future__ import annotations

import platform
import random
import statistics
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from llm_serving.config import Config
from llm_serving.flight.history import Arrival, arrivals, completed_steps
from llm_serving.flight.reader import Stretch, read_recording
from llm_serving.flight.steps import RecordedStep
from llm_serving.scheduler.output import MoveKind
from performance.load.options import LoadOptions
from performance.load.stream import RequestRecord
from performance.program import UsageError
from performance.simulation.fit import MeasuredStep, StepFit, at_one_speed, fit_steps, slowdown
from performance.simulation.host import HostModel
from performance.simulation.requests import Arrivals, some_tokens
from performance.simulation.setup import identity
from performance.simulation.slowdown import Slowdown
from performance.simulation.work import count_work
from performance.simulation.workload import SimulatedRequest

__all__ = ["TimedStep", "fit_recording", "of_recording", "slowdown_within", "timed_steps", "with_delivery"]

MIN_BACK_TO_BACK = 20
"""Minimum number of steps that ran directly after another step. Fewer steps do not give a reliable overhead."""
MICROSECOND = 1e-6
Span = tuple[float, float]
"""A time span on the engine's clock: begin (included) and end (excluded), in seconds."""


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A completed step of a recording. Times are seconds on the engine's clock."""

    step: RecordedStep
    scheduled: float
    completed_at: float
    queue_s: float
    run_s: float
    """Time that the step ran on the agent, in graph and sampler."""

    @property
    def transfer_s(self) -> float:
        """Seconds in which the step neither waited in the agent's queue nor ran: the transfer to the agent and back."""
        return self.completed_at - self.scheduled - self.queue_s - self.run_s

    @property
    def end(self) -> float:
        """Time at which the step ended on the device. Assumes that both transfers take equally long."""
        return self.completed_at - self.transfer_s / 2

    @property
    def begin(self) -> float:
        return self.end - self.run_s


def timed_steps(stretch: Stretch) -> list[TimedStep]:
    """Returns the completed steps of a recording, in the order of their results. Failed steps are left out."""
    return [
        TimedStep(
            step,
            scheduled,
            result.now,
            result.queue_us * MICROSECOND,
            (result.graph_us + result.sample_us) * MICROSECOND,
        )
        for step, scheduled, result in completed_steps(stretch)
    ]


def fit_recording(path: Path, config: Config, repeated: Sequence[Sequence[Span]] = ()) -> StepFit:
    """Fits the device and the host to a recording (a file or a folder) of a server with ``config``.

    ``repeated`` has an entry for each load that ran several times: the spans in which it ran. If ``repeated`` is given,
    only steps that were scheduled within a span are fitted. Step times are then scaled to the median speed of the
    load's spans, so that changes of the machine's speed do not disturb the fit.

    Raises FlightRecordingError if the file is not a recording, and UsageError if it has too few steps.
    """
    stretches = read_recording(path)
    timed = [timed_steps(stretch) for stretch in stretches]
    requests = [arrivals(stretch) for stretch in stretches]
    own_s = _agent_overhead(timed)
    steps = [step for run, came in zip(timed, requests, strict=True) for step in _measured_steps(run, came, own_s)]
    moments = [each.scheduled for run in timed for each in run]
    provenance = identity(config) | _provenance(path, stretches, own_s)
    if repeated:
        runs = [[_scheduled_within(span, moments, steps) for span in spans] for spans in repeated]
        steps = at_one_speed(fit_steps([step for load in runs for run in load for step in run]), runs)
    fit = fit_steps(steps, provenance)
    host = _host(fit.host, (each for run in timed for each in run), own_s)
    return replace(fit, host=_with_edge(host, [one for came in requests for one in came]))


def slowdown_within(fit: StepFit, path: Path, spans: Sequence[Span]) -> Slowdown:
    """Returns by which factors the steps that were scheduled within ``spans`` took longer than the fit predicts."""
    own_s = fit.provenance["agents_share_us"] * MICROSECOND
    steps = []
    for stretch in read_recording(path):
        timed = [each for each in timed_steps(stretch) if any(low <= each.scheduled < high for low, high in spans)]
        steps += _measured_steps(timed, arrivals(stretch), own_s)
    return slowdown(fit, steps)


def with_delivery(fit: StepFit, path: Path, records: Iterable[RequestRecord]) -> StepFit:
    """Returns the fit with the delivery time of tokens, measured by the clients of the recorded server.

    The delivery time starts with the loop iteration that produced a request's first token. It ends when the client has
    the first piece of output. The fit gets the median over all requests. If Python measures the times of server and
    client with different system clocks, the fit is returned unchanged.
    """
    if time.get_clock_info("perf_counter").implementation != time.get_clock_info("monotonic").implementation:
        return fit
    known = {one.facts["request_id"]: one for stretch in read_recording(path) for one in arrivals(stretch)}
    delays = []
    for record in records:
        request = known.get(record.request_id or "")
        if request is not None and request.first_token_time is not None and record.ok and record.piece_times:
            delays.append(record.piece_times[0] - request.first_token_time)
    if not delays:
        raise UsageError(f"{path}: none of the clients' requests is in the recording")
    deliver_s = max(0.0, statistics.median(delays) - fit.host.result_s)
    return replace(fit, host=replace(fit.host, deliver_s=deliver_s))


def _scheduled_within(span: Span, moments: Sequence[float], steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    low, high = span
    return [step for moment, step in zip(moments, steps, strict=True) if low <= moment < high]


def _count_between(moments: Sequence[float], begin: float, end: float) -> int:
    """Returns how many of the sorted times are in the interval from ``begin`` (included) to ``end`` (excluded)."""
    return bisect_left(moments, end) - bisect_left(moments, begin)


def _agent_overhead(timed: Iterable[Sequence[TimedStep]]) -> float:
    """Returns the agent's overhead for a step, in seconds.

    The overhead is the median of the time between the results of two consecutive steps, minus the measured time of the
    second step. Only steps that waited in the agent's queue for the previous step are used.
    """
    gaps = []
    for run in timed:
        for earlier, later in pairwise(run):
            if later.queue_s > later.run_s / 100 and later.scheduled < earlier.completed_at < later.completed_at:
                gaps.append(later.completed_at - earlier.completed_at - later.run_s)
    return max(0.0, statistics.median(gaps)) if len(gaps) >= MIN_BACK_TO_BACK else 0.0


def _measured_steps(timed: Iterable[TimedStep], requests: Iterable[Arrival], own_s: float) -> list[MeasuredStep]:
    """Converts recorded steps to the input of the fit.

    ``own_s`` is the agent's overhead for a step. ``requests`` are all recorded requests. For each step, the requests
    that arrived while it ran are counted.
    """
    moments = sorted(one.facts["arrival_time"] for one in requests)
    return [_measured(each, own_s, _count_between(moments, each.begin, each.end)) for each in timed]


def _measured(timed: TimedStep, own_s: float, num_arrivals: int) -> MeasuredStep:
    step = timed.step
    copies = sum(move.kind is MoveKind.COPY for move in step.moves)
    return MeasuredStep(
        count_work(step.kind, step.starts, step.query_lens, step.do_sample),
        timed.run_s + own_s,
        swapped_blocks=len(step.moves) - copies,
        copied_blocks=copies,
        arrivals=num_arrivals,
        begin=timed.begin,
    )


def _host(host: HostModel, timed: Iterable[TimedStep], own_s: float) -> HostModel:
    """Returns the host model with transfer times from the recording.

    The transfer time is the mean and not the median, because slow transfers are part of the latency of a busy machine.
    """
    ways = [each.transfer_s - own_s - host.send_s - host.send_seq_s * each.step.num_seqs for each in timed]
    way_s = max(0.0, statistics.fmean(ways)) / 2
    return replace(host, to_agent_s=way_s, from_agent_s=way_s)


def _with_edge(host: HostModel, requests: Iterable[Arrival]) -> HostModel:
    """Returns the host model with the times that HTTP takes to accept a request and to deliver a piece of output.

    The time to accept a request is the recorded mean. The time to deliver a piece is not recorded. This time is assumed
    to be at least the time that a result takes from the agent to the engine thread.
    """
    waits = [one.facts["receipt_start"] - one.facts["arrival_time"] for one in requests if "receipt_start" in one.facts]
    accept_s = statistics.fmean(waits) if waits else host.accept_s
    return replace(host, accept_s=accept_s, deliver_s=max(host.deliver_s, host.from_agent_s))


def _provenance(path: Path, stretches: Sequence[Stretch], own_s: float) -> dict[str, Any]:
    header = stretches[0].header
    return {
        "name": "cpu fitted",
        "recording": path.name,
        "recorded": time.strftime("%Y-%m-%d", time.gmtime(header.unix_time)),
        "version": header.version,
        "policies": sorted({str(stretch.header.limits["policy"]) for stretch in stretches}),
        "machine": f"{platform.processor() or platform.machine()}, {_cpu_name()}",
        "agents_share_us": round(own_s / MICROSECOND, 1),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown processor"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else "unknown processor"


def of_recording(path: Path, options: LoadOptions) -> Arrivals:
    """Returns the completed requests of a recording, with their recorded lengths and objectives.

    A request is completed if its finish reason is ``stop`` or ``length``. If the recording has pseudonyms of the prompt
    tokens, the prompts consist of them, so that equal prefixes stay equal. Otherwise the prompts are random. Raises
    UsageError if no request is completed.
    """
    generator = random.Random(f"prompts/{options.seed}")
    found = []
    for stretch in read_recording(path):
        for arrival in arrivals(stretch):
            if arrival.end not in ("stop", "length") or not arrival.num_output_tokens:
                continue
            facts = arrival.facts
            prompt = arrival.prompt or some_tokens(facts["num_prompt_tokens"], generator)
            request = SimulatedRequest(
                prompt,
                facts["max_tokens"],
                arrival.num_output_tokens,
                facts.get("priority", 0),
                facts.get("tenant", ""),
                facts.get("ttft_objective"),
                facts.get("tbt_objective"),
            )
            found.append((facts["arrival_time"], request))
    if not found:
        raise UsageError(f"--trace: no request of {path} completed")
    found.sort(key=lambda pair: pair[0])
    start = found[0][0]
    return Arrivals([request for _, request in found], [moment - start for moment, _ in found])
