"""The row check: tests whether a sequence has the same logits in a batch and alone."""

from __future__ import annotations

from agent.scores import DeviceScores, StepLogits, score_bits
from llm_serving.errors import AgentError
from llm_serving.ipc.shm import StepSlot


class RowCheckError(AgentError):
    """A check failed: a sequence's logits in a batch differ from those of a step with this sequence alone.

    The agent computes wrong results and must be restarted.
    """


class RowCheck:
    """The row check of one decode step: compares a sequence's logits with those of a step with this sequence alone.

    The constructor copies the bits of the sequence's logits, because the next step overwrites the logits. ``scores``
    has the logits, or is None if this agent does not compare. ``whole`` is False if the agent has only a part of the
    vocabulary.
    """

    def __init__(self, slot: StepSlot, scores: StepLogits | DeviceScores | None, *, whole: bool) -> None:
        self._index = slot.checked_row - 1
        self._slot = slot
        self._whole = whole
        self._first = None if scores is None else score_bits(scores, self._index, whole=whole)

    def compare(self, again: StepLogits | DeviceScores) -> None:
        """Raises RowCheckError unless ``again``, the scores of the sequence alone, have the same bits."""
        if self._first is not None and self._first != score_bits(again, 0, whole=self._whole):
            raise RowCheckError(
                f"sequence {self._index} of {self._slot.num_seqs} has other logits in step {self._slot.seq} than if it "
                "is computed alone"
            )
