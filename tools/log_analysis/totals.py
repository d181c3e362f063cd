"""Collects totals over a log: distributions of the requests' latencies, and sums of the engine's work."""

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

    def named(self) -> list[tuple[str, Distribution]]:
        """Returns the distributions in the order of a report, with their titles."""
        return [
            *((part, self.parts[part]) for part in PARTS),
            ("time to first token", self.ttft),
            ("time per output token", self.tpot),
            ("end to end", self.e2e),
            ("normalized (per output token)", self.normalized),
        ]

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


SUMS = ("steps", "prefill_steps", "decode_steps", "prefill_tokens", "decode_tokens", "mixed_steps", "mixed_tokens",
        "move_steps", "prefix_hit_tokens", "prefix_query_tokens")  # fmt: skip
"""Fields of ``EngineState`` that count the work since the previous state line."""


class EngineTotals:
    """Adds up the engine's periodic log lines about its state. ``sums`` has a sum for each name in ``SUMS``."""

    def __init__(self) -> None:
        self.lines = 0
        self.sums = dict.fromkeys(SUMS, 0)
        self._decode_rows = 0.0

    def add(self, state: EngineState) -> None:
        self.lines += 1
        for name in SUMS:
            self.sums[name] += getattr(state, name)
        self._decode_rows += (state.decode_batch_mean or 0.0) * state.decode_steps

    @property
    def decode_batch_mean(self) -> float | None:
        """Mean number of batch rows over all decode steps, or None without decode steps."""
        return self._decode_rows / self.sums["decode_steps"] if self.sums["decode_steps"] else None
