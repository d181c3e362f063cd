"""Shares the blocks of a cached prefix, and adds blocks that were loaded from KV tiers to the prefix cache."""

from __future__ import annotations

from llm_serving.block_supply.prefix_supply import PrefixSupply
from llm_serving.scheduler.sequence import Sequence


class TierSupply(PrefixSupply):
    """Gives blocks like ``PrefixSupply``. ``block_moves/tier_moves.py`` asks it which blocks a sequence lacks."""

    def num_missing_blocks(self, sequence: Sequence) -> tuple[int, int]:
        """Returns how many of a waiting sequence's first full blocks are cached, and how many full blocks follow them.

        The block with the last known token does not count, because this token must be computed.
        """
        num_found = len(self._match(sequence).blocks)
        return num_found, (sequence.request.num_tokens - 1) // self._kv_cache.block_size - num_found

    def loaded(self, sequence: Sequence, first: int, blocks: list[int]) -> None:
        """Adds ``blocks``, which were loaded from KV tiers, to the prefix cache.

        They have the content of a waiting sequence's full blocks from index ``first`` on.
        """
        assert sequence.prefix_chain is not None, "looked up before"
        self._prefixes.insert(sequence.prefix_chain, first, blocks)
        self._change(sequence)
