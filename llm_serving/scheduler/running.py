"""The sequences that have a batch row and blocks: running and leaving sequences.

Only running sequences get new steps. A leaving sequence has ended or was preempted, but steps in flight still use its
blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from llm_serving.block_supply.base import BlockSupply
from llm_serving.kvcache.kv_cache_manager import KVCacheManager
from llm_serving.scheduler.sequence import HandOverState, Sequence, SequenceState
from llm_serving.scheduler.snapshot import Stateful


class RunningSet(Stateful):
    """The running and leaving sequences, with their batch rows and blocks.

    ``start`` and ``grow`` give batch rows and blocks to a sequence, ``release`` takes them back.
    """

    STATE = ("_free_rows", "_running", "_leaving", "_prefilling", "num_changes")

    def __init__(self, kv_cache: KVCacheManager, supply: BlockSupply, max_num_seqs: int) -> None:
        self._kv_cache = kv_cache
        self._supply = supply
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._running: dict[int, Sequence] = {}
        self._leaving: dict[int, Sequence] = {}
        self._prefilling: dict[int, Sequence] = {}
        self.num_changes = 0
        """Number of times that a sequence started or stopped. While the number stays the same, each batch row keeps its
        sequence.
        """

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterates over the running sequences in order of arrival."""
        return iter(self._running.values())

    @property
    def prefilling(self) -> list[Sequence]:
        """Running sequences with known tokens that no completed or sent step computes, in order of arrival."""
        prefilling = self._prefilling
        return [prefilling[index] for index in sorted(prefilling)] if len(prefilling) > 1 else [*prefilling.values()]

    @property
    def num_prefilling(self) -> int:
        return len(self._prefilling)

    @property
    def leaving(self) -> list[Sequence]:
        return list(self._leaving.values())

    @property
    def holders(self) -> list[Sequence]:
        """The running and leaving sequences, as a copy. Any thread may read it."""
        # Unpacking copies each dictionary in C code. In a loop in Python, the engine thread could change it meanwhile.
        return [*self._running.values(), *self._leaving.values()]

    @property
    def num_leaving(self) -> int:
        return len(self._leaving)

    @property
    def free_rows(self) -> list[int]:
        return list(self._free_rows)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def has_preempted_leaving(self) -> bool:
        """True if a leaving sequence was preempted. When its steps in flight complete, it waits again or is swapped."""
        return any(is_preempted(sequence) for sequence in self._leaving.values())

    @property
    def num_leaving_blocks(self) -> int:
        """Number of blocks that become free when the steps in flight complete, unless other sequences share them.

        They are the blocks of leaving sequences, the source blocks of copies, and the blocks that steps copy to or from
        KV tiers.
        """
        held = sum(len(sequence.block_table) for sequence in self._leaving.values())
        return held + self._kv_cache.num_copies_under_way + self._kv_cache.num_lent

    @property
    def victim(self) -> Sequence:
        """The running sequence to preempt next: the one that arrived last among those with the least urgent priority.

        The oldest running sequence is left out, unless it is the only one.
        """
        others = islice(self._running.values(), 1, None)
        latest = self._running[next(reversed(self._running))]
        return max(others, key=lambda sequence: (sequence.request.priority, sequence.arrival_index), default=latest)

    def reserve(self, watermark_blocks: int) -> int:
        """Returns the number of blocks that must stay free when a sequence starts or returns from the host.

        If no sequence runs, the number is 0. Otherwise it is at least one block for each running sequence. So a new
        sequence cannot take the blocks that a preemption has just freed, and the oldest sequence always gets its next
        token. The number is also at least ``watermark_blocks``. With fewer free blocks, running sequences would soon
        need blocks for their next tokens, and preempt the new sequence.
        """
        return max(len(self._running), watermark_blocks) if self._running else 0

    def start(self, sequence: Sequence) -> None:
        """Gives a batch row and blocks to a waiting sequence. The caller must have checked that enough are free."""
        self._supply.start(sequence)
        self.enter(sequence)
        self.start_prefill(sequence)

    def enter(self, sequence: Sequence) -> None:
        """Gives a batch row to a sequence that has blocks, and makes it RUNNING."""
        self.num_changes += 1
        sequence.request.row = self._free_rows.pop()
        sequence.state = SequenceState.RUNNING
        sequence.restarts = True
        in_order = not self._running or next(reversed(self._running)) < sequence.arrival_index
        self._running[sequence.arrival_index] = sequence
        if not in_order:
            self._running = dict(sorted(self._running.items()))

    def start_prefill(self, sequence: Sequence) -> None:
        """Marks a running sequence as in prefill: known tokens must still be computed."""
        self._prefilling[sequence.arrival_index] = sequence

    def end_prefill(self, sequence: Sequence) -> None:
        """Marks a sequence as decoding: its known tokens are computed, or steps in flight compute them.

        If another replica will decode the sequence, only its prefill ends, and it is not marked as decoding.
        """
        self._prefilling.pop(sequence.arrival_index, None)
        sequence.is_decoding = sequence.hand_over is not HandOverState.WANTED

    def is_prefilling(self, sequence: Sequence) -> bool:
        return sequence.arrival_index in self._prefilling

    def in_need_of_block(self, sequences: list[Sequence]) -> list[Sequence]:
        """Returns the sequences whose blocks are full, so that their next token needs another block."""
        size = self._kv_cache.block_size
        return [s for s in sequences if s.request.num_computed_tokens >= len(s.block_table) * size]

    def grow(self, sequence: Sequence) -> bool:
        """Gives a sequence a block for its next token. Returns False if no block is free."""
        return self._kv_cache.grow(sequence.block_table, sequence.request.num_computed_tokens + 1)

    def stop(self, sequence: Sequence) -> None:
        """Makes a running sequence LEAVING. It keeps its batch row and blocks until ``release``."""
        self.num_changes += 1
        del self._running[sequence.arrival_index]
        self._prefilling.pop(sequence.arrival_index, None)
        self._leaving[sequence.arrival_index] = sequence
        sequence.state = SequenceState.LEAVING

    def release(self, sequence: Sequence) -> None:
        """Takes the batch row and the blocks of a LEAVING sequence back. No step in flight may use them."""
        if sequence.num_inflight_steps:
            raise AssertionError(f"{sequence.num_inflight_steps} steps in flight use the blocks that would become free")
        del self._leaving[sequence.arrival_index]
        self._supply.release(sequence, computed=not sequence.drop_tokens)
        self._free_rows.append(sequence.request.row)
        sequence.leave_device()


def is_preempted(leaving: Sequence) -> bool:
    """Returns True if a LEAVING sequence was preempted, False if it has ended or leaves for another replica."""
    return not leaving.request.is_finished and leaving.hand_over is not HandOverState.LEAVING
