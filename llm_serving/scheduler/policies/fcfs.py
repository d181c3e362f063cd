"""``fcfs``: steps run in the order they were scheduled, prefill and decode take turns.

A prefill never overtakes a decode step queued before it, and at most ``MAX_PREFILL_STEPS_IN_FLIGHT`` prefills come
between two decodes: running requests keep a steady pace, new ones wait a little longer for their first token.
"""

from __future__ import annotations

from llm_serving.scheduler.policies.prompts_first import PromptsFirst

__all__ = ["Fcfs"]


class Fcfs(PromptsFirst):
    """A decode step is put together when no more than ``decode_steps_ahead`` decode steps are unanswered."""

    def _decode_is_due(self) -> bool:
        return self._state.in_flight.num_decode_steps <= self._state.limits.decode_steps_ahead
