"""Runs an engine in a separate thread with its own event loop, without listening for clients."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, TypeVar

import uvloop

from llm_serving.config import Config
from llm_serving.engine.assembly import ProgressNote, make_engine, make_executors, wait_ready
from llm_serving.engine.tokenizer_backends import load_tokenizer
from llm_serving.errors import EngineFailedError
from llm_serving.ipc.segment import remove_leftovers
from llm_serving.server.app import ServerApp, create_app
from llm_serving.telemetry.log import EventLog
from llm_serving.telemetry.log_file import Rotation
from llm_serving.telemetry.metrics import Metrics
from llm_serving.version import __version__

T = TypeVar("T")


class EngineHost:
    """The thread of an engine, from ``start`` to ``close``. Any other thread may call the methods."""

    def __init__(self, config: Config, note: ProgressNote) -> None:
        """``note`` is called with the progress of the agents' start."""
        self.config = config
        self._note = note
        self._app: Future[ServerApp] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._is_stopping = False
        self._calls: set[asyncio.Task[Any]] = set()
        self._lock = threading.Lock()
        # A daemon thread, so that a program that does not call ``close`` can end.
        self._thread = threading.Thread(target=self._run, name="llm", daemon=True)

    def start(self) -> None:
        """Starts the engine and waits until the agents are ready. Raises LLMServingError if they fail."""
        self._thread.start()
        self._app.result()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the engine's thread and returns its result. If the calling thread is interrupted, cancels
        the coroutine.

        Raises EngineFailedError after ``close``.
        """
        with self._lock:
            if self._is_stopping or self._loop is None:
                call.close()
                raise EngineFailedError("This LLM is closed; make a new one.")
            result = asyncio.run_coroutine_threadsafe(self._registered(call), self._loop)
        try:
            return result.result()
        except CancelledError:
            raise EngineFailedError("The LLM was closed before this call was complete.") from None
        except BaseException:
            result.cancel()
            raise

    @property
    def app(self) -> ServerApp:
        """The application whose endpoints the engine serves."""
        return self._app.result()

    def close(self) -> None:
        """Aborts all calls, stops the engine and its agents, and waits until they have ended. May be called twice."""
        with self._lock:
            self._is_stopping = True
            if self._loop is not None:
                with contextlib.suppress(RuntimeError):  # the loop has ended already
                    self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread.is_alive():
            self._thread.join()

    async def _registered(self, call: Coroutine[Any, Any, T]) -> T:
        """Runs ``call`` as a task. The task is cancelled if the engine ends first."""
        task = asyncio.ensure_future(call)
        self._calls.add(task)
        try:
            return await task
        finally:
            task.cancel()
            self._calls.discard(task)

    def _run(self) -> None:
        try:
            uvloop.run(self._main())
        except BaseException as error:
            if self._app.done():
                raise
            self._app.set_exception(error)

    async def _main(self) -> None:
        with self._lock:
            self._loop = asyncio.get_running_loop()
            if self._is_stopping:
                self._stop.set()
        config = self.config
        with ExitStack() as owned:
            executors = make_executors(config, self._note, owned)
            remove_leftovers()
            for executor in executors:
                executor.start()
            tokenizer = load_tokenizer(config)
            rotation = Rotation.of_mib(config.log_config.max_mib, config.log_config.keep_files)
            log = owned.enter_context(EventLog(config.log_config.path, config.log_config.level, rotation=rotation))
            log.event("server_start", version=__version__, pid=os.getpid(), config=asdict(config))
            metrics = Metrics()
            engine = make_engine(config, tokenizer, executors, log, metrics)
            engine.start()
            try:
                app = create_app(engine, log, metrics, config)
                if not await wait_ready(engine, self._stop.is_set):
                    raise EngineFailedError("The LLM was closed before it was ready.")
                self._app.set_result(app)
                await self._stop.wait()
            finally:
                await self._end_calls()
                await engine.stop()

    async def _end_calls(self) -> None:
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
