"""The block supply for ``model_config.page_attention: false``: each sequence gets one range of consecutive blocks."""

from __future__ import annotations

from llm_serving.block_supply.base import BlockSupply
from llm_serving.scheduler.sequence import Sequence


class ContiguousSupply(BlockSupply):
    """Gives a sequence one range of consecutive blocks for its prompt and its longest output.

    So no sequence is preempted because blocks are missing, but many blocks of a sequence stay empty.
    """

    def fits(self, sequence: Sequence, reserve: int) -> bool:
        table: list[int] = []
        found = self._kv_cache.reserve(table, sequence.max_cached_tokens)
        self._kv_cache.free(table)
        return found

    def start(self, sequence: Sequence) -> None:
        if not self._kv_cache.reserve(sequence.block_table, sequence.max_cached_tokens):
            raise AssertionError(f"no range of blocks to start {sequence.request.request_id}")
