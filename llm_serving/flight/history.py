"""Follows steps and requests through a recorded stretch.

``step_timings`` returns data to fit a cost model of the device. ``arrivals`` returns a load that can run again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from llm_serving.flight.reader import (
    Added,
    AgentLost,
    Completed,
    FailedAll,
    Finished,
    Released,
    Scheduled,
    Stretch,
    TookEnded,
)
from llm_serving.flight.steps import RecordedStep
from llm_serving.scheduler.output import StepKind


@dataclass(frozen=True, slots=True)
class StepTiming:
    """The work of a step and the device's time for it. Times are seconds on the engine's clock."""

    seq: int
    kind: StepKind
    num_seqs: int
    num_tokens: int
    num_prompt_tokens: int
    """Tokens of the sequences that have more than one token in this step."""
    num_context_tokens: int
    """Tokens whose keys and values its attention reads: the contexts of its sequences."""
    num_moves: int
    scheduled: float
    answered: float
    queue_us: int
    graph_us: int
    sample_us: int


@dataclass(slots=True)
class Arrival:
    """A recorded request: its arrival, its lengths and its outcome."""

    number: int
    facts: dict[str, Any]
    prompt: list[int] | None
    refusal: str | None
    num_output_tokens: int = 0
    """Output tokens in the recording, including those that it arrived with."""
    end: str | None = None
    """``stop``, ``length``, ``abort``, ``error``, or ``moved`` if it moved to another replica. None if it had not ended
    by the end of the recording."""
    end_time: float | None = None
    first_token_time: float | None = None
    token_times: list[float] = field(default_factory=list)
    names: list[int] = field(default_factory=list)
    """Pseudonyms of its output tokens, if the recording has them."""


def completed_steps(stretch: Stretch) -> Iterator[tuple[RecordedStep, float, Completed]]:
    """Yields the steps that ran without a fault, with their scheduling time, in the order of their results."""
    sent: dict[int, tuple[float, RecordedStep]] = {}
    for event in stretch.events():
        if isinstance(event, Scheduled) and event.step is not None:
            sent[event.step.seq] = (event.now, event.step)
        elif isinstance(event, AgentLost):
            sent.clear()
        elif isinstance(event, Completed) and event.seq in sent:
            scheduled, step = sent.pop(event.seq)
            if event.fault is None:
                yield step, scheduled, event


def step_timings(stretch: Stretch) -> list[StepTiming]:
    """Returns the work and the times of each of ``completed_steps``."""
    return [_timing(*answered) for answered in completed_steps(stretch)]


def _timing(step: RecordedStep, scheduled: float, answer: Completed) -> StepTiming:
    return StepTiming(
        seq=step.seq,
        kind=step.kind,
        num_seqs=step.num_seqs,
        num_tokens=step.num_tokens,
        num_prompt_tokens=sum(length for length in step.query_lens if length > 1),
        num_context_tokens=step.num_context_tokens,
        num_moves=len(step.moves),
        scheduled=scheduled,
        answered=answer.now,
        queue_us=answer.queue_us,
        graph_us=answer.graph_us,
        sample_us=answer.sample_us,
    )


def arrivals(stretch: Stretch) -> list[Arrival]:
    """Returns the requests that arrived during a stretch, in order, with their recorded outcome.

    Requests that arrived before the stretch are left out.
    """
    return _Arrivals().of(stretch)


class _Arrivals:
    """Follows the tokens and ends of requests in the same way as the scheduler."""

    def __init__(self) -> None:
        self._found: dict[int, Arrival] = {}
        self._sent: dict[int, RecordedStep] = {}
        self._max_model_len = 0

    def of(self, stretch: Stretch) -> list[Arrival]:
        self._max_model_len = stretch.header.limits["max_model_len"]
        for event in stretch.events():
            if isinstance(event, Added):
                self._found[event.number] = Arrival(
                    event.number, event.facts, event.prompt, event.refusal, num_output_tokens=len(event.output or ())
                )
            elif isinstance(event, Released):
                for number in event.numbers:
                    if number in self._found:
                        self._end(self._found[number], "moved", event.now)
            elif isinstance(event, Scheduled) and event.step is not None:
                self._sent[event.step.seq] = event.step
            elif isinstance(event, Completed) and event.seq in self._sent:
                self._take(self._sent.pop(event.seq), event)
            elif isinstance(event, Finished) and event.was_there and event.number in self._found:
                self._end(self._found[event.number], event.reason.lower(), event.now)
            elif isinstance(event, AgentLost):
                self._sent.clear()
            elif isinstance(event, TookEnded):
                for number in event.numbers:
                    if number in self._found:
                        self._end(self._found[number], "abort", event.now)
            elif isinstance(event, FailedAll):
                for arrival in self._found.values():
                    self._end(arrival, "error", event.now)
        return list(self._found.values())

    def _take(self, step: RecordedStep, answer: Completed) -> None:
        failed = answer.fault is not None and not answer.fault[0]
        for index, number in enumerate(step.numbers):
            arrival = self._found.get(number)
            if arrival is None or arrival.end is not None:
                continue
            if failed:
                self._end(arrival, "error", answer.now)
            elif answer.fault is None and step.do_sample[index]:
                name = None if answer.names is None else answer.names[index]
                self._token(arrival, step.sample_positions[index], index in answer.ends, answer.now, name)

    def _token(self, arrival: Arrival, position: int, is_ending: bool, now: float, name: int | None) -> None:
        if position != arrival.num_output_tokens:  # the step was void, so the token is computed again
            return
        arrival.num_output_tokens += 1
        arrival.token_times.append(now)
        if name is not None:
            arrival.names.append(name)
        if arrival.first_token_time is None:
            arrival.first_token_time = now
        if is_ending:
            self._end(arrival, "stop", now)
        elif arrival.num_output_tokens >= min(
            arrival.facts["max_tokens"], self._max_model_len - arrival.facts["num_prompt_tokens"]
        ):
            self._end(arrival, "length", now)

    def _end(self, arrival: Arrival, end: str, now: float) -> None:
        if arrival.end is None and arrival.refusal is None:
            arrival.end, arrival.end_time = end, now
