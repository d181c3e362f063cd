"""All error classes of the project, in one tree.

LLMServingError
├── ConfigError               a config file or override is wrong (exit code 2)
│   ├── UnknownFormatError    a weight or KV cache format is not in the registry
│   └── HubError              a model cannot be downloaded or found by its name
├── CheckpointError           a model folder or one of its tensors is wrong
├── MemoryPlanError           weights, KV cache and activations do not fit the machine
├── ModelMemoryError          a further model does not fit next to the models in memory
├── RequestError              a request is wrong or cannot be accepted (an HTTP 4xx)
│   ├── ModelNotFoundError    the server does not serve this model (404)
│   ├── AdapterError          a LoRA adapter cannot be loaded (400)
│   ├── ContextLengthError    prompt and output do not fit the model's context (400)
│   ├── UnauthorizedError     the request has no valid API key (401)
│   ├── NotPermittedError     the API key does not have the right (403)
│   ├── ModelStateError       the model's state does not permit a command (409)
│   ├── TryLaterError         the request is refused for now (429)
│   │   ├── QueueFullError    the waiting queue is full
│   │   ├── QuotaExceededError  the API key has used its quota
│   │   └── ModelUnavailableError  the model does not serve now (503)
│   └── DeadlineExceededError the request's deadline passed before it started (504)
├── EngineFailedError         the engine ended an accepted request (an HTTP 500)
│   ├── NotFiniteError        the logits of the request were NaN or infinite
│   └── AgentLostTwiceError   the request killed its agent, as far as the server can tell
├── ProtocolError             a peer violated the framing, the schema or the handshake
└── AgentError                an agent could not do its work (an HTTP 5xx)
    ├── AgentStartError       the agent did not become ready; has its traceback
    ├── AgentLostError        the agent died or stopped replying
    │   ├── NodeDrainedError  the agent's machine was drained and its requests took too long
    │   └── SelfCheckError    the agent computes wrong results
    ├── SamplingFailedError   an agent of a group could not sample a step that it has computed
    └── GroupDownError        another agent of the group has ended
        └── GroupBrokenError  an agent failed in the middle of a step of its group
"""

from __future__ import annotations


class LLMServingError(Exception):
    """Base class of all errors of the project. The message states the cause, the value, the limit and the remedy."""


class ConfigError(LLMServingError):
    """A config file or a command-line override is wrong. Nothing has been started."""


class UnknownFormatError(ConfigError, ValueError):
    """A weight or KV cache format is not in the registry, or the operators do not support it."""


class HubError(ConfigError):
    """A model cannot be downloaded or found by its name. The message states the remedy."""


class CheckpointError(LLMServingError):
    """A model folder or one of its tensors does not match the config."""


class MemoryPlanError(LLMServingError):
    """The planned memory exceeds the available memory. The message includes the table of the memory plan."""


class ModelMemoryError(LLMServingError):
    """A model does not fit into the memory for all models of this server. The message states its need and the limit."""


class RequestError(LLMServingError):
    """A request is wrong or cannot be accepted. Only this request is affected.

    ``status`` is the HTTP status, ``code`` a short text by which programs recognise the error, and ``param`` the wrong
    field.
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


class ModelStateError(RequestError):
    """A command for a model is refused, because of the model's state or because the memory is too small."""

    status = 409
    code = "model_state"


class AdapterError(RequestError):
    """The folder of a LoRA adapter is wrong, or uses something that this server does not support."""

    code = "invalid_adapter"

    def __init__(self, message: str, *, param: str | None = "lora_path", code: str | None = None) -> None:
        super().__init__(message, param=param, code=code)


class ContextLengthError(RequestError):
    """The prompt, or prompt plus requested output, exceeds the context or the KV cache."""

    code = "context_length_exceeded"


class UnauthorizedError(RequestError):
    """The request has no API key, or its API key is not valid."""

    status = 401
    code = "invalid_api_key"


class NotPermittedError(RequestError):
    """The API key of the request is valid, but does not have the right that the request needs."""

    status = 403
    code = "not_permitted"


class TryLaterError(RequestError):
    """The request is refused for now. ``retry_after_s`` estimates when another attempt may succeed, in seconds."""

    status = 429

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFullError(TryLaterError):
    """The waiting queue is full. ``retry_after_s`` estimates when it may have space."""

    code = "queue_full"


class QuotaExceededError(TryLaterError):
    """The API key has used its ``quota``, for example ``requests_per_minute``."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, quota: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.quota = quota

    @property
    def is_per_minute(self) -> bool:
        """True if the quota refills within a minute. False for the requests in flight."""
        return self.quota.endswith("_per_minute")


class ModelUnavailableError(TryLaterError):
    """The request's model is not in memory, and the request would have to wait too long for its start."""

    status = 503
    code = "model_unavailable"


class DeadlineExceededError(RequestError):
    """The request's deadline passed while it waited. No tokens were computed for it.

    The status is not 503, because the server works and accepts other requests. It is not 408 either, because the client
    was not slow.
    """

    status = 504
    code = "deadline_exceeded"


class EngineFailedError(LLMServingError):
    """The engine ended a request that it had accepted."""


class NotFiniteError(EngineFailedError):
    """The model's logits for a request were NaN or infinite, so no token could be chosen."""


class AgentLostTwiceError(EngineFailedError):
    """The agent was lost twice while it computed the same tokens of this request.

    The second time, no other request was in flight, so this request is the likely cause.
    """

    TEXT = "the request lost its agent twice at the same place, the second time alone, so it is not computed again"
    """The text in ``RequestOutput.error`` that reports this error."""

    @classmethod
    def or_failure(cls, error: str | None) -> EngineFailedError:
        """Returns the exception for ``error``, the error text in the last output of a request.

        The exception is of this class if the text is ``TEXT``, otherwise an EngineFailedError.
        """
        return (cls if error == cls.TEXT else EngineFailedError)(error or "The engine could not finish the request.")


class ProtocolError(LLMServingError):
    """A frame, a message or the handshake was malformed. The connection is closed."""


class AgentError(LLMServingError):
    """An agent failed to do its work."""


class AgentStartError(AgentError):
    """An agent ended or reported an error before it was ready."""


class AgentLostError(AgentError):
    """An agent died or stopped replying while requests were in flight."""


class NodeDrainedError(AgentLostError):
    """The machine of an agent was drained, and the agent's requests did not end in time. These requests move to other
    agents.
    """


class SelfCheckError(AgentLostError):
    """An agent failed a self-check: it computes wrong results.

    ``check`` is the name of the self-check. ``step`` is the step that failed it, or None if the check is not about one
    step.
    """

    def __init__(self, message: str, check: str, step: int | None = None) -> None:
        super().__init__(message)
        self.check = check
        self.step = step


class SamplingFailedError(AgentError):
    """An agent of a group has run its whole part of a step, but could not sample it. ``cause`` is the error.

    All agents of the group can run the next step.
    """

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class GroupDownError(AgentError):
    """Another agent of the group has ended or is too slow, so this agent cannot finish the step that all of them
    compute.
    """


class GroupBrokenError(GroupDownError):
    """An agent failed in the middle of a step, for which the other agents of its group wait. All agents of the group
    end.
    """
