"""Checks that requests with different salts share no blocks, even if their texts are equal."""

from __future__ import annotations

from llm_serving.scheduler.output import MoveKind, ScheduledStep


class SaltWatch:
    """Remembers the salt of the last write to each block, in the cache and in the host pool.

    Texts do not depend on the salt. Therefore a comparison of texts would not detect a block shared between salts.
    """

    def __init__(self, block_size: int, handed: dict[int, bytes] | None = None) -> None:
        """Makes a watch. ``handed`` has the salts of the blocks in the hand-over pool, which several replicas share."""
        self._block_size = block_size
        self._handed = {} if handed is None else handed
        self._cache: dict[int, bytes] = {}
        self._host: dict[int, bytes] = {}

    def scheduled(self, step: ScheduledStep) -> None:
        """Checks a step when the scheduler sends it, and notes the salts of the blocks that the step writes.

        The scheduler sends steps in the order in which it allocates their blocks.
        """
        for move in step.moves:
            source = {MoveKind.SWAP_IN: self._host, MoveKind.HAND_IN: self._handed}.get(move.kind, self._cache)
            destination = {MoveKind.SWAP_OUT: self._host, MoveKind.HAND_OUT: self._handed}.get(move.kind, self._cache)
            destination[move.destination] = source[move.source]
        size = self._block_size
        for request, start, table in zip(step.requests, step.starts, step.block_tables, strict=True):
            for block in table[: -(-start // size)]:
                assert self._cache[block] == request.cache_salt, f"{request.request_id} reads block {block} of others"
            self._cache.update(dict.fromkeys(table[start // size :], request.cache_salt))
