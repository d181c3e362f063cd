"""The data that all HTTP handlers share: engine, log, metrics, limits, and the table of endpoints."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Protocol

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from llm_serving.access.control import AccessControl, Visit
from llm_serving.config import Config
from llm_serving.config.image_section import ImageConfig
from llm_serving.config.kv_tier_section import KvTierConfig
from llm_serving.constraints.compile_queue import CompileQueue
from llm_serving.constraints.compiler import GrammarCompiler
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.engine.chat_template import ChatTemplate
from llm_serving.errors import ModelNotFoundError, QueueFullError
from llm_serving.flight.setup import recordings_folder
from llm_serving.lora.registry import Adapter
from llm_serving.model.pooling import Pooling
from llm_serving.model.vision import ImageProcessing, VisionShape
from llm_serving.parsing.formats import AUTO, OutputFormat
from llm_serving.registry.freeing import LargeBodies
from llm_serving.registry.registry import ModelRegistry
from llm_serving.server.batches.store import BatchStore
from llm_serving.server.early_refusals.expected import ExpectedRequests
from llm_serving.server.errors import UnavailableError
from llm_serving.server.fields.validation import RequestModel, short
from llm_serving.server.http.lifecycle import ActiveRequests
from llm_serving.server.http.loop_watch import LoopWatch
from llm_serving.server.limits import DEFAULT_REQUEST_CONTEXTS
from llm_serving.server.published.request_ids import RequestIds
from llm_serving.server.responses.store import ResponseStore
from llm_serving.sessions.book import SessionBook
from llm_serving.shadow.runner import ShadowRunner
from llm_serving.telemetry.log import EventLog
from llm_serving.telemetry.metrics import Metrics
from llm_serving.tracing.export import Tracing

_NOT_READY = {
    "starting": "The model is still being loaded; try again in a few seconds.",
    "recovering": "The server is recovering from the loss of an agent; try again in a few seconds.",
    "stopped": "The engine has stopped; the server must be restarted.",
}


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The settings that the HTTP handlers need.

    ``max_context`` is the maximum number of tokens of a sequence, prompt and output together.
    """

    max_prompt_tokens: int
    max_context: int
    vocab_size: int
    max_body_bytes: int = 8 * 1024 * 1024
    max_request_tokens: int | None = None
    """Maximum number of tokens of one HTTP request. None means the default, see ``request_token_limit``."""
    max_body_bytes_in_flight: int = 64 * 1024 * 1024
    """Maximum size in bytes of all request bodies together that are being read or parsed."""
    max_connections: int = 4096
    is_quiet: bool = False
    """Whether the server is in the quiet mode (``power.mode``)."""
    structured_outputs: bool = True
    tool_format: str = AUTO
    """Name of the format of tool calls, see ``llm_serving.parsing.formats``."""
    reasoning_format: str = AUTO
    """Name of the format in which the model writes its reasoning."""
    template_day: date | None = None
    """The date that chat templates write into prompts. None means the present date."""
    log_prompts: bool = False
    cache_salt: str = "auto"
    """Which requests share blocks of the prefix cache. ``none``: all requests. ``tenant``: only requests with the same
    API key. ``auto``: ``tenant`` if the server has keys, otherwise ``none``."""
    hosts: frozenset[str] = frozenset()
    """Names of this server in lower case that the header ``Host`` may have. Addresses and ``localhost`` are always
    allowed. ``*`` allows every name."""
    cors_origins: frozenset[str] = frozenset()
    """Origins of web pages that may use the server, in lower case. ``*`` allows all pages."""
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Maps a sampling parameter to its value in requests to OpenAI's endpoints that do not set it."""
    trusted_proxies: tuple[str, ...] = ("127.0.0.1", "::1")
    """Addresses and networks of the clients whose header ``X-Request-Start`` the server uses."""
    max_keep_s: float = 3600.0
    """Maximum value of a request's ``cache_keep_s``, in seconds."""
    max_session_bytes: int = 1 << 30
    """Maximum size of a session file in a request, in bytes."""
    pooling: Pooling | None = None
    """How the server computes embeddings, scores or classes. None if it generates text."""
    info: dict[str, object] = field(default_factory=dict)
    """Description of the model that ``/server_info`` shows."""
    vision: VisionShape | None = None
    """The vision encoder of the model. None if the model reads only text."""
    processing: ImageProcessing | None = None
    """How images become tiles. None if the model reads only text."""
    tile_cost: int = 0
    """Cost of encoding the largest tile of an image, as the number of prompt tokens that take the same time."""
    images: ImageConfig = field(default_factory=ImageConfig)
    """Limits of images."""
    profile_folder: str = "output/profiles"
    """Folder for the files of ``/profile/start``."""
    recordings_folder: str | None = None
    """Folder of the flight recordings. None if the flight recorder is off."""
    settings: dict[str, object] = field(default_factory=dict)
    """Effective settings of MindSpore, notes about the config, and the config's settings without effect.
    ``/server_info`` shows them.
    """

    @property
    def request_token_limit(self) -> int:
        """Maximum number of tokens of one HTTP request. It counts all prompts and the maximum outputs."""
        if self.max_request_tokens is not None:
            return self.max_request_tokens
        return DEFAULT_REQUEST_CONTEXTS * self.max_context

    @classmethod
    def from_config(cls, config: Config) -> ServerSettings:
        serving = config.serving_config
        return cls(
            max_prompt_tokens=config.max_prompt_len,
            max_context=config.max_model_len,
            vocab_size=config.shape.vocab_size,
            max_body_bytes=serving.max_body_bytes,
            max_body_bytes_in_flight=max(serving.max_body_bytes_in_flight, serving.max_body_bytes),
            max_connections=serving.max_connections,
            is_quiet=config.power.is_quiet,
            max_request_tokens=serving.max_request_tokens,
            structured_outputs=serving.structured_outputs,
            tool_format=serving.tool_format,
            reasoning_format=serving.reasoning_format,
            template_day=serving.template_day,
            log_prompts=config.log_config.log_prompts,
            cache_salt=config.scheduler_config.cache_salt,
            hosts=_host_names(serving.server_ip, serving.allow_remote, serving.allowed_hosts or ()),
            cors_origins=frozenset(origin.lower() for origin in serving.cors_origins or ()),
            sampling_defaults=config.sampling_defaults.values(),
            trusted_proxies=serving.trusted_proxies or (),
            max_keep_s=config.kv_tier_config.max_keep_s,
            max_session_bytes=config.kv_tier_config.max_session_bytes,
            pooling=config.pooling,
            vision=config.shape.vision,
            processing=config.processing,
            tile_cost=config.tile_cost,
            images=config.image_config,
            profile_folder=str(Path(config.log_config.path).parent / "profiles"),
            recordings_folder=str(recordings_folder(config).absolute())
            if config.log_config.flight_recorder_mib
            else None,
            info={
                "architecture": config.shape.architecture,
                "dtype": config.model_config.model_dtype,
                "device": config.device,
                "op_table": config.op_table,
                "parameters": config.shape.num_parameters,
                "vocab_size": config.shape.vocab_size,
                "max_num_seqs": config.max_num_seqs,
                "policy": config.scheduler_config.policy,
                "speculation": asdict(config.speculative_config),
                "task": "generate" if config.pooling is None else config.pooling.task,
                "sampling_defaults": config.sampling_defaults.values(),
            },
            settings={
                "use_flash_attention": True,
                "save_graphs": config.context.save_graphs,
                "save_graphs_path": config.context.save_graphs_path if config.context.save_graphs else None,
                "notes": list(config.notes),
                "without_effect": [asdict(each) for each in config.unused],
            },
        )


