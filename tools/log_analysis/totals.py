"""Sums over a log: the latencies of requests, and the work of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from llm_serving.request import PARTS
from llm_serving.telemetry.statistics import Distribution, normalized_latency
from tools.log_analysis.records import EngineState, RequestEnd


@dataclass(slots=True)
class Phases:
    """Latencies of completed requests, in milliseconds."""

    parts: dict[str, Distribution] = field(default_factory=lambda: {part: Distribution() for part in PARTS})
    ttft: Distribution = field(default_factory=Distribution)
    tpot: Distribution = field(default_factory=Distribution)
    e2e: Distribution = field(default_factory=Distribution)
    normalized: Distribution = field(default_factory=Distribution)

    def add(self, end: RequestEnd) -> None:
        for distribution, value in (
            *((self.parts[part], getattr(end, f"{part}_ms")) for part in PARTS),
            (self.ttft, end.ttft_ms),
            (self.tpot, end.tpot_ms),
            (self.e2e, end.e2e_ms),
            (self.normalized, None if end.e2e_ms is None else normalized_latency(end.e2e_ms, end.output_tokens)),
        ):
            if value is not None:
                distribution.add(value)


@dataclass(slots=True)
class EngineTotals:
    """Sums over the periodic state lines of the engine."""

    lines: int = 0
    lines_with_queue: int = 0
    steps: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    mixed_steps: int = 0
    mixed_tokens: int = 0
    move_steps: int = 0
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    decode_rows: float = 0.0
    """Sum over all decode steps of their batch rows; divided by the steps, this is the mean batch."""

    def add(self, state: EngineState) -> None:
        """Adds a state line."""
        self.lines += 1
        self.lines_with_queue += state.waiting > 0
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(state, name))
        self.decode_rows += (state.decode_batch_mean or 0.0) * state.decode_steps

    @property
    def decode_batch_mean(self) -> float | None:
        return self.decode_rows / self.decode_steps if self.decode_steps else None


_SUMS = ("steps", "prefill_steps", "decode_steps", "mixed_steps", "move_steps", "prefill_tokens", "decode_tokens",
         "mixed_tokens", "prefix_hit_tokens", "prefix_query_tokens")  # fmt: skip
