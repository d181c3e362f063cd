"""Whether the agent ran steps in an order that its queue's policy allows, seen from the order of its answers.

The agent runs one step at a time and answers each when it has run, and a step that was sent earlier was in its queue
earlier. So of two steps the later one may be answered first only where its class goes before the other's.
"""

from __future__ import annotations

from llm_serving.scheduler.output import StepKind

__all__ = ["AnswerOrder"]

_CLASSES = {StepKind.MOVE: "move", StepKind.PREFILL: "prefill", StepKind.MIXED: "prefill", StepKind.DECODE: "decode"}
_OVERTAKERS = {"prefill_first": "prefill", "decode_first": "decode"}
"""The class that goes before the other, by policy; under the others steps run first come, first served."""


class AnswerOrder:
    """Steps that were sent and not answered. ``answered`` gives what was overtaken against the rule."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self._overtakes = _OVERTAKERS.get(policy)
        self._sent: dict[int, StepKind] = {}

    def sent(self, seq: int, kind: StepKind) -> None:
        self._sent[seq] = kind

    def lost(self) -> None:
        """The agent is gone, and its queue."""
        self._sent.clear()

    def answered(self, seq: int, *, ran: bool) -> int | None:
        """The answer to a step. Gives an earlier step that should have run before it. ``ran`` is False for a step that
        was dropped, or failed before it was sent: those are answered at once."""
        kind = self._sent.pop(seq, None)
        if kind is None or not ran:
            return None
        for earlier, overtaken in self._sent.items():
            if earlier > seq:
                break
            if not self._may_overtake(_CLASSES[kind], _CLASSES[overtaken]):
                return earlier
        return None

    def _may_overtake(self, kind: str, overtaken: str) -> bool:
        if kind == overtaken or overtaken == "move":
            return False
        return kind in ("move", self._overtakes)
