"""The engine for asyncio: opens requests and delivers pieces of their output. Closing a request aborts it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from llm_serving.cluster.nodes import NodePool
from llm_serving.cluster.standby import Standby
from llm_serving.config import Config
from llm_serving.engine.adapter_loading import EngineAdapters
from llm_serving.engine.agent_questions import AgentQuestions
from llm_serving.engine.beam_search import BeamSearch, BeamSearchParams, SearchResult
from llm_serving.engine.commands import Abort, Add, Distrust, Stop, WakeNodes
from llm_serving.engine.core import EngineCore
from llm_serving.engine.open_request import OpenRequest, PieceSink, PieceStream
from llm_serving.engine.outputs import AdapterAnswer, CanaryWanted, EngineOutput, ProbeAnswer, ProfileAnswer
from llm_serving.engine.receipts import ReceiptBook, RequestReceipt, receipt_of
from llm_serving.engine.request_log import RequestLog
from llm_serving.engine.request_maker import RequestMaker
from llm_serving.engine.schedulers import ObserveCache, Record, make_front, make_schedulers
from llm_serving.engine.text_streams import DetokenizerFactory
from llm_serving.engine.tokenizer import Tokenizer
from llm_serving.errors import AgentLostError, ModelUnavailableError, QueueFullError, RequestError
from llm_serving.executor.base import Executor
from llm_serving.flight.keeping import keep_recording
from llm_serving.flight.setup import recording_folder
from llm_serving.images.pool import TilePool
from llm_serving.images.prompt import PromptImages
from llm_serving.kvstore.closing import close_tiers
from llm_serving.kvstore.setup import KvTiers
from llm_serving.kvstore.transfers import BlockTransfers
from llm_serving.lora.registry import Adapter, adapted_salt
from llm_serving.request import (
    DEFAULT_SCHEDULING,
    Constraint,
    ForkableConstraint,
    Request,
    RequestOutput,
    SchedulingParams,
)
from llm_serving.routing.router import Router
from llm_serving.sampling_params import SamplingParams
from llm_serving.scheduler.scheduler import Scheduler
from llm_serving.speculation.setup import speculator_maker
from llm_serving.telemetry.log import EventLog
from llm_serving.telemetry.metrics import Metrics
from llm_serving.telemetry.status import EngineStatus

if TYPE_CHECKING:
    from llm_serving.handover.transport import BlockPools


class AsyncEngine:
    """Runs an ``EngineCore`` in a thread of its own.

    Call the methods only from the event loop on which ``start`` was called.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        executors: Sequence[Executor],
        detokenizer: DetokenizerFactory,
        log: EventLog,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.monotonic,
        record: Record | None = None,
        tiers: KvTiers | None = None,
        nodes: NodePool | None = None,
        images: TilePool | None = None,
        observe: ObserveCache | None = None,
        standby: Standby | None = None,
        pools: BlockPools | None = None,
    ) -> None:
        """Creates the engine. ``executors`` has one executor for each replica of the model.

        ``record`` takes a scheduler and the number of its replica. It returns a flight recorder that wraps the
        scheduler, or None. The engine uses the recorder instead of the scheduler, and closes the recorder at the end.
        ``tiers`` are the KV tiers, or None. The engine closes them at the end, too.

        ``nodes`` are the machines of the agents, or None if the agents are on this machine. With ``nodes``, the engine
        is ready as soon as one replica is ready. ``standby`` decides whether nodes are used. ``images`` is the pool of
        shared memory for the tiles of images, or None. ``observe`` returns the observer of a replica's prefix cache.
        When the engine begins to serve, the model registry calls ``enter_service`` of each observer. ``pools`` are the
        hand-over pools of replicas on several machines, or None.
        """
        self.nodes, self.standby, self.observe = nodes, standby, observe
        self.config = config
        self.tokenizer = tokenizer
        self.model_name = config.model_name
        self.max_model_len = config.max_model_len
        self.end_token_ids = frozenset(config.end_token_ids)
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: dict[str, OpenRequest] = {}
        self._metrics = metrics
        self._log = RequestLog(log, metrics)
        self._receipts = ReceiptBook()
        self._searches: dict[str, Request] = {}
        self.tiers = tiers
        """The KV tiers. None if the engine has no KV tiers."""
        self._transfers: BlockTransfers | None = None
        self.tiles = images
        """The pool of shared memory for the tiles of images. None if the model reads only text."""
        self.observers = [] if observe is None else [observe(index) for index in range(len(executors))]
        schedulers, self._recorders = make_schedulers(config, len(executors), self.observers, record)
        self._core = self._made_core(schedulers, executors, detokenizer, log, pools)
        self._questions = AgentQuestions(self._core, are_local=nodes is None)
        self.adapters = EngineAdapters(config.lora_config.max_adapters, self._core, self._questions)
        self._requests = RequestMaker(config, clock, self._core.note_traces)
        self.canary_wanted = asyncio.Event()
        """An event that is set on the event loop when the canary must run soon."""
        self.ended = asyncio.Event()
        """An event that is set on the event loop when the engine thread has ended, even after an error."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def _made_core(
        self,
        schedulers: Sequence[Scheduler],
        executors: Sequence[Executor],
        detokenizer: DetokenizerFactory,
        log: EventLog,
        pools: BlockPools | None,
    ) -> EngineCore:
        """Returns the core, which runs in the engine thread."""
        config, on_nodes = self.config, self.nodes is not None
        front, sources = make_front(config, schedulers, pools, on_nodes=on_nodes)
        if self.standby is not None and isinstance(front, Router):
            self.standby.watch_pools(front.pool_states)
        return EngineCore(
            front,
            list(zip(sources, executors, strict=True)),
            detokenizer,
            log,
            self._metrics,
            self._deliver,
            state_interval_s=config.log_config.state_interval_s,
            clock=self._clock,
            keep_recording=self._keep_recording,
            make_speculator=speculator_maker(config),
            tiers=self.tiers,
            num_needed=1 if on_nodes else None,
            standby=self.standby,
        )

    def start(self) -> None:
        """Starts the engine thread. Pieces are delivered on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def _run(self) -> None:
        """Runs the engine loop in the engine thread.

        Sets ``ended`` at the end, even if the engine could not end its requests.
        """
        try:
            self._core.run()
        finally:
            self._core.note_end()
            with contextlib.suppress(RuntimeError):  # the event loop may be closed already, so it cannot be notified
                assert self._loop is not None
                self._loop.call_soon_threadsafe(self._questions.close)
                self._loop.call_soon_threadsafe(self.ended.set)

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Ends every request with an error, then ends the engine thread. The launcher ends the agents and the
        executors.

        Waits at most ``timeout_s`` seconds for the thread.
        """
        if self._thread.is_alive():
            self._core.submit(Stop())
            # Waits on the event loop and not in a helper thread, because an interpreter that is closing starts no
            # threads.
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.ended.wait(), timeout_s)
                self._thread.join(timeout_s)  # a short wait, because ``ended`` is set by the thread's last statement
        if not self._thread.is_alive():
            for recorder in self._recorders:
                recorder.close()
            if self.tiers is not None:
                await close_tiers(self.tiers)
        await asyncio.sleep(0)  # gives the event loop time to process the last outputs of the engine thread

    @property
    def state(self) -> str:
        """The state of the engine. Any thread may read it."""
        return self._core.state.value

    @property
    def stop_reason(self) -> str:
        """The reason why the engine no longer serves requests. The text is empty while the engine serves requests."""
        return self._core.stop_reason

    @property
    def wake_s(self) -> float | None:
        """Expected seconds until agents are ready: 0 if they are ready, None if unknown. Any thread may read this
        value."""
        return 0.0 if self.standby is None else self.standby.expected_s(self._clock())

    def check_wait(self, left_s: float | None) -> None:
        """Raises ModelUnavailableError if agents will not be ready within ``left_s`` seconds. None means no deadline.

        Before the error, makes the engine start agents on nodes, so that a later attempt of the client can succeed.
        """
        expected_s = self.wake_s
        if left_s is not None and expected_s and expected_s > left_s:  # if agents are ready (0 s), never refuses here
            self._core.submit(WakeNodes())
            raise ModelUnavailableError(
                f"No node has agents of the model now. Until one is ready, it takes about {expected_s:.1f} s; the "
                f"request may wait {max(0.0, left_s):.1f} s. Try again later.",
                retry_after_s=expected_s,
            )

    def nodes_text(self) -> str:
        """Returns the state of each node in a few words, for error messages."""
        nodes = [] if self.nodes is None else self.nodes.status()
        return "; ".join(f"{each['name']}: {each['state']} {each['reason']}".strip() for each in nodes) or "none"

    def status(self) -> EngineStatus:
        """Returns the engine's present state and figures. Any thread may call this method."""
        recorder_s = sum(recorder.seconds for recorder in self._recorders)
        return dataclasses.replace(self._core.status(), recorder_s=recorder_s)

    async def probe(self, timeout: float) -> bool:
        """Returns True if every agent replies to a status query in time. See ``AgentQuestions.probe``."""
        return await self._questions.probe(timeout)

    async def profile(self, folder: str | None, timeout: float) -> list[dict[str, object]]:
        """Starts a profile of all ready agents, or stops it. See ``AgentQuestions.profile``."""
        return await self._questions.profile(folder, timeout)

    @property
    def transfers(self) -> BlockTransfers | None:
        """Copies blocks between the KV tiers and the event loop. None if there are no tiers."""
        if self._transfers is None and self.tiers is not None:
            self._transfers = self.tiers.transfers(self._core.use_stores)
        return self._transfers

    def queue_full(self, tenant: str = "", num_expected: int = 0) -> QueueFullError | None:
        """Returns why a new request of ``tenant`` would be refused, or None if it may be accepted.

        ``num_expected`` is the number of requests that the caller will probably open before this one. The call is
        cheap, so that a server can refuse a request before it reads the body.
        """
        full = self._core.queue_full(tenant, num_expected)
        if full is not None:
            self._metrics.request_refused(full.code)
        return full

    def receipt(self, request_id: str) -> RequestReceipt | None:
        """Returns the receipt of a request, which shows the time in each phase.

        Returns None if the request is unknown or its receipt has been replaced by newer ones.
        """
        opened, search = self._open.get(request_id), self._searches.get(request_id)
        if opened is not None:
            return opened.receipt(self._clock())
        return self._receipts.get(request_id) if search is None else receipt_of(search, self._clock())

    def receipts(self, count: int) -> list[RequestReceipt]:
        """Returns at most ``count`` receipts.

        Requests that are being served come first, in order of arrival. Requests that have ended follow, the latest end
        first.
        """
        now = self._clock()
        live = [opened.receipt(now) for opened in islice(self._open.values(), count) if not opened.quiet]
        live += [receipt_of(search, now) for search in islice(self._searches.values(), count - len(live))]
        return live + self._receipts.latest(count - len(live))

    def distrust(self, replica: int, reason: str) -> None:
        """Restarts the agents of a replica, because a canary request got wrong tokens."""
        self._core.submit(Distrust(replica, reason))

    def abort(self, request_id: str) -> None:
        """Ends a request while another task waits for its output.

        That task receives a last piece of output with ``FinishReason.ABORT``.
        """
        self._core.submit(Abort(request_id))

    def open(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        sink: PieceSink,
        arrival_time: float | None = None,
        *,
        index: int = 0,
        scheduling: SchedulingParams = DEFAULT_SCHEDULING,
        streamed: bool = True,
        quiet: bool = False,
        constraint: Constraint | None = None,
        adapter: Adapter | None = None,
        images: PromptImages | None = None,
    ) -> OpenRequest:
        """Serves a request. The engine passes each piece of output to ``sink.push(index, piece)``. The caller must
        close the returned ``OpenRequest``.

        ``arrival_time``: when the client's request arrived, on the engine's clock; the default is now. All durations of
        the request begin at this time. ``streamed``: the caller calls ``delivered`` after it has written an output to
        the client. ``quiet``: the request does not appear in the log, the metrics and the receipts. ``constraint``
        determines which tokens may come next. Requests must not share a ``constraint`` object. ``adapter``: the LoRA
        adapter that changes the model for this request. ``images``: the images of the prompt. The request holds their
        shared memory until it ends.

        Raises RequestError for token ids outside the vocabulary and for an id in use. Raises DeadlineExceededError if
        the deadline has passed, and AgentLostError if the engine has stopped. All other refusals go to ``sink.fail``.
        """
        if request_id in self._open:
            raise RequestError(f"a request with the id {request_id!r} is being served", param="request_id")
        request = self._requests.make(request_id, prompt_token_ids, sampling, arrival_time, scheduling)
        request.constraint = self._requests.constraint() if constraint is None else constraint
        if adapter is not None:
            self.adapters.acquire(adapter)
            request.adapter_slot = adapter.slot
            request.cache_salt = adapted_salt(adapter.digest, request.cache_salt)
        if images is not None:
            request.tiles, request.tile_hold = images.tiles, images.hold.again()
            request.cache_salt = images.salt(request.cache_salt)
        opened = OpenRequest(
            request, sink, index, self._closed, self._log, streamed=streamed, quiet=quiet, adapter=adapter
        )
        self._open[request_id] = opened
        self._core.submit(Add(request))
        # The engine thread may have ended without reading the command that adds this request.
        if self._core.ended and not opened.is_ended:
            opened.is_ended = True
            opened.close()
            raise AgentLostError(f"requests are not served any more: {self._core.stop_reason}")
        return opened

    async def search(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: BeamSearchParams,
        arrival_time: float | None = None,
        *,
        scheduling: SchedulingParams = DEFAULT_SCHEDULING,
        adapter: Adapter | None = None,
        constraint: ForkableConstraint | None = None,
    ) -> SearchResult:
        """Returns the most likely outputs of a prompt. Cancel the call to abort it.

        Each step of the search is a request whose prompt is the search's prompt plus the tokens of a beam. The length
        of the prompt plus ``max_tokens`` must therefore not exceed the maximum prompt length. ``constraint`` says which
        tokens may follow in each beam. Raises the same errors as ``open``, and EngineFailedError if the engine fails.
        """
        sampling = SamplingParams(max_tokens=params.max_tokens, temperature=0.0)
        whole = self._requests.make(request_id, prompt_token_ids, sampling, arrival_time, scheduling)
        search = BeamSearch(partial(self.open, adapter=adapter), whole, params, scheduling, self._clock, constraint)
        if adapter is not None:
            self.adapters.acquire(adapter)
        self._searches[request_id] = whole
        try:
            return await search.run()
        finally:
            del self._searches[request_id]
            if adapter is not None:
                self.adapters.release(adapter)
            output = search.output()
            if output.timings is not None:
                self._log.request_end(output, output.timings, whole)
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
        """Yields the pieces of a request. The last piece has ``finish_reason``.

        If the request is refused, this method raises LLMServingError before the first piece. Pieces that wait for a
        slow reader are merged. Close the generator (``contextlib.aclosing``) to abort the request: its blocks are free
        within a step. If a request with the same id was just closed, this method waits until the engine has ended it.
        """
        while (old := self._open.get(request_id)) is not None and old.ended is not None:
            await old.ended.wait()
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

    def _keep_recording(self, replica: int, reason: str) -> Path | None:
        """Keeps the flight recording of a replica by hard links in a new folder, so that it is not overwritten.

        Returns the folder, or None without a recording.
        """
        return keep_recording(recording_folder(self.config, replica), reason) if self._recorders else None

    def _closed(self, opened: OpenRequest) -> None:
        """Handles a reader's call of ``OpenRequest.close``. Aborts the request if it has not ended.

        The request id stays in use until the engine has ended the request.
        """
        if opened.is_ended:
            self._settle(opened)
        else:
            opened.ended = asyncio.Event()
            self._core.submit(Abort(opened.request.request_id))

    def _settle(self, opened: OpenRequest) -> None:
        """Forgets a request that has ended and whose reader has called ``close``.

        Writes the end of the request to the log.
        """
        del self._open[opened.request.request_id]
        if opened.adapter is not None:
            self.adapters.release(opened.adapter)
        if opened.ended is not None:
            opened.ended.set()
        piece = opened.last_piece
        if piece is not None and not opened.quiet:
            timings = opened.timings(piece)
            self._log.request_end(piece, timings, opened.request)
            self._receipts.add(receipt_of(opened.request, self._clock(), timings))

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        """Passes outputs from the engine thread to the event loop.

        Called once or twice in each loop iteration of the engine.
        """
        if self._loop is None:
            raise AssertionError("the engine thread runs before start()")
        self._loop.call_soon_threadsafe(self._take, outputs)

    def _take(self, outputs: list[EngineOutput]) -> None:
        """Passes each output to the sink of its request."""
        for output in outputs:
            if isinstance(output, ProbeAnswer | ProfileAnswer | AdapterAnswer):
                self._questions.take(output)
                continue
            if isinstance(output, CanaryWanted):
                self.canary_wanted.set()
                continue
            opened = self._open.get(output.request_id)
            if opened is None:
                continue
            if isinstance(output, RequestOutput):
                if output.finish_reason is not None:
                    opened.is_ended, opened.last_piece = True, output
                if not opened.is_closed:
                    opened.sink.push(opened.index, output)
            else:
                opened.is_ended = True
                if not opened.is_closed:
                    opened.sink.fail(output.error)
            if opened.is_ended and opened.ended is not None:
                self._settle(opened)
