"""Runs many calls of one endpoint, a bounded number at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from llm_serving.errors import LLMServingError, QueueFullError
from llm_serving.server.in_process import App, call_handler
from llm_serving.server.state import Endpoint

_RETRY_S = 0.02
"""Seconds between attempts while the calls of another thread fill the queue."""


async def answer_all(
    app: App, endpoint: Endpoint, name: str, bodies: Sequence[bytes], parallel: int, note: Callable[[], None]
) -> list[bytes]:
    """Return the response to each body, in order. At most ``parallel`` calls run at the same time.

    ``note`` is called after each response. The first error ends all calls. Its text begins with ``name`` and the
    number of its body, for example ``prompts[3]``.
    """
    results: list[bytes] = [b""] * len(bodies)
    waiting = iter(range(len(bodies)))

    async def work(indexes: Iterator[int]) -> None:
        for index in indexes:
            try:
                results[index] = await _answer(app, endpoint, bodies[index])
            except LLMServingError as error:
                error.args = (f"{name}[{index}]: {error}",)
                raise
            note()

    workers = [asyncio.ensure_future(work(waiting)) for _ in range(min(parallel, len(bodies)))]
    try:
        await asyncio.gather(*workers)
        return results
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def _answer(app: App, endpoint: Endpoint, body: bytes) -> bytes:
    while True:
        try:
            return await call_handler(app, endpoint.handler, endpoint.path, body)
        except QueueFullError:
            figures = app.state.engine.status().figures
            if figures.waiting + figures.running == 0:
                raise  # no request can end, so another attempt would fail, too
            await asyncio.sleep(_RETRY_S)
