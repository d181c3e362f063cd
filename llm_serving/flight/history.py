"""Finds the completed steps and the requests of a flight recording, each with its times.

``completed_steps`` yields the data to which a cost model of the device can be fitted. ``arrivals`` returns the recorded
load, so that a benchmark can repeat it.
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


@dataclass(slots=True)
class Arrival:
    """A request of a flight recording: its arrival, its lengths and its outcome."""

    number: int
    facts: dict[str, Any]
    prompt: list[int] | None
    refusal: str | None
    num_output_tokens: int = 0
    """Number of output tokens, including those that the request brought from another replica."""
    end: str | None = None
    """Outcome: ``stop``, ``length``, ``abort``, ``error``, or ``moved`` to another replica. None: it has not ended."""
    end_time: float | None = None
    first_token_time: float | None = None
    token_times: list[float] = field(default_factory=list)
    names: list[int] = field(default_factory=list)
    """Pseudonyms of the output tokens, if the recording has them."""


def completed_steps(stretch: Stretch) -> Iterator[tuple[RecordedStep, float, Completed]]:
    """Yields (step, scheduling time, result) of each step that ran without a fault, in the order of the results."""
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


def arrivals(stretch: Stretch) -> list[Arrival]:
    """Returns the requests that arrived during ``stretch`` (consecutive segments), in order, with their outcome."""
    return _Arrivals().of(stretch)


class _Arrivals:
    """Finds the output tokens and the end of each recorded request. It follows the same rules as the scheduler."""

    def __init__(self) -> None:
        self._found: dict[int, Arrival] = {}
        self._sent: dict[int, RecordedStep] = {}
        self._max_model_len = 0

    def of(self, stretch: Stretch) -> list[Arrival]:
        self._max_model_len = stretch.header.limits["max_model_len"]
        suspects: set[int] = set()
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
                suspects.clear()
            elif isinstance(event, Completed) and event.seq in self._sent:
                self._take(self._sent.pop(event.seq), event)
            elif isinstance(event, Finished) and event.was_there and event.number in self._found:
                self._end(self._found[event.number], event.reason.lower(), event.now)
            elif isinstance(event, AgentLost):
                in_flight = {number for step in self._sent.values() for number in step.numbers}
                suspects = set() if event.blameless else in_flight
                self._sent.clear()
            elif isinstance(event, TookEnded):
                for number in event.numbers:
                    if number in self._found:
                        self._end(self._found[number], "error" if number in suspects else "abort", event.now)
                suspects.clear()
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
            elif answer.fault is None and step.do_sample[index] and index not in answer.rejected:
                name = None if answer.names is None else answer.names[index]
                self._token(arrival, step.sample_positions[index], index in answer.ends, answer.now, name)

    def _token(self, arrival: Arrival, position: int, is_ending: bool, now: float, name: int | None) -> None:
        # If ``position`` is not the next one of the request, the step's result is void. A later step computes the token
        # again.
        if position != arrival.num_output_tokens:
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
