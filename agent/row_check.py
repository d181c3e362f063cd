"""The row check: tests whether a sequence has the same logits in a batch and alone."""

from __future__ import annotations

from agent.scores import DeviceScores, StepLogits, score_bits
from llm_serving.errors import AgentError
from llm_serving.ipc.shm import NOT_FINITE, StepSlot


class RowCheckError(AgentError):
    """A check failed: a sequence's logits in a batch differ from those of a step with this sequence alone.

    The agent computes wrong results and must be restarted.
    """


class RowCheck:
    """The row check of one decode step: compares a sequence's logits with those of a step with this sequence alone.

    ``whole`` is False if the agent has only a part of the vocabulary.
    """

    def __init__(self, slot: StepSlot, *, whole: bool) -> None:
        self.index = slot.checked_row - 1
        """Index of the sequence in the step's arrays."""
        self._slot = slot
        self._whole = whole
        self._first: bytes | None = None

    def keep(self, scores: StepLogits | DeviceScores) -> None:
        """Copies the bits of the sequence's logits, because the next step and the draft model may overwrite the logits.

        Agents that do not call this method do not compare.
        """
        if self._slot.sampled_ids[self.index] != NOT_FINITE:
            self._first = score_bits(scores, self.index, whole=self._whole)

    def compare(self, again: StepLogits | DeviceScores) -> None:
        """Raises RowCheckError unless ``again``, the scores of the sequence alone, have the same bits."""
        if self._first is not None and self._first != score_bits(again, 0, whole=self._whole):
            raise RowCheckError(
                f"sequence {self.index} of {self._slot.num_seqs} has other logits in step {self._slot.seq} than if it "
                "is computed alone"
            )
