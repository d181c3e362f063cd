"""The engine as the HTTP edge sees it. ``llm_serving.engine.async_engine.AsyncEngine`` is the real one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from llm_serving.engine.beam_search import BeamSearchParams
from llm_serving.engine.open_request import PieceSink
from llm_serving.engine.receipts import RequestReceipt
from llm_serving.engine.search import SearchResult
from llm_serving.engine.status import ReplicaStatus
from llm_serving.engine.tokenizer import Tokenizer
from llm_serving.errors import QueueFullError
from llm_serving.request import DEFAULT_SCHEDULING, SamplingParams, SchedulingParams

__all__ = ["Engine", "EngineStatus", "EventLogger", "OpenRequest"]


class EngineStatus(Protocol):
    """How the engine is doing; the fields of ``llm_serving.engine.status.EngineStatus``."""

    @property
    def state(self) -> str: ...

    @property
    def running(self) -> int: ...

    @property
    def waiting(self) -> int: ...

    @property
    def free_blocks(self) -> int: ...

    @property
    def total_blocks(self) -> int: ...

    @property
    def replicas(self) -> Sequence[ReplicaStatus]: ...

    @property
    def steps(self) -> int: ...

    @property
    def last_step_age_s(self) -> float | None: ...

    @property
    def agents(self) -> list[dict[str, object]]: ...

    @property
    def preemptions(self) -> int: ...

    @property
    def swapped(self) -> int: ...

    @property
    def swaps(self) -> int: ...

    @property
    def kv_waste(self) -> float: ...

    @property
    def prefix_hit_tokens(self) -> int: ...

    @property
    def prefix_query_tokens(self) -> int: ...

    @property
    def recorder_s(self) -> float: ...


class Engine(Protocol):
    """Requests in, streams of pieces out. Used from the event loop's thread only."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def model_name(self) -> str: ...

    @property
    def end_token_ids(self) -> frozenset[int]: ...

    @property
    def max_model_len(self) -> int: ...

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
    ) -> OpenRequest:
        """Serve a request: its pieces go to ``sink`` as they come. Raises LLMServingError when it is refused at once.

        Close what is returned; that aborts a request that has not ended.
        """

    async def search(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: BeamSearchParams,
        arrival_time: float | None = None,
        *,
        scheduling: SchedulingParams = DEFAULT_SCHEDULING,
    ) -> SearchResult:
        """The likeliest answers to a prompt. Raises LLMServingError when it is refused or fails; cancel it to abort."""

    def queue_full(self) -> QueueFullError | None:
        """Why a request that comes now would be refused; None when it may be taken. Cheap."""

    def receipt(self, request_id: str, /) -> RequestReceipt | None:
        """Where the time of a request went that is being served, or ended not long ago; else None."""

    def status(self) -> EngineStatus: ...

    async def probe(self, timeout_s: float, /) -> bool:
        """Whether every agent answers within ``timeout_s``."""


class OpenRequest(Protocol):
    """A request being served; see ``llm_serving.engine.open_request.OpenRequest``."""

    def receipt(self, now: float, /) -> RequestReceipt:
        """Where the request's time went until ``now``, on the monotonic clock."""

    def delivered(self, now: float, /) -> None:
        """Output had been written to the client's socket by ``now``, on the monotonic clock."""

    def close(self, now: float | None = None, /) -> None:
        """The reader is done: the answer was written by ``now``, by default with the last ``delivered``."""


class EventLogger(Protocol):
    """The part of ``llm_serving.telemetry.log.EventLog`` the server uses."""

    def event(self, name: str, /, *, level: str = "info", **fields: object) -> None: ...

    def error(self, message: str, /, *, event: str = "error", **fields: object) -> None: ...
