"""Which prompts, or parts of prompts, a step computes, while it is being put together."""

from __future__ import annotations

from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.sequence import Sequence

__all__ = ["ChunkPlan"]


class ChunkPlan:
    """The chunks of one step: the next known tokens of a sequence each, as many as there is room for."""

    def __init__(self, limits: SchedulerLimits, num_tokens: int, num_history_tokens: int = 0) -> None:
        """Room for ``num_tokens``; ``num_history_tokens`` of what a step can carry are taken."""
        self.sequences: list[Sequence] = []
        self.query_lens: list[int] = []
        self.room = num_tokens
        self._max_sequences = limits.prefill_batch_size
        self._history_room = limits.max_step_history - num_history_tokens

    def __bool__(self) -> bool:
        return bool(self.sequences)

    @property
    def is_full(self) -> bool:
        return self.room <= 0 or len(self.sequences) >= self._max_sequences

    def takes(self, sequence: Sequence, num_uncomputed_tokens: int) -> bool:
        """Whether there is room for the next tokens of ``sequence``, of which so many are not computed: a token at
        least, and if they are the last, for the history that the sampler needs with them."""
        if self.is_full:
            return False
        needs_history = num_uncomputed_tokens <= self.room and sequence.request.sampling.has_penalties
        return not needs_history or sequence.request.num_tokens <= self._history_room

    def add(self, sequence: Sequence) -> None:
        """The next tokens of a sequence that the plan ``takes``."""
        uncomputed = sequence.num_uncomputed_tokens
        query_len = min(uncomputed, self.room)
        self.sequences.append(sequence)
        self.query_lens.append(query_len)
        self.room -= query_len
        if query_len == uncomputed and sequence.request.sampling.has_penalties:
            self._history_room -= sequence.request.num_tokens
