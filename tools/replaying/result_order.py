"""Checks that the agent ran its steps in an order that the policy of its queue allows.

The agent runs one step at a time and then returns its result. Steps enter the agent's queue in the order in which they
are sent. A step may overtake an earlier step only if the policy prefers its kind, for example a decode step to a
prefill step, or if it is a prefill step for light keys (``ScheduledStep.overtakes``).
"""

from __future__ import annotations

from llm_serving.scheduler.output import ScheduledStep, StepKind

__all__ = ["ResultOrder"]

_CLASSES = {StepKind.MOVE: "move", StepKind.PREFILL: "prefill", StepKind.MIXED: "prefill", StepKind.DECODE: "decode"}
_OVERTAKERS = {"prefill_first": "prefill", "decode_first": "decode"}
"""For each policy, the class of steps that may overtake other steps. Moves may overtake under every policy."""


class ResultOrder:
    """Records the steps in flight, and finds a step that a completed step has overtaken wrongly."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self._overtakes = _OVERTAKERS.get(policy)
        self._sent: dict[int, ScheduledStep] = {}

    def sent(self, step: ScheduledStep) -> None:
        """Records that a step was sent."""
        self._sent[step.seq] = step

    def lost(self) -> None:
        """Removes all steps, because the agent failed."""
        self._sent.clear()

    def completed(self, seq: int, *, ran: bool) -> int | None:
        """Removes a completed step. Returns an earlier step that should have run first, or None.

        ``ran`` is False for a step that was dropped, or that failed before it was sent. Its result may arrive in any
        order.
        """
        step = self._sent.pop(seq, None)
        if step is None or not ran:
            return None
        for earlier, overtaken in self._sent.items():
            if earlier > seq:
                break
            if not self._may_overtake(step, overtaken):
                return earlier
        return None

    def _may_overtake(self, step: ScheduledStep, overtaken: ScheduledStep) -> bool:
        kind, other = _CLASSES[step.kind], _CLASSES[overtaken.kind]
        if step.overtakes and other != "move":
            return not overtaken.overtakes
        if kind == other or other == "move":
            return False
        return kind in ("move", self._overtakes)
