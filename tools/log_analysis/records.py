"""Declares the log events whose fields are analysed. A field of a wrong type makes the log line unreadable."""

from __future__ import annotations

from typing import Annotated

import msgspec

from llm_serving.request import PARTS

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Milliseconds = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]

COMPLETED = ("stop", "length")
"""Finish reasons of completed requests."""


class RequestEnd(msgspec.Struct):
    """The event ``request_end``. Its ``parts`` add up to the total time ``e2e_ms``."""

    finish_reason: str
    request_id: str = "?"
    prompt_tokens: Count = 0
    output_tokens: Count = 0
    total_tokens: Count = 0
    cached_tokens: Count = 0
    tokenise_ms: Milliseconds | None = None
    queue_ms: Milliseconds | None = None
    prefill_ms: Milliseconds | None = None
    decode_ms: Milliseconds | None = None
    preempted_ms: Milliseconds | None = None
    swapped_ms: Milliseconds | None = None
    restarted_ms: Milliseconds | None = None
    delivery_ms: Milliseconds | None = None
    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    e2e_ms: Milliseconds | None = None
    preemptions: Count = 0
    swaps: Count = 0
    replica: Count | None = None
    blocked_ms: dict[str, Milliseconds] = {}
    blocked_by: list[str] = []
    objectives_met: dict[str, bool] = {}

    @property
    def parts(self) -> dict[str, float]:
        """Milliseconds of the request in queue, prefill, decode and the other ``PARTS``; 0 if the log has no value."""
        return {part: getattr(self, f"{part}_ms") or 0.0 for part in PARTS}

    @property
    def is_completed(self) -> bool:
        return self.finish_reason in COMPLETED


class EngineState(msgspec.Struct):
    """The engine's current state (running, waiting, blocks), and its work since the previous state line."""

    running: Count
    waiting: Count
    blocks_used: Count = 0
    blocks_total: Count = 0
    steps: Count = 0
    prefill_steps: Count = 0
    decode_steps: Count = 0
    prefill_tokens: Count = 0
    decode_tokens: Count = 0
    mixed_steps: Count = 0
    mixed_tokens: Count = 0
    move_steps: Count = 0
    decode_batch_mean: float | None = None
    output_tokens_per_s: float | None = None
    swapped: Count = 0
    kv_waste: float | None = None
    prefix_hit_tokens: Count = 0
    prefix_query_tokens: Count = 0
    preemptions: Count = 0
    fetched_bytes: Count = 0
    device_draws: Count = 0
    second_launches: Count = 0
    draft_tokens: Count = 0
    accepted_draft_tokens: Count = 0

    @property
    def kv_use(self) -> float | None:
        """Fraction of the KV blocks in use, or None if the log line does not state the number of blocks."""
        return self.blocks_used / self.blocks_total if self.blocks_total else None
