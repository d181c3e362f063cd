"""Runs the batches of a store: a bounded number of lines at the same time, all with the lowest priority.

The runner appends the result of a line to a file in one write. After a restart, it reads which lines have a result, and
computes only the other lines. So each line has exactly one result.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from llm_serving.access.control import VISIT, Visit
from llm_serving.errors import AgentError, LLMServingError, TryLaterError
from llm_serving.server.batches.disk import lines_of
from llm_serving.server.batches.lines import (
    LineProblem,
    LineRequest,
    number_of_entry,
    problem_entry,
    read_line,
    response_entry,
)
from llm_serving.server.batches.records import Batch
from llm_serving.server.batches.store import BatchStore
from llm_serving.server.error_replies import error_reply, note_error
from llm_serving.server.errors import StorageLimitError, UnavailableError
from llm_serving.server.in_process import App, call_handler
from llm_serving.server.state import Endpoint

_RETRY_S = 0.5
"""Minimum seconds before a line of a batch is tried again, after a refusal or a failure."""
_MAX_RETRY_S = 30.0
"""Maximum seconds before a refused line of a batch is tried again, even if ``Retry-After`` is longer."""
_MAX_LOSSES = 3
"""A line fails if agents were lost in this number of attempts to compute the line."""
_SAVE_S = 1.0
"""Minimum seconds between two writes of a running batch's record to disk."""

Respond = Callable[[Batch, LineRequest], Awaitable[tuple[int, bytes]]]
"""A function that computes a line and returns the HTTP status and the JSON body of its response.

Raises UnavailableError if the server stops.
"""


class BatchRunner:
    """Runs batches from ``start`` to ``stop``. Each tenant has at most one running batch, its oldest one."""

    def __init__(self, app: App, store: BatchStore, endpoints: Mapping[str, Endpoint]) -> None:
        """``endpoints`` maps a path to its endpoint, for all endpoints that batches may call."""
        self._app, self.store, self._endpoints = app, store, endpoints
        self._slots = asyncio.Semaphore(store.config.max_parallel)
        self._running: dict[str, BatchRun] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Continues the batches that have not ended, and runs new ones. Call this method on the event loop."""
        self.store.changed.set()
        self._task = asyncio.get_running_loop().create_task(self._loop())

    async def stop(self) -> None:
        """Cancels all running lines. Their batches continue at the next start. May be called twice."""
        tasks = [run.task for run in self._running.values()] + ([] if self._task is None else [self._task])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._running.clear()
        self._task = None

    async def _loop(self) -> None:
        while True:
            await self.store.changed.wait()
            self.store.changed.clear()
            for batch in await self.store.run(self.store.waiting_batches):
                run = self._running.get(batch.owner)
                if run is None and len(self._running) < self.store.config.max_parallel:
                    self._begin(batch)
                elif run is not None and run.batch is batch and batch.status == "cancelling":
                    run.cancel_lines()

    def _begin(self, batch: Batch) -> None:
        run = self._running[batch.owner] = BatchRun(batch, self.store, self._slots, self._respond, self._app)
        run.start(partial(self._ended, batch.owner))

    def _ended(self, owner: str, task: asyncio.Task[None]) -> None:
        """Called when the task of a batch has ended. Lets the tenant's next batch begin, or logs the task's exception.
        """
        self._running.pop(owner, None)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self.store.changed.set()
        elif not isinstance(error, UnavailableError):
            self._app.state.log.error(f"a batch of {owner!r} stopped: {error!r}", event="batch_failed")

    async def _respond(self, batch: Batch, line: LineRequest) -> tuple[int, bytes]:
        """Computes a line. Returns the HTTP status and the body of its response.

        If the server is unavailable, or refuses the request for now, the method waits and tries again. It also tries
        again if an agent is lost. If this happens ``_MAX_LOSSES`` times, the method returns the error.
        """
        endpoint, state, losses = self._endpoints[batch.endpoint], self._app.state, 0
        while True:
            try:
                return 200, await self._call(endpoint, batch, line)
            except TryLaterError as error:
                delay = min(max(error.retry_after_s, _RETRY_S), _MAX_RETRY_S)
            except UnavailableError as error:
                if state.active.stopping or error.code in ("stopping", "stopped"):
                    raise
                delay = _RETRY_S
            except Exception as error:
                if state.active.stopping or state.has_ended:
                    raise UnavailableError("The server is stopping.", "stopping") from error
                losses += isinstance(error, AgentError)
                if not isinstance(error, AgentError) or losses >= _MAX_LOSSES:
                    reply = error_reply(error, endpoint.path)
                    note_error(state.log, error, reply, endpoint.path, f"{batch.id}/{line.number}")
                    return reply.status, reply.body()
                delay = _RETRY_S
            await asyncio.sleep(delay)

    async def _call(self, endpoint: Endpoint, batch: Batch, line: LineRequest) -> bytes:
        """Calls the endpoint on behalf of the batch's tenant. The request counts for the quotas of its API key."""
        access = self._app.state.access
        if access is None or access.keys is None:
            # Without API keys, the tenant's name is a hash of the client's bearer token. This hash is sent as the
            # bearer token, so that the requests of different tenants stay separate.
            headers = [(b"authorization", f"Bearer {batch.owner}".encode())] if batch.owner else []
            return await call_handler(self._app, endpoint.handler, endpoint.path, line.body, headers=headers)
        visit = Visit(access, {"method": "POST", "path": endpoint.path}, time.monotonic())
        visit.route, visit.status = endpoint.path, 500
        try:
            visit.enter_as(batch.owner)
            body = await call_handler(self._app, endpoint.handler, endpoint.path, line.body, more={VISIT: visit})
            visit.status = 200
            return body
        except LLMServingError as error:
            visit.status = error_reply(error).status
            raise
        finally:
            visit.leave()


