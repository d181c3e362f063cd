"""Every error the project raises on purpose, in one tree.

LLMServingError
├── ConfigError               a config file or override is wrong (exit code 2)
│   └── UnknownFormatError    a weight or KV cache format is not in the registry
├── CheckpointError           a model folder or one of its tensors is wrong
├── MemoryPlanError           weights, KV cache and activations do not fit the machine
├── RequestError              a request is wrong or cannot be taken (an HTTP 4xx)
│   ├── ModelNotFoundError    no model of that name is served (404)
│   ├── ContextLengthError    prompt and output do not fit the model's context (400)
│   ├── QueueFullError        the bounded queue is full, come back later (429)
│   └── DeadlineExceededError its deadline passed before it could begin (504)
├── EngineFailedError         the engine ended a request that it had taken (an HTTP 500)
├── ProtocolError             a peer broke the framing, the schema or the handshake
└── AgentError                an agent could not do its work (an HTTP 5xx)
    ├── AgentStartError       it did not become ready; carries its traceback
    ├── AgentLostError        it died or stopped answering
    └── GroupDownError        another agent of its group did
        └── GroupBrokenError  it did, in the middle of a step of its group
"""

from __future__ import annotations


class LLMServingError(Exception):
    """Base of the tree. The text says what was wrong, the value, the limit and what to do."""


class ConfigError(LLMServingError):
    """A config file or a command-line override is wrong; nothing has been started."""


class UnknownFormatError(ConfigError, ValueError):
    """A weight or KV cache format is not in the registry, or the operators do not have it."""


class CheckpointError(LLMServingError):
    """A model folder, or one tensor in it, is not what the config promises."""


class MemoryPlanError(LLMServingError):
    """The planned memory exceeds what the machine has; the text carries the table."""


class RequestError(LLMServingError):
    """A request is wrong or cannot be taken. Only this request is affected.

    ``status`` is the HTTP status, ``code`` a short machine-readable word, ``param`` the field at fault.
    """

    status = 400
    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class ModelNotFoundError(RequestError):
    """The request names a model that is not served."""

    status = 404
    code = "model_not_found"


class ContextLengthError(RequestError):
    """The prompt, or prompt plus requested output, exceeds the context or the KV cache."""

    code = "context_length_exceeded"


class QueueFullError(RequestError):
    """The bounded waiting queue is full. ``retry_after_s`` estimates when there may be room: seconds, at least 1."""

    status = 429
    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceededError(RequestError):
    """The request's own deadline passed while it waited; no work was spent on it.

    504 and not 503: the server is well, and would take another request; nor 408, which says that the client was slow.
    """

    status = 504
    code = "deadline_exceeded"


class EngineFailedError(LLMServingError):
    """The engine ended a request that it had taken."""


class ProtocolError(LLMServingError):
    """A frame, message or handshake was malformed; the connection is closed."""


class AgentError(LLMServingError):
    """An agent failed to do its work."""


class AgentStartError(AgentError):
    """An agent ended, or reported failure, before it was ready."""


class AgentLostError(AgentError):
    """An agent died or stopped answering while requests were in flight."""


class GroupDownError(AgentError):
    """Another agent of an agent's group is gone, or has not come in time: this one cannot go on either."""


class GroupBrokenError(GroupDownError):
    """An agent could not do its part of a step in which others of its group wait for it: they all end."""
