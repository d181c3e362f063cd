"""Lists the cache blocks that a step reads, for graphs that gather them (``OpTable.gathers_blocks``)."""

from __future__ import annotations

import numpy as np

from agent.step_inputs import Int32Array
from llm_serving.config import Config


class StepBlocks:
    """Lists the blocks of a step, and makes block tables whose entries are indices of this list.

    A block that several sequences share is in the list only once. So the list is never longer than the cache.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._places: Int32Array = np.zeros(num_blocks, np.int32)
        self._is_read = np.zeros(num_blocks, np.bool_)

    @classmethod
    def of_config(cls, config: Config) -> StepBlocks:
        return cls(config.pa_config.num_blocks, config.pa_config.block_size)

    @property
    def most(self) -> int:
        """Maximum number of blocks in the list of a step."""
        return self._places.size

    def of(self, block_tables: Int32Array, context_lens: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Returns the ids of the blocks that the step reads [blocks], ascending, and new block tables [seqs, width].

        The new tables have the index of each block in the list of ids. ``block_tables`` [seqs, width] has the ids of
        the blocks. ``context_lens`` [seqs] has the number of tokens of each sequence in the cache. Elements after a
        sequence's last block become 0.
        """
        counts = -(-context_lens // self._block_size)
        is_used = np.arange(block_tables.shape[1]) < counts[:, None]
        self._is_read.fill(False)
        self._is_read[block_tables[is_used]] = True
        blocks = np.flatnonzero(self._is_read).astype(np.int32)
        self._places[blocks] = np.arange(blocks.size, dtype=np.int32)
        return blocks, np.where(is_used, self._places[block_tables], np.int32(0))
