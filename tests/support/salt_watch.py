"""Whose tokens are in which block: requests of different salts share nothing, though their texts be the same."""

from __future__ import annotations

from llm_serving.scheduler.output import MoveKind, ScheduledStep


class SaltWatch:
    """Follows the salt of what was written last to each block, of the cache and of the host's memory.

    The same prompt has the same text under any salt, so no comparison of texts would notice a block shared wrongly.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._cache: dict[int, bytes] = {}
        self._host: dict[int, bytes] = {}

    def scheduled(self, step: ScheduledStep) -> None:
        """Look at a step when it is handed over: in this order blocks are given out, too."""
        for move in step.moves:
            source = self._host if move.kind is MoveKind.SWAP_IN else self._cache
            destination = self._host if move.kind is MoveKind.SWAP_OUT else self._cache
            destination[move.destination] = source[move.source]
        size = self._block_size
        for request, start, table in zip(step.requests, step.starts, step.block_tables, strict=True):
            for block in table[: -(-start // size)]:
                assert self._cache[block] == request.cache_salt, f"{request.request_id} reads block {block} of others"
            self._cache.update(dict.fromkeys(table[start // size :], request.cache_salt))
