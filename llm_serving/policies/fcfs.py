"""Policy ``fcfs``: steps run in the order in which they were scheduled."""

from __future__ import annotations

from llm_serving.policies.prefill_first import PromptsFirst


class Fcfs(PromptsFirst):
    """``fcfs``: prefill and decode steps alternate, and the agent runs them in the order in which they were scheduled.

    At most ``MAX_PREFILL_STEPS_IN_FLIGHT`` prefill steps come between two decode steps. So the time between tokens of
    running requests varies little, but new requests wait a little longer for their first token.
    """

    def _is_decode_due(self) -> bool:
        return self._state.in_flight.num_decode_steps <= self._state.limits.decode_steps_ahead
