"""The periodic ``engine_state`` line of the event log."""

from __future__ import annotations

from typing import Any

from llm_serving.ipc.drafts import REJECTED
from llm_serving.routing.sources import RequestFront
from llm_serving.scheduler.figures import Figures
from llm_serving.scheduler.output import ScheduledStep, StepKind, StepResult


class StateLine:
    """Counts steps and tokens for the next ``engine_state`` line of the log. Without changes, no line is written."""

    def __init__(self, front: RequestFront, interval_s: float) -> None:
        self._front = front
        self._interval_s = interval_s
        self._last = Figures()
        self._since: float | None = None
        self._clear()

    def changed(self, now: float) -> None:
        """Records that a line is due, because a request was added or removed, or a step completed."""
        if self._since is None:
            self._since = now

    def step(self, step: ScheduledStep, result: StepResult, num_output_tokens: int, now: float) -> None:
        """Counts a completed step."""
        self.changed(now)
        self._steps[step.kind] += 1
        self._tokens[step.kind] += step.num_tokens
        self._output_tokens += num_output_tokens
        self._fetched_bytes += result.fetched_bytes
        self._device_draws += result.device_draws
        self._second_launches += result.second_launches
        if step.num_drafts and result.sampled_ids:
            self._draft_tokens += step.num_drafts
            self._accepted_tokens += step.num_drafts - result.sampled_ids.count(REJECTED)

    @property
    def due(self) -> float | None:
        """Engine time at which the next line must be written. None while nothing has changed."""
        return None if self._since is None else self._since + self._interval_s

    def take(self, now: float) -> dict[str, Any]:
        """Returns the fields of the next ``engine_state`` line, and sets all counts to 0."""
        figures, last, steps, tokens = self._front.figures, self._last, self._steps, self._tokens
        seconds = now - (self._since if self._since is not None else now)
        fields: dict[str, Any] = {
            "running": figures.running,
            "waiting": figures.waiting,
            "blocks_used": figures.used_blocks,
            "blocks_total": figures.total_blocks,
            "steps": sum(steps.values()),
            "prefill_steps": steps[StepKind.PREFILL],
            "decode_steps": steps[StepKind.DECODE],
            "mixed_steps": steps[StepKind.MIXED],
            "move_steps": steps[StepKind.MOVE],
            "prefill_tokens": tokens[StepKind.PREFILL],
            "decode_tokens": tokens[StepKind.DECODE],
            "mixed_tokens": tokens[StepKind.MIXED],
            "decode_batch_mean": round(tokens[StepKind.DECODE] / max(steps[StepKind.DECODE], 1), 3),
            "output_tokens_per_s": round(self._output_tokens / seconds, 3) if seconds > 0 else 0.0,
            "preemptions": figures.preemptions - last.preemptions,
            "swaps": figures.swaps - last.swaps,
            "swapped": figures.swapped,
            "kv_waste": round(figures.kv_waste, 4),
            "prefix_hit_tokens": figures.prefix_hit_tokens - last.prefix_hit_tokens,
            "prefix_query_tokens": figures.prefix_query_tokens - last.prefix_query_tokens,
            "fetched_bytes": self._fetched_bytes,
            "device_draws": self._device_draws,
            "second_launches": self._second_launches,
            "draft_tokens": self._draft_tokens,
            "accepted_draft_tokens": self._accepted_tokens,
        }
        self._last = figures
        self._since = None if self._front.is_idle else now
        self._clear()
        return fields

    def _clear(self) -> None:
        self._steps = dict.fromkeys(StepKind, 0)
        self._tokens = dict.fromkeys(StepKind, 0)
        self._output_tokens = self._fetched_bytes = self._draft_tokens = self._accepted_tokens = 0
        self._device_draws = self._second_launches = 0
