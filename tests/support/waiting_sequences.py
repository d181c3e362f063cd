"""Sequences for tests of what waits: who sent them, when, and how urgent they are."""

from __future__ import annotations

from itertools import count
from typing import Any

from llm_serving.scheduler.intake import RequestQueue
from llm_serving.scheduler.sequence import Sequence
from support.fakes import make_request

__all__ = ["Arrivals", "drain"]


class Arrivals:
    """Makes sequences and numbers them as they arrive."""

    def __init__(self) -> None:
        self._indexes = count()

    def next(self, prompt: int = 5, arrival: float = 0.0, max_tokens: int = 8, **fields: Any) -> Sequence:
        """The next sequence; further arguments are fields of its request."""
        index = next(self._indexes)
        request = make_request(str(index), prompt, max_tokens, arrival=arrival)
        for name, value in fields.items():
            setattr(request, name, value)
        return Sequence(request, index, max_tokens)


def drain(queue: RequestQueue, now: float = 0.0) -> list[int]:
    """Start everything: the arrival indexes in order."""
    return [queue.pop(now).arrival_index for _ in range(len(queue))]
