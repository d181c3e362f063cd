"""The pieces of one request, for a reader that pulls them."""

from __future__ import annotations

import asyncio

from llm_serving.engine.outputs import MERGE_AT, merge_outputs
from llm_serving.errors import LLMServingError
from llm_serving.request import RequestOutput

__all__ = ["PieceStream"]


class PieceStream:
    """One request's pieces between the engine, whose ``PieceSink`` it is, and the reader of ``generate``."""

    __slots__ = ("_error", "_pieces", "_waiter")

    def __init__(self) -> None:
        self._pieces: list[RequestOutput] = []
        self._error: LLMServingError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def push(self, piece: RequestOutput) -> None:
        self._pieces.append(piece)
        if len(self._pieces) >= MERGE_AT:
            self._pieces = [merge_outputs(self._pieces)]
        self._notify()

    def fail(self, error: LLMServingError) -> None:
        self._error = error
        self._notify()

    async def next(self) -> RequestOutput:
        """Everything that has come since the last call, as one piece; waits for one."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pieces, self._pieces = self._pieces, []
        return merge_outputs(pieces)

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
