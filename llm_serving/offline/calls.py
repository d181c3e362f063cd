"""Runs many calls of one endpoint, with a limit on the number of simultaneous calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from llm_serving.errors import LLMServingError, QueueFullError
from llm_serving.server.in_process import App, call_handler
from llm_serving.server.state import Endpoint

_RETRY_S = 0.02
"""Seconds between two attempts of a call that was refused because the queue is full. Other threads may have filled it.
"""


async def answer_all(
    app: App, endpoint: Endpoint, name: str, bodies: Sequence[bytes], parallel: int, note: Callable[[], None]
) -> list[bytes]:
    """Calls the endpoint with each body, at most ``parallel`` calls at the same time. Returns the responses in order.

    ``note`` is called after each response. The first error cancels all calls and is raised. Its text begins with
    ``name`` and the index of the body, for example ``prompts[3]``.
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
