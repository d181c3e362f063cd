"""What the handlers share: the engine, the log, the metrics, and the limits of this deployment."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llm_serving.server.engine_api import Engine, EventLogger
from llm_serving.server.errors import UnavailableError
from llm_serving.server.lifecycle import ActiveRequests
from llm_serving.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from llm_serving.config import Config

__all__ = ["ServerSettings", "ServerState"]

_NOT_READY = {
    "starting": "The model is still being loaded; come back in a moment.",
    "recovering": "The server is recovering from the loss of an agent; come back in a moment.",
    "stopped": "The engine has stopped; the server must be started again.",
}


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The part of the config the HTTP edge needs.

    ``max_context`` is the longest sequence, prompt and output together.
    """

    max_prompt_tokens: int
    max_context: int
    vocab_size: int
    max_body_bytes: int = 8 * 1024 * 1024
    log_prompts: bool = False
    loopback: bool = True
    """The server listens on a loopback address, so other host names than the machine's own are an attack."""
    cache_salt: str = "none"
    """`tenant`: requests with different API keys share nothing in the prefix cache."""
    hosts: frozenset[str] = frozenset()
    """Further names in a ``Host`` header that mean this server."""
    info: dict[str, object] = field(default_factory=dict)
    """Facts about the model for ``/server_info``."""

    @classmethod
    def from_config(cls, config: Config) -> ServerSettings:
        host = config.serving_config.server_ip
        return cls(
            max_prompt_tokens=config.max_prompt_len,
            max_context=config.max_model_len,
            vocab_size=config.shape.vocab_size,
            max_body_bytes=config.serving_config.max_body_bytes,
            log_prompts=config.log_config.log_prompts,
            cache_salt=config.scheduler_config.cache_salt,
            loopback=not config.serving_config.allow_remote,
            hosts=frozenset({host}),
            info={
                "architecture": config.shape.architecture,
                "dtype": config.model_config.model_dtype,
                "device": config.device,
                "op_table": config.op_table,
                "parameters": config.shape.num_parameters,
                "vocab_size": config.shape.vocab_size,
                "max_num_seqs": config.max_num_seqs,
                "policy": config.scheduler_config.policy,
            },
        )


@dataclass(slots=True)
class ServerState:
    """One server's state, handed to every handler."""

    engine: Engine
    log: EventLogger
    metrics: Metrics
    settings: ServerSettings
    active: ActiveRequests = field(default_factory=ActiveRequests)
    started_at: float = field(default_factory=time.time)

    def require_room(self) -> None:
        """Raises QueueFullError when the queue is full already. Asked before a request's body is looked at, so that
        refusing one costs next to nothing however many come."""
        full = self.engine.queue_full()
        if full is not None:
            self.log.event("request_refused", code=full.code, message=str(full))
            try:
                raise full
            finally:
                del full  # its traceback holds this frame: as a cycle, both would wait for the collector

    def require_ready(self) -> None:
        """Raises UnavailableError while requests cannot be served."""
        if self.active.stopping:
            raise UnavailableError("The server is stopping.", "stopping")
        state = self.engine.status().state
        if state != "ready":
            raise UnavailableError(_NOT_READY.get(state, f"The engine is {state}."), state)
