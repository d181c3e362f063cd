"""The engine for asyncio: a request in, its pieces out as they come; closing it aborts the request."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING

from llm_serving.engine.beam_search import BeamSearchParams
from llm_serving.engine.core import Abort, Add, EngineCore, Probe, Stop
from llm_serving.engine.observer import EngineLog, EngineMetrics
from llm_serving.engine.open_request import OpenRequest, PieceSink
from llm_serving.engine.outputs import DetokenizerFactory, EngineOutput, ProbeAnswer
from llm_serving.engine.piece_stream import PieceStream
from llm_serving.engine.receipts import ReceiptBook, RequestReceipt, receipt_of
from llm_serving.engine.request_factory import RequestFactory
from llm_serving.engine.request_log import RequestLog
from llm_serving.engine.search import Search, SearchResult
from llm_serving.engine.status import EngineStatus
from llm_serving.errors import AgentLostError, QueueFullError, RequestError
from llm_serving.executor.base import Executor
from llm_serving.flight.recorder import FlightRecorder, as_scheduler
from llm_serving.request import DEFAULT_SCHEDULING, Request, RequestOutput, SamplingParams, SchedulingParams
from llm_serving.routing.placement import Routing
from llm_serving.routing.router import Router
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.protocols import StepSource
from llm_serving.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from llm_serving.config import Config
    from llm_serving.engine.tokenizer import Tokenizer

__all__ = ["AsyncEngine"]


class AsyncEngine:
    """Runs an EngineCore in a thread of its own. Its methods belong to the event loop that called ``start``.

    ``executors``: one for each replica of the model. ``record`` may put a flight recorder before the scheduler of
    a replica, which it is given with its number; it is closed with the engine.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        executors: Sequence[Executor],
        detokenizer: DetokenizerFactory,
        log: EngineLog,
        metrics: EngineMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
        record: Callable[[Scheduler, int], FlightRecorder | None] | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.model_name = config.model_name
        self.max_model_len = config.max_model_len
        self._clock = clock
        self._factory = RequestFactory(config, clock)
        self.end_token_ids = self._factory.end_token_ids
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: dict[str, OpenRequest] = {}
        self._metrics = metrics
        self._requests = RequestLog(log, metrics)
        self._receipts = ReceiptBook()
        self._searches: dict[str, Request] = {}
        self._probes: list[asyncio.Future[bool]] = []
        self._recorders: list[FlightRecorder] = []
        limits = SchedulerLimits.from_config(config)
        schedulers = [self._recorded(Scheduler(limits), index, record) for index in range(len(executors))]
        routing = Routing(config.parallel_config.routing)
        router = Router(schedulers, routing) if len(schedulers) > 1 else None
        sources: list[StepSource] = [*(schedulers if router is None else router.replicas)]
        self._core = EngineCore(
            schedulers[0] if router is None else router,
            list(zip(sources, executors, strict=True)),
            detokenizer,
            log,
            metrics,
            self._deliver,
            state_interval_s=config.log_config.state_interval_s,
            clock=clock,
        )
        self._thread = threading.Thread(target=self._core.run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the engine thread; pieces are delivered on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self, timeout_s: float = 5.0) -> None:
        """End every request with an error, then the thread. Agents and executor are the launcher's to end."""
        if self._thread.is_alive():
            self._core.submit(Stop())
            await asyncio.to_thread(self._thread.join, timeout_s)
        if not self._thread.is_alive():
            for recorder in self._recorders:
                recorder.close()
        # What the thread has delivered last is still to be taken from the loop.
        await asyncio.sleep(0)

    @property
    def stop_reason(self) -> str:
        """Why nothing is served any more; empty before."""
        return self._core.stop_reason

    def status(self) -> EngineStatus:
        """How the engine is doing; cheap. Any thread may call it."""
        recorder_s = sum(recorder.seconds for recorder in self._recorders)
        return dataclasses.replace(self._core.status(), recorder_s=recorder_s)

    async def probe(self, timeout: float) -> bool:
        """Whether every agent answers within ``timeout`` seconds."""
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._probes.append(answer)
        self._core.submit(Probe())
        try:
            return await asyncio.wait_for(answer, timeout)
        except asyncio.TimeoutError:
            return False
        finally:
            if answer in self._probes:
                self._probes.remove(answer)

    def abort(self, request_id: str) -> None:
        """End a request from outside its stream, which then gets a last piece with ``FinishReason.ABORT``."""
        self._core.submit(Abort(request_id))

    def open(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        sink: PieceSink,
        arrival_time: float | None = None,
        *,
        scheduling: SchedulingParams = DEFAULT_SCHEDULING,
        streamed: bool = True,
        quiet: bool = False,
    ) -> OpenRequest:
        """Serve a request; its pieces go to ``sink``. The caller must ``close`` what is returned.

        ``arrival_time``, on the engine's clock, is when the client's request came, from which its times count; by
        default now. ``streamed``: the caller will say when output was ``delivered``. ``quiet``: log, metrics and
        receipts hear nothing of it.
        Raises RequestError for token ids outside the vocabulary or an id in use, DeadlineExceededError when its
        deadline has passed, AgentLostError when nothing is served any more; other refusals come by ``sink.fail``.
        """
        if request_id in self._open:
            raise RequestError(f"a request with the id {request_id!r} is being served", param="request_id")
        request = self._factory.make(request_id, prompt_token_ids, sampling, arrival_time, scheduling)
        opened = OpenRequest(request, sink, self._closed, self._requests, streamed=streamed, quiet=quiet)
        self._open[request_id] = opened
        self._core.submit(Add(request))
        if self._core.ended and not opened.is_ended:  # it may have missed the command
            opened.is_ended = True
            opened.close()
            raise AgentLostError(f"requests are not served any more: {self._core.stop_reason}")
        return opened

    def queue_full(self) -> QueueFullError | None:
        """Why a request that comes now would be refused; None when it may be taken. Cheap: ask before reading one."""
        full = self._core.queue_full()
        if full is not None:
            self._metrics.request_refused(full.code)
        return full

    def receipt(self, request_id: str) -> RequestReceipt | None:
        """Where the time of a request went that is being served, or ended not long ago; else None."""
        opened, search = self._open.get(request_id), self._searches.get(request_id)
        if opened is not None:
            return opened.receipt(self._clock())
        return self._receipts.get(request_id) if search is None else receipt_of(search, self._clock())

    async def search(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: BeamSearchParams,
        arrival_time: float | None = None,
        *,
        scheduling: SchedulingParams = DEFAULT_SCHEDULING,
    ) -> SearchResult:
        """The likeliest answers to a prompt. Prompt and ``max_tokens`` must fit the longest prompt together, since a
        beam's steps send it as one. Raises as ``open`` does, and EngineFailedError; cancel it to abort."""
        sampling = SamplingParams(max_tokens=params.max_tokens, temperature=0.0)
        whole = self._factory.make(request_id, prompt_token_ids, sampling, arrival_time, scheduling)
        search = Search(self, whole, params, scheduling, self._clock)
        self._searches[request_id] = whole
        try:
            return await search.run()
        finally:
            del self._searches[request_id]
            output = search.output()
            if output.timings is not None:
                self._requests.request_end(output, output.timings, whole)
                self._receipts.add(receipt_of(whole, self._clock(), output.timings))

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        arrival_time: float | None = None,
        *,
        scheduling: SchedulingParams = DEFAULT_SCHEDULING,
    ) -> AsyncGenerator[RequestOutput, None]:
        """``open`` for a reader that pulls: the pieces of a request's answer, the last with ``finish_reason`` set.

        Raises LLMServingError before the first piece when the request is refused. Pieces that a slow reader lets pile
        up are merged. Close the generator (``contextlib.aclosing``) to abort: the request's blocks are free within a
        step. Where a request of that id has just been left, waits until the engine has ended it.
        """
        while (old := self._open.get(request_id)) is not None and old.gone is not None:
            await old.gone.wait()
        stream = PieceStream()
        opened = self.open(
            request_id, prompt_token_ids, sampling, stream, arrival_time, scheduling=scheduling, streamed=False
        )
        try:
            while True:
                piece = await stream.next()
                yield piece
                if piece.finished:
                    return
        finally:
            opened.close()

    def _recorded(
        self,
        scheduler: Scheduler,
        index: int,
        record: Callable[[Scheduler, int], FlightRecorder | None] | None,
    ) -> Scheduler:
        """The scheduler of a replica, with its flight recorder before it where there is one."""
        recorder = None if record is None else record(scheduler, index)
        if recorder is None:
            return scheduler
        self._recorders.append(recorder)
        return as_scheduler(recorder)

    def _closed(self, opened: OpenRequest) -> None:
        """The reader goes. If the engine has not ended the request, it is to do so, and the id is taken until then."""
        if opened.is_ended:
            self._settle(opened)
        else:
            opened.gone = asyncio.Event()
            self._core.submit(Abort(opened.request_id))

    def _settle(self, opened: OpenRequest) -> None:
        """A request has ended and its reader is gone."""
        del self._open[opened.request_id]
        if opened.gone is not None:
            opened.gone.set()
        piece = opened.last_piece
        if piece is not None and not opened.quiet:
            timings = opened.timings(piece)
            self._requests.request_end(piece, timings, opened.request)
            self._receipts.add(receipt_of(opened.request, self._clock(), timings))

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        """Called by the engine thread, once a step."""
        if self._loop is None:
            raise AssertionError("the engine thread runs before start()")
        self._loop.call_soon_threadsafe(self._take, outputs)

    def _take(self, outputs: list[EngineOutput]) -> None:
        requests = self._open
        for output in outputs:
            if isinstance(output, ProbeAnswer):
                self._answer_probes()
            elif (opened := requests.get(output.request_id)) is not None:
                if isinstance(output, RequestOutput):
                    opened.take(output)
                else:
                    opened.refuse(output.error)
                if opened.is_ended and opened.gone is not None:
                    self._settle(opened)

    def _answer_probes(self) -> None:
        probes, self._probes = self._probes, []
        for answer in probes:
            if not answer.done():
                answer.set_result(True)