def _host_names(server_ip: str, allow_remote: bool, allowed: Sequence[str]) -> frozenset[str]:
    """Returns the host names by which clients may address the server.

    If other machines can connect, the result includes the name of this machine.
    """
    own = (server_ip, socket.gethostname()) if allow_remote else (server_ip,)
    return frozenset(name.lower() for name in (*own, *allowed))


@dataclass(slots=True)
class RunningProfile:
    """Describes the profile that runs now, if any. All versions of the models share this object.

    ``lock`` is held while the agents start or stop a profile.
    """

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    folder: str | None = None
    """Folder with the files of the running profile, which no other profile has. None if no profile runs."""
    engine: AsyncEngine | None = None
    """The engine whose agents are profiled. A reload of the model ends this engine, and with it the profile."""
    timer: asyncio.TimerHandle | None = None
    """Timer that stops a profile at its maximum time."""
    last: dict[str, Any] | None = None
    """Result of a profile that the timer stopped. It is kept until a request asks for it."""


@dataclass(slots=True)
class ServerState:
    """The objects and settings that handlers use for one version of a model.

    All versions of all models share the objects that do not depend on the model. A handler receives the state of the
    main model. It gets the state of the request's model from ``models.served``.
    """

    engine: AsyncEngine
    log: EventLog
    metrics: Metrics
    settings: ServerSettings
    endpoints: Sequence[Endpoint]
    access: AccessControl | None = None
    """API keys and audit log. None if there are neither."""
    grammars: GrammarCompiler | None = None
    """Compiles the grammars of structured output. None if it is turned off."""
    compile_queue: CompileQueue = field(default_factory=CompileQueue)
    """The compilations of the grammars of all models."""
    tracing: Tracing | None = None
    """Traces requests. None if traces are off."""
    active: ActiveRequests = field(default_factory=ActiveRequests)
    profile: RunningProfile = field(default_factory=RunningProfile)
    timeline_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """The lock that is held while a process reads the flight recording."""
    adapters_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """The lock that is held while an adapter is loaded or unloaded."""
    loop_watch: LoopWatch = field(default_factory=LoopWatch)
    body_bytes: int = 0
    """Bytes of all request bodies that are being read or parsed."""
    large_bodies: LargeBodies = field(default_factory=LargeBodies)
    """Returns the memory of large request bodies to the operating system."""
    expected: ExpectedRequests = field(default_factory=ExpectedRequests)
    """Requests that were not refused early, and that will probably be passed to the engine soon."""
    renders_inline: bool = True
    """Whether the event loop's thread may render the chat template. It becomes False when a rendering needs more
    operations than are allowed in this thread. From then on, another thread renders.
    """
    started_at: float = field(default_factory=time.time)
    batches: BatchStore | None = None
    """The files and batches of `/v1/files` and `/v1/batches`. None if they are turned off."""
    chat_ids: RequestIds = field(default_factory=RequestIds)
    """The request ids in use that clients of `/chat` have chosen."""
    responses: ResponseStore = field(default_factory=ResponseStore)
    """The stored responses of `/v1/responses`."""
    sessions: SessionBook = field(default_factory=lambda: SessionBook(KvTierConfig().sessions_per_key, time.time))
    """The sessions of all models."""
    shadow: ShadowRunner | None = None
    """Compares the main model with a candidate. None if shadow serving is off."""
    models: ModelRegistry[ServerState] | None = None
    """All models of the server. None if the server has only one model, which cannot be replaced."""
    _format: tuple[ChatTemplate, OutputFormat] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the server has stopped serving for good. During a reload, requests wait and this is False."""
        return self.engine.state == "stopped" and (self.models is None or self.models.ended.is_set())

    def follow(self, view: ServerState) -> None:
        """Replaces the engine and the settings by those of ``view``, the main model's new version.

        Without this call, the server's own state would keep the engine of the old version in memory.
        """
        self.engine, self.log, self.settings, self.grammars = view.engine, view.log, view.settings, view.grammars
        self.renders_inline, self._format = view.renders_inline, view._format

    @property
    def output_format(self) -> OutputFormat:
        """The formats in which the model writes reasoning and tool calls."""
        tokenizer = self.engine.tokenizer
        template = tokenizer.tool_template or tokenizer.chat_template
        if self._format is None or self._format[0] is not template:
            settings = self.settings
            found = OutputFormat.of_template(template.source, settings.tool_format, settings.reasoning_format)
            self._format = template, found
        return self._format[1]

    def check_queue(self, tenant: str) -> None:
        """Raises QueueFullError if the queue is full for ``tenant``. Call this method before the body is read.

        If the server has several models, this method does nothing, because the body names the model. ``models.served``
        then checks the queue of that model.
        """
        if self._has_one_queue:
            self.refuse_if_full(tenant)

    def early_refusal(self, tenant: str, scope: Scope) -> QueueFullError | None:
        """Returns the error that ``check_queue`` would raise, or None. Like ``check_queue``, also logs and counts the
        refusal.

        Expected requests count as waiting. If the result is None, the request of ``scope`` is expected, too.
        """
        if not self._has_one_queue:
            return None
        full = self._full(tenant, self.expected.num)
        if full is None:
            self.expected.expect(scope)
        return full

    def refuse_if_full(self, tenant: str) -> None:
        """Raises QueueFullError if the queue of this model is full for ``tenant``."""
        full = self._full(tenant)
        if full is not None:
            try:
                raise full
            finally:
                del full  # breaks a reference cycle: the error's traceback refers to this frame

    @property
    def _has_one_queue(self) -> bool:
        return self.models is None or not self.models.has_several

    def _full(self, tenant: str, num_expected: int = 0) -> QueueFullError | None:
        full = self.engine.queue_full(tenant, num_expected)
        if full is not None:
            self.log.event("request_refused", code=full.code, message=str(full))
        return full

    def check_model(self, name: str | None, visit: Visit | None) -> None:
        """Raises ModelNotFoundError unless ``name`` is None or names a model or an adapter of this server.

        Raises NotPermittedError if the key of ``visit`` may not use the model. This check comes first, so that the key
        does not learn which other models exist.
        """
        if visit is not None:
            visit.check_model(name or self.engine.model_name)
        if self.models is None or self.models.find(name) is None:
            self.find_adapter(name, visit)

    def find_adapter(self, name: str | None, visit: Visit | None) -> Adapter | None:
        """Returns the LoRA adapter ``name`` of this model. If ``name`` is None or the name of this model, returns None.

        Raises ModelNotFoundError for any other name. The error names only models that the key of ``visit`` may use.
        """
        if name is None or name == self.engine.model_name:
            return None
        adapter = self.engine.adapters.find(name)
        if adapter is None:
            raise self.unknown_model(name, visit)
        return adapter

    def unknown_model(self, name: str, visit: Visit | None) -> ModelNotFoundError:
        """Returns the error for a request that names a model which the server does not have.

        The error names only models that the key of ``visit`` may use.
        """
        names = [self.engine.model_name] if self.models is None else [model.name for model in self.models.models]
        usable = [short(each) for each in names if visit is None or visit.may_use(each)]
        served = ", ".join(usable) or "no model to this key"
        adapters = " and its loaded adapters" if self.engine.adapters.max_adapters else ""
        return ModelNotFoundError(
            f"The model {short(name)} does not exist; this server serves {served}{adapters}.", param="model"
        )

    def check_running(self) -> None:
        """Raises UnavailableError while the server stops."""
        if self.active.stopping:
            raise UnavailableError("The server is stopping.", "stopping")

    def check_ready(self) -> None:
        """Raises UnavailableError while the server cannot serve requests."""
        self.check_running()
        state = self.engine.state
        if state != "ready":
            raise UnavailableError(_NOT_READY.get(state, f"The engine is {state}."), state)


class AnyResponse(Protocol):
    """A response of a handler: a Starlette response or an ``EventStream``."""

    status_code: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


Handler = Callable[[ServerState, Request], Awaitable[AnyResponse]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An HTTP endpoint: one method of one path. ``example`` is a JSON body for ``/docs``."""

    method: str
    path: str
    handler: Handler
    summary: str
    body: type[RequestModel] | None = None
    example: str | None = None
    in_docs: bool = True
    media_type: str = "application/json"
    """Type of the request's body."""
    admin: bool = False
    """Whether only keys with the right ``admin`` may use the endpoint."""
    queued: bool = False
    """Whether the handler first calls ``check_queue``. Requests to this endpoint may be refused before the handler is
    called, see ``early_refusals``.
    """