class BatchRun:
    """Runs one batch in an asyncio task: counts its lines, computes them, and writes the results."""

    def __init__(self, batch: Batch, store: BatchStore, slots: asyncio.Semaphore, respond: Respond, app: App) -> None:
        self.batch, self._store, self._slots, self._respond, self._app = batch, store, slots, respond, app
        self._lines: set[asyncio.Task[None]] = set()
        self._notes: set[asyncio.Task[None]] = set()
        """Tasks that write and count results. They are never cancelled, so each written result is also counted."""
        self._outputs: tuple[int, int] | None = None
        self._failure: Exception | None = None
        self._is_cut = asyncio.Event()
        """An event that is set when no further line may begin: the batch is cancelled or expired, or a result could not
        be written."""
        self._saved_at = 0.0
        self.task: asyncio.Task[None]

    def start(self, ended: Callable[[asyncio.Task[None]], None]) -> None:
        """Starts the task. ``ended`` is called at its end."""
        self.task = asyncio.get_running_loop().create_task(self._run())
        self.task.add_done_callback(ended)

    def cancel_lines(self) -> None:
        """Cancels the running lines, and begins no further lines."""
        self._is_cut.set()
        for line in self._lines:
            line.cancel()

    async def _run(self) -> None:
        batch, loop = self.batch, asyncio.get_running_loop()
        expiry = loop.call_later(max(0.0, batch.expires_at - time.time()), self.cancel_lines)
        try:
            if batch.status in ("validating", "cancelling") and batch.in_progress_at is None:
                await self._validate()
            if not batch.errors:
                await self._run_lines()
            await self._finish()
        except StorageLimitError as error:
            await self._fail("storage_limit_exceeded", str(error))
        except OSError as error:
            self._app.state.log.error(f"{batch.id}: {error}", event="batch_failed")
            await self._fail("storage_failed", "The server could not read or write the files of the batch.")
        finally:
            expiry.cancel()
            for line in self._lines:
                line.cancel()
            await asyncio.gather(*self._lines, return_exceptions=True)
            await asyncio.gather(*self._notes, return_exceptions=True)
            for descriptor in self._outputs or ():
                os.close(descriptor)

    async def _validate(self) -> None:
        """Counts the lines of the input file. Marks the whole batch as failed if there are no lines, or too many."""
        batch, store = self.batch, self._store
        limit = store.config.max_lines
        batch.total = await _in_thread(_count_lines, self._input, self._max_bytes, limit)
        if batch.total == 0 or batch.total > limit:
            code = "empty_file" if batch.total == 0 else "too_many_lines"
            found = "no line" if batch.total == 0 else f"more than {limit} lines (batch_config.max_lines)"
            batch.total = 0
            batch.errors = [{"code": code, "message": f"The input file has {found}.", "param": None, "line": None}]
            return
        batch.in_progress_at = int(time.time())
        if batch.status == "validating":
            batch.status = "in_progress"
        await store.run(store.save_batch, batch)

    async def _run_lines(self) -> None:
        """Computes the lines that have no result yet."""
        batch, store = self.batch, self._store
        self._outputs = await store.run(store.open_results, batch)
        done = await _in_thread(self._done_lines)
        lines, names = lines_of(self._input, self._max_bytes), set[str]()
        while not self._is_cut.is_set() and batch.status == "in_progress":
            found = await _in_thread(next, lines, None)
            if found is None:
                break
            line = read_line(found[0], found[1], batch.endpoint, self._max_bytes)
            line = _with_unique_name(line, names)
            if found[0] in done:
                continue
            if isinstance(line, LineProblem):
                await self._note(line, problem_entry(batch.id, line), is_failed=True)
            else:
                await self._begin_line(line)
        lines.close()
        if self._lines:
            await asyncio.wait(self._lines)
        await asyncio.gather(*self._notes)
        if self._failure is not None:
            raise self._failure

    async def _begin_line(self, line: LineRequest) -> None:
        """Waits for a free slot and starts the line, unless no further line may begin."""
        await self._slots.acquire()
        if self._is_cut.is_set():
            self._slots.release()
            return
        task = asyncio.get_running_loop().create_task(self._compute(line))
        self._lines.add(task)
        task.add_done_callback(self._line_ended)

    def _line_ended(self, task: asyncio.Task[None]) -> None:
        self._slots.release()
        self._lines.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and self._failure is None:
            self._failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
            self._is_cut.set()

    async def _compute(self, line: LineRequest) -> None:
        status, body = await self._respond(self.batch, line)
        entry = response_entry(self.batch.id, line, status, body)
        note = asyncio.ensure_future(self._note(line, entry, is_failed=status != 200))
        self._notes.add(note)
        note.add_done_callback(self._notes.discard)
        await asyncio.shield(note)

    async def _note(self, line: LineRequest | LineProblem, entry: bytes, *, is_failed: bool) -> None:
        """Writes the result of a line and counts it."""
        assert self._outputs is not None
        batch, store = self.batch, self._store
        await store.run(store.append, batch, self._outputs[is_failed], entry)
        if is_failed:
            batch.failed += 1
        else:
            batch.completed += 1
        if time.monotonic() - self._saved_at >= _SAVE_S:
            self._saved_at = time.monotonic()
            await store.run(store.save_batch, batch)

    async def _finish(self) -> None:
        """Sets and writes the final state of the batch. An expired batch gets an entry for each line without a result.
        """
        batch, store = self.batch, self._store
        if batch.errors:
            status = "failed"
        elif batch.status == "cancelling":
            status = "cancelled"
        elif batch.completed + batch.failed < batch.total:
            await self._note_expired()
            status = "expired"
        else:
            batch.status, batch.finalizing_at, status = "finalizing", int(time.time()), "completed"
            await store.run(store.save_batch, batch)
        await self._end(status)

    async def _end(self, status: str) -> None:
        batch, store = self.batch, self._store
        await store.run(store.end_batch, batch, status)
        self._app.state.log.event(
            "batch_end", batch=batch.id, tenant=batch.owner, status=status, lines=batch.total,
            completed=batch.completed, failed=batch.failed,
        )  # fmt: skip

    async def _note_expired(self) -> None:
        done = await _in_thread(self._done_lines)
        names = set[str]()
        for number, text in await _in_thread(list, lines_of(self._input, self._max_bytes)):
            line = _with_unique_name(read_line(number, text, self.batch.endpoint, self._max_bytes), names)
            if number not in done:
                message = f"Line {number} was not computed within the completion window."
                problem = LineProblem(
                    number, line.custom_id, "batch_expired", message, "completion_window", "server_error"
                )
                await self._note(problem, problem_entry(self.batch.id, problem), is_failed=True)

    async def _fail(self, code: str, message: str) -> None:
        self.batch.errors = [{"code": code, "message": message, "param": None, "line": None}]
        with contextlib.suppress(OSError):
            await self._end("failed")

    @property
    def _input(self) -> Path:
        return self._store.data_path(self.batch.owner, self.batch.input_file_id)

    @property
    def _max_bytes(self) -> int:
        return self._app.state.settings.max_body_bytes

    def _done_lines(self) -> set[int]:
        """Reads the result files. Returns the numbers of the lines with a result, and sets the batch's counts."""
        batch, done = self.batch, set[int]()
        counts = []
        for file_id in (batch.output_id, batch.error_id):
            numbers = set(_result_numbers(self._store.data_path(batch.owner, file_id)))
            counts.append(len(numbers))
            done |= numbers
        batch.completed, batch.failed = counts
        return done


def _count_lines(path: Path, max_bytes: int, limit: int) -> int:
    """Returns the number of lines with content, at most ``limit`` + 1."""
    count = 0
    for _ in lines_of(path, max_bytes):
        count += 1
        if count > limit:
            break
    return count


def _result_numbers(path: Path) -> Iterator[int]:
    with open(path, "rb") as file:
        while beginning := file.readline(128):
            number = number_of_entry(beginning)
            if number is not None:
                yield number
            while not beginning.endswith(b"\n") and (beginning := file.readline(1 << 20)):
                pass


def _with_unique_name(line: LineRequest | LineProblem, names: set[str]) -> LineRequest | LineProblem:
    """Returns the line, or a problem if an earlier line has the same ``custom_id``."""
    if line.custom_id is None:
        return line
    if line.custom_id in names:
        message = f"Line {line.number} has the custom_id of an earlier line."
        return LineProblem(line.number, line.custom_id, "duplicate_custom_id", message, "custom_id")
    names.add(line.custom_id)
    return line


async def _in_thread(call: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, call, *arguments)
