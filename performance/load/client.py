"""Runs a whole load test: finds the model, connects, warms up, sends the requests (``batch``) and measures."""

from __future__ import annotations

import asyncio
import http.client
import resource
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import msgspec
import uvloop

from performance.load.apis import APIS, Generation
from performance.load.batch import Batch, Display
from performance.load.endpoint import Endpoint
from performance.load.garbage import frozen_objects
from performance.load.http_client import ConnectionPool, connect_error_text, request_bytes
from performance.load.options import LoadOptions
from performance.load.server_cost import ServerCost
from performance.load.stream import RequestRecord
from performance.load.watches import fetch_metrics
from performance.load.workload import LoadRequest
from performance.program import ServerUnreachableError

WANTED_OPEN_FILES = 65536
"""Limit of open files that the client sets for its process, if the system allows it."""
MODELS_TIMEOUT_S = 10.0
"""Maximum seconds to wait for the list of models."""


class Model(msgspec.Struct):
    id: str


class ModelList(msgspec.Struct):
    data: list[Model]


@dataclass(slots=True)
class LoadRun:
    """A completed load test. ``records`` has the requests that were sent, in order of their due times."""

    options: LoadOptions
    model: str
    records: list[RequestRecord]
    start: float
    """The time of ``perf_counter`` that corresponds to the due time 0."""
    started_at: float
    """Unix time of ``start``."""
    client_cpu_s: float
    interrupted: bool
    server_cost: ServerCost = field(default_factory=ServerCost)

    @property
    def total_time_s(self) -> float:
        """Seconds from the start of the run to the end of the last request."""
        return max((record.end - self.start for record in self.records if record.end is not None), default=0.0)


def run_load(options: LoadOptions, display: Display | None = None) -> LoadRun:
    """Runs a load test. Raises ``LoadTestError`` if it cannot start."""
    _allow_many_connections()
    return uvloop.run(LoadClient(options, display).run())


class LoadClient:
    """Sends the requests of one load test. An instance is used once, in one event loop."""

    def __init__(self, options: LoadOptions, display: Display | None = None) -> None:
        self._options = options
        self._display = display
        self._api = APIS[options.api]
        self._headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        self._pool = ConnectionPool(options.endpoint)
        self._stop = threading.Event()
        self._generation = Generation(model=options.model or "")
        self._run_id = f"load-{secrets.token_hex(4)}"

    async def run(self) -> LoadRun:
        options = self._options
        requests = self._workload()
        warm_up_requests = options.workload(options.warmup, options.seed + 1) if options.warmup else []
        await self._reach_server()
        loop = asyncio.get_running_loop()
        is_main = threading.current_thread() is threading.main_thread()
        if is_main:
            loop.add_signal_handler(signal.SIGINT, self._stop.set)
        try:
            if warm_up_requests:
                await self._batch(warm_up_requests, [0.0] * len(warm_up_requests)).send_all(None)
            return await self._measured(requests)
        finally:
            if is_main:
                loop.remove_signal_handler(signal.SIGINT)
            await self._pool.close()

    def _workload(self) -> list[LoadRequest]:
        return self._options.workload(self._options.count, self._options.seed)

    async def _reach_server(self) -> None:
        options = self._options
        try:
            self._pool.release(await self._pool.connect())
        except OSError as error:
            raise ServerUnreachableError(
                f"no server at {options.endpoint.url}: {connect_error_text(error)}. Start one with 'make serve', "
                "or give its address with -P PORT or --base-url URL."
            ) from error
        model = options.model or discover_model(options.endpoint, self._headers)
        self._generation = Generation(
            model=model,
            temperature=options.temperature,
            ignore_eos=options.ignore_eos,
            return_token_ids=options.return_token_ids,
        )

    async def _measured(self, requests: Sequence[LoadRequest]) -> LoadRun:
        batch = self._measured_batch(requests)
        with frozen_objects():
            metrics = fetch_metrics(self._options.endpoint, self._headers)
            cpu = time.process_time()
            await batch.send_all(self._display)
            cpu = time.process_time() - cpu
        return LoadRun(
            options=self._options,
            model=self._generation.model,
            records=batch.records,
            start=batch.start,
            started_at=time.time() - (perf_counter() - batch.start),
            client_cpu_s=cpu,
            interrupted=self._stop.is_set(),
            server_cost=ServerCost.between(metrics, fetch_metrics(self._options.endpoint, self._headers)),
        )

    def _measured_batch(self, requests: Sequence[LoadRequest]) -> Batch:
        return self._batch(requests, self._options.arrival_times())

    def _batch(self, requests: Sequence[LoadRequest], arrivals: Sequence[float]) -> Batch:
        batch = Batch(self._pool, self._api, arrivals, self._encoder(requests), self._options.timeout_s, self._stop)
        batch.keep_text = self._options.keep_text
        return batch

    def _encoder(self, requests: Sequence[LoadRequest]) -> Callable[[int], bytes]:
        def encode(index: int) -> bytes:
            seed = self._options.seed + index
            request_id = f"{self._run_id}-{index}"
            body = self._api.body(requests[index], self._generation, request_id, seed)
            path = self._api.path(self._generation)
            return request_bytes(self._options.endpoint, "POST", path, msgspec.json.encode(body), self._headers)

        return encode


def discover_model(endpoint: Endpoint, headers: Mapping[str, str]) -> str:
    """Returns the name of the first model in ``/v1/models``. Raises ``ServerUnreachableError`` if the list has none."""
    url = f"{endpoint.url}/v1/models"
    try:
        status, _, body = endpoint.get("/v1/models", MODELS_TIMEOUT_S, headers)
    except (OSError, http.client.HTTPException) as error:
        raise ServerUnreachableError(f"{url}: {str(error) or type(error).__name__}") from error
    if status != 200:
        raise ServerUnreachableError(f"{url} returns {status}: name the model with --model")
    try:
        models = msgspec.json.decode(body, type=ModelList).data
    except msgspec.DecodeError as error:
        raise ServerUnreachableError(f"{url}: {error}: name the model with --model") from error
    if not models:
        raise ServerUnreachableError(f"{url} lists no model: name one with --model")
    return models[0].id


def _allow_many_connections() -> None:
    """Increases the soft limit of open files, because every unfinished request has a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_OPEN_FILES if hard == resource.RLIM_INFINITY else min(WANTED_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
