"""``prefill_first``: a new request gets its first token as soon as the step that is running ends.

The agent runs queued prefill steps before queued decode steps. Running requests stand still while prefills are
queued (bounded, see ``prefill_streak_limit``), then decode in larger batches, which is where throughput comes from.
"""

from __future__ import annotations

from llm_serving.scheduler.policies.prompts_first import PromptsFirst

__all__ = ["PrefillFirst"]


class PrefillFirst(PromptsFirst):
    """Decode steps would only lie in the agent's queue behind the prefills, so the next one is put together when no
    more than ``decode_steps_ahead`` steps of any kind are unanswered: by then it holds the rows just prefilled, too.
    """

    def _decode_is_due(self) -> bool:
        return self._state.in_flight.num_compute_steps <= self._state.limits.decode_steps_ahead
