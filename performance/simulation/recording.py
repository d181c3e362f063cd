"""What a flight recording knows of a device: how long its steps took, and what the server added.

A step's time is what its agent measured (graph and sampler) and the agent's own share, which the recording shows where
one step followed another at once: the time between their answers beyond what was measured. The rest of a step's way,
from the scheduler to its answer, is the host's: its mean is halved between the way to the agent and the way back. How
long requests took from their arrival to the queue is recorded, too, and which steps ran when they came. How long a
token was on its way to the client is what the client says, see ``with_delivery``.
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

LEAST_FOLLOWERS = 20
"""Steps that follow another at once, below which the agent's own share is not told from noise."""
MICROSECOND = 1e-6
Span = tuple[float, float]
"""Begin and end on the engine's clock, half open."""


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step that ran. Times are seconds on the engine's clock."""

    step: RecordedStep
    scheduled: float
    answered: float
    queue_s: float
    run_s: float
    """Graph and sampler."""

    @property
    def ways_s(self) -> float:
        """To the agent and back, with all that was neither the queue nor the step."""
        return self.answered - self.scheduled - self.queue_s - self.run_s

    @property
    def end(self) -> float:
        """When the agent had run it, if it was as long on the way there as back."""
        return self.answered - self.ways_s / 2

    @property
    def begin(self) -> float:
        return self.end - self.run_s


def timed_steps(stretch: Stretch) -> list[TimedStep]:
    """The steps that ran without fault, in the order of their answers."""
    return [
        TimedStep(
            step,
            scheduled,
            answer.now,
            answer.queue_us * MICROSECOND,
            (answer.graph_us + answer.sample_us) * MICROSECOND,
        )
        for step, scheduled, answer in completed_steps(stretch)
    ]


def fit_recording(path: Path, config: Config, repeated: Sequence[Sequence[Span]] = ()) -> StepFit:
    """A fit of the device and the host of a recording, a file or a folder, of a server with ``config``.

    ``repeated``: for each of some loads the spans in which it ran, the same each time. Only steps scheduled within are
    fitted then, and those of a span are taken as if the machine had been as fast as in the load's median span.

    Raises FlightRecordingError when it is none, UsageError when it holds too little."""
    stretches = read_recording(path)
    timed = [timed_steps(stretch) for stretch in stretches]
    requests = [arrivals(stretch) for stretch in stretches]
    own_s = _agents_share(timed)
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
    """How many times as long the steps of a recording took that were scheduled within one of ``spans`` (begin and end
    on the engine's clock) as such steps took in what was fitted. Raises as ``fit_recording`` does."""
    own_s = fit.provenance["agents_share_us"] * MICROSECOND
    steps = []
    for stretch in read_recording(path):
        timed = [each for each in timed_steps(stretch) if any(low <= each.scheduled < high for low, high in spans)]
        steps += _measured_steps(timed, arrivals(stretch), own_s)
    return slowdown(fit, steps)


def with_delivery(fit: StepFit, path: Path, records: Iterable[RequestRecord]) -> StepFit:
    """The fit of a recording with what its clients' ``records`` say of the way of a token to them: the median time from
    the engine's turn in which a request had its first token to when its first piece arrived. Both clocks are the
    machine's, where Python has one for both."""
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
    deliver_s = max(0.0, statistics.median(delays) - fit.host.answer_s)
    return replace(fit, host=replace(fit.host, deliver_s=deliver_s))


def _scheduled_within(span: Span, moments: Sequence[float], steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    low, high = span
    return [step for moment, step in zip(moments, steps, strict=True) if low <= moment < high]


def _count_between(moments: Sequence[float], begin: float, end: float) -> int:
    """How many of the sorted ``moments`` are in the half-open interval."""
    return bisect_left(moments, end) - bisect_left(moments, begin)


def _agents_share(timed: Iterable[Sequence[TimedStep]]) -> float:
    """Median time between answers beyond what the later step measured, where it had waited for the earlier."""
    gaps = []
    for run in timed:
        for earlier, later in pairwise(run):
            if later.queue_s > later.run_s / 100 and later.scheduled < earlier.answered < later.answered:
                gaps.append(later.answered - earlier.answered - later.run_s)
    return max(0.0, statistics.median(gaps)) if len(gaps) >= LEAST_FOLLOWERS else 0.0


def _measured_steps(timed: Iterable[TimedStep], requests: Iterable[Arrival], own_s: float) -> list[MeasuredStep]:
    """The steps as they ran, each with the ``requests`` that came meanwhile."""
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
    """With the mean of the ways: what single ones take longer when the cores are busy adds up, too."""
    ways = [each.ways_s - own_s - host.send_s - host.send_seq_s * each.step.num_seqs for each in timed]
    way_s = max(0.0, statistics.fmean(ways)) / 2
    return replace(host, to_agent_s=way_s, from_agent_s=way_s)


def _with_edge(host: HostModel, requests: Iterable[Arrival]) -> HostModel:
    """What the event loop adds: to a request that came as long as it was recorded to, to a piece that leaves, of which
    nothing is recorded, no less than waking another thread of this server took."""
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
    """The requests of a recording that came to their end, with the recorded lengths, priorities and objectives.

    Prompts are the recorded pseudonyms, where there are any: equal prefixes are equal. Raises UsageError when no
    request ended.
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
        raise UsageError(f"--trace: no request of {path} came to its end")
    found.sort(key=lambda pair: pair[0])
    start = found[0][0]
    return Arrivals([request for _, request in found], [moment - start for moment, _ in found])
