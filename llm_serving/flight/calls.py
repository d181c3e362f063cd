"""Calls of ``schedule`` and ``update`` as they are taken down, until records are made of them."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from llm_serving.flight.counts import Counts
from llm_serving.flight.format import Tag

__all__ = ["ANSWER", "CALLS_OF_A_TURN", "NOTHING", "SCHEDULE", "UPDATE", "Call"]

SCHEDULE, UPDATE = int(Tag.SCHEDULE), int(Tag.UPDATE)
"""Of the records of every turn: a plain number is written in a tenth of the time of an enumeration's member."""
NOTHING = -1
"""``schedule`` had no step."""
CALLS_OF_A_TURN = 3
"""Where nothing but decoding goes on: an answer, a step, and nothing more to send."""
ANSWER = attrgetter(
    "seq", "sampled_ids", "logits", "logsumexps", "error", "aborted", "queue_us", "graph_us", "sample_us"
)
"""What is recorded of an answer."""

Call = tuple[int, float, Any, Any, Any, Counts | None]
"""Tag, time, step or answer, lengths of the step's block tables or the answer's updates (where tokens have names),
wake-up or outcome, counts afterwards."""
