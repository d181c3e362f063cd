"""Saves and restores the state of a scheduler as plain data: numbers, texts, bytes, lists and dicts.

Each part of the scheduler with state is ``Stateful``. A snapshot contains decisions and counters only. Links between
the parts are not part of it, because ``restore`` works on a new scheduler, whose constructor has made them. A sequence
is represented by its arrival index. The flight recorder writes a snapshot at the start of each segment.
"""

from __future__ import annotations

from typing import Any, Protocol

from llm_serving.kvcache.prefix_chain import PrefixChain
from llm_serving.kvcache.prefix_index import PrefixIndex
from llm_serving.request import Request
from llm_serving.scheduler.sequence import Sequence

__all__ = ["RequestCodec", "Sequences", "Stateful"]

Sequences = dict[int, Sequence]
"""Restored sequences by arrival index."""


class Stateful(Protocol):
    """A part of the scheduler with state of its own."""

    def snapshot(self) -> Any:
        """Returns the state as plain data that later calls do not change."""

    def restore(self, state: Any, sequences: Sequences) -> None:
        """Restores what ``snapshot`` returned. The part must be new. It may keep the containers in ``state``."""


class RequestCodec(Protocol):
    """Decides what a snapshot contains of requests and tokens."""

    def save_request(self, request: Request) -> Any:
        """Returns a request as plain data."""

    def load_request(self, state: Any) -> Request:
        """Returns the request that ``save_request`` saved."""

    def block_contents(self, index: PrefixIndex) -> list[bytes]:
        """Returns the packed tokens of each block."""

    def chain_tokens(self, chain: PrefixChain, request: Request) -> bytes:
        """Returns the packed tokens of a request's prefix chain."""
