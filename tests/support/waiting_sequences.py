"""Makes sequences and intakes for tests of the waiting queue."""

from __future__ import annotations

from itertools import count
from typing import Any

from llm_serving.scheduler.sequence import Sequence
from llm_serving.waiting.intake import Intake
from llm_serving.waiting.queue_order import QueueOrder
from support.fakes import make_limits, make_request

__all__ = ["Arrivals", "drain", "make_intake", "pop", "put"]


class Arrivals:
    """Makes sequences and numbers them in order of arrival."""

    def __init__(self) -> None:
        self._indexes = count()

    def next(self, prompt: int = 5, arrival: float = 0.0, max_tokens: int = 8, **fields: Any) -> Sequence:
        """Returns the next sequence. Further arguments are fields of its request."""
        index = next(self._indexes)
        request = make_request(str(index), prompt, max_tokens, arrival=arrival)
        for name, value in fields.items():
            setattr(request, name, value)
        return Sequence(request, index, max_tokens)


def make_intake(
    max_requests: int = 8, max_tokens: int | None = None, order: QueueOrder | None = None, **others: Any
) -> Intake:
    """Returns an empty intake with these admission limits."""
    limits = make_limits(max_waiting_requests=max_requests, max_waiting_tokens=max_tokens, **others)
    return Intake(limits, QueueOrder() if order is None else order)


def put(intake: Intake, *sequences: Sequence) -> None:
    """Puts new sequences into the queue without checking the admission limits."""
    for sequence in sequences:
        intake.sequences[sequence.request.request_id] = sequence
        intake.enqueue(sequence, None)


def pop(intake: Intake, now: float = 0.0) -> Sequence:
    """Starts the first waiting sequence."""
    sequence = intake.peek(now)
    intake.start(sequence, now)
    return sequence


def drain(intake: Intake, now: float = 0.0) -> list[int]:
    """Starts all waiting sequences. Returns their arrival indexes in the order of their starts."""
    return [pop(intake, now).arrival_index for _ in range(len(intake))]
