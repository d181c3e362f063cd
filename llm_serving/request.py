"""A request of the engine: prompt token ids, parameters, state and output. This file knows no HTTP, clock or device."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from llm_serving.ipc.tiles import PromptTile
from llm_serving.sampling_params import SamplingParams
from llm_serving.telemetry.receipt import BlockReason, Receipt

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class RequestStatus(enum.Enum):
    """The state of a request in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    """State of a request whose keys and values are in host memory. The request waits for blocks on the device."""
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"
    """The request ended because an end token, a stop token id or a stop string was generated."""
    LENGTH = "length"
    """The request ended because ``max_tokens`` or the end of the model's context was reached."""
    ABORT = "abort"
    """The request ended because the client closed the connection or asked to stop. If ``RequestOutput.error`` is set,
    the deadline passed before the request started."""
    ERROR = "error"
    """The request ended because the server could not continue. ``RequestOutput.error`` has the reason."""


class TraceSource(Protocol):
    """The trace of an HTTP request, which makes a trace for each of its sequences. See ``llm_serving.tracing``."""

    def sequence(self) -> RequestTrace:
        """Return the trace of one more sequence."""


@dataclass(frozen=True, slots=True)
class SchedulingParams:
    """The urgency and the tenant of a request. These parameters do not change the request's tokens.

    Times are seconds. ``Request`` has fields with the same names, which are described there. ``deadline`` counts from
    the request's arrival.
    """

    priority: int = 0
    tenant: str = ""
    cache_salt: bytes = b""
    ttft_objective: float | None = None
    tbt_objective: float | None = None
    deadline: float | None = None
    group: str = ""
    trace: TraceSource | None = None
    """Makes the trace of the request's sequences. None if the request is not traced."""


DEFAULT_SCHEDULING = SchedulingParams()


class RequestTrace(Protocol):
    """Collects the spans of one sequence. See ``llm_serving.tracing``."""

    def step(
        self, sent: float, done: float, kind: str, sequences: int, tokens: int, parts_us: tuple[int, int, int], /
    ) -> None:
        """Note a step that returned a token. The engine thread calls this method."""

    def end(self, request: Request, output: RequestOutput, timings: RequestTimings, /) -> None:
        """Emit the spans of the sequence, which has ended. Does not block. The event loop calls this method."""


class ConstraintError(Exception):
    """A constraint cannot continue, for example because its grammar became too complex. Its request ends."""


class Constraint(Protocol):
    """Says which tokens may follow in one sequence. The engine thread calls all methods."""

    @property
    def num_words(self) -> int:
        """Length of a mask, in words of 32 tokens."""

    def advance(self, token_id: int) -> None:
        """Add the next token of the sequence to the constraint.

        Raises ConstraintError if the constraint cannot continue.
        """

    def mask(self) -> npt.NDArray[np.uint32]:
        """Return the tokens that may follow: bit ``id % 32`` of word ``id // 32`` is 1. At least one token may follow.

        After an error every token may follow, and the next ``advance`` raises ConstraintError.
        """


@runtime_checkable
class ForkableConstraint(Constraint, Protocol):
    """A constraint that can look ahead: which tokens may follow after some guessed tokens."""

    @property
    def has_failed(self) -> bool:
        """True if the next ``advance`` raises ConstraintError for any token."""

    def fork(self) -> ForkableConstraint | None:
        """Return a copy that advances independently, or None if this constraint cannot be copied."""

    def forced_tokens(self) -> list[int]:
        """Return tokens that very probably follow, because the constraint leaves no other text. Often empty."""


class TileHold(Protocol):
    """Holds the places of a request's tiles in the shared memory of images."""

    def end(self) -> None:
        """Give the places back. May be called several times, by any thread."""


ALONE_TO_THE_END = 1 << 40
"""Value of ``Request.alone_until`` that no number of output tokens reaches."""


@dataclass(slots=True, eq=False)
class Request:
    """One sequence in the scheduler, which owns it from ``add_request`` to its end.

    ``arrival_time`` and the other times are seconds on the engine's monotonic clock. Without a given ``receipt``, a new
    one starts at ``arrival_time``.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    arrival_time: float
    end_token_ids: frozenset[int] = frozenset()
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    """Number of tokens whose keys and values are in the cache, or will be after the steps in flight."""
    num_inflight_tokens: int = 0
    """Number of sampled tokens that steps in flight will return. The server does not know their values yet."""
    row: int = -1
    """The batch row of the sequence: its place in the agent's state (last token, token history). -1 if it has none."""
    num_preemptions: int = 0
    num_losses: int = 0
    """Number of times that an agent was lost while a step with this request was in flight."""
    alone_until: int = 0
    """The request is a suspect until it has this number of output tokens, see ``llm_serving.scheduler.quarantine``."""
    finish_reason: FinishReason | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finish_time: float | None = None
    priority: int = 0
    """A smaller number is served earlier, within the policy's order."""
    tenant: str = ""
    """The tenant, for fairness: a short hash of the API key. Empty without a key."""
    cache_salt: bytes = b""
    """Part of the hashes of the prefix cache. Requests with different salts share no blocks."""
    ttft_objective: float | None = None
    """Objective for the time to the first token, in seconds. None for the config's objective."""
    tbt_objective: float | None = None
    """Objective for the time between two tokens, in seconds. None for the config's objective."""
    deadline: float | None = None
    """A request without a first token at this time is dropped (``FinishReason.ABORT``)."""
    num_cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache at the first start."""
    group: str = ""
    """Requests of a group have the same prompt and run on the same replica. Empty for a request without a group."""
    replica: int | None = 0
    """The replica that serves the request, or served it last. None before the first placement at one of several."""
    constraint: Constraint | None = None
    """Says which tokens may follow. None if every token may."""
    adapter_slot: int = -1
    """Number of the adapter slot with the LoRA adapter of the request. -1 if it uses no adapter."""
    tiles: tuple[PromptTile, ...] = ()
    """The tiles of the prompt's images, in order of position."""
    tile_hold: TileHold | None = None
    """Keeps the places of ``tiles`` until no step in flight reads them. None without images."""
    receipt: Receipt = field(default_factory=Receipt)
    trace: RequestTrace | None = None
    """Collects the times of steps for the spans of the sequence. None if the sequence is not traced."""

    def __post_init__(self) -> None:
        if not self.receipt.start_us:
            self.receipt = Receipt(self.arrival_time)

    @property
    def num_tokens(self) -> int:
        """Number of known tokens: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def end_tiles(self) -> None:
        """Give the places of the tiles back, because the request has ended and no step in flight reads them."""
        if self.tile_hold is not None:
            self.tile_hold.end()

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def is_suspect(self) -> bool:
        """True while the request runs alone, because it may have killed its agent."""
        return len(self.output_token_ids) < self.alone_until and not self.is_finished


@dataclass(frozen=True, slots=True)
class TokenLogits:
    """The logits of one sampled token. ``logprob = logit - logsumexp`` of the raw logits (float32)."""

    token_id: int
    logprob: float
    logsumexp: float
    top: tuple[tuple[int, float], ...] = ()
    """The best (token id, raw logit) pairs, best first. Ties go to the smaller id."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """A reason why a request had to wait: the request, or the first request of its queue, could not start."""

    reason: BlockReason
    times: int
    """Number of times that the request was the first of the queue and could not start for this reason."""
    seconds: float
    """Seconds for which the request, or the first request before it in the queue, waited for this reason.

    They are part of ``queue``, ``preempted`` or ``restarted``.
    """


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Where a request spent its time, in seconds. All times are whole microseconds, and the parts add up exactly:
    ``tokenise + queue + prefill + decode + preempted + swapped + restarted + delivery == e2e``.

    In the engine, a request ends with its last step and ``delivery`` is 0. In the log, it ends when the last byte was
    written to the client's socket, see ``llm_serving.engine.open_request``.
    """

    queue: float
    prefill: float
    decode: float
    e2e: float
    ttft: float | None
    num_preemptions: int = 0
    delivery: float = 0.0
    tpot: float | None = None
    """Mean time between tokens. None for fewer than two tokens."""
    tokenise: float = 0.0
    """Time from the first byte to the queue: the body is read, checked and tokenized."""
    preempted: float = 0.0
    swapped: float = 0.0
    restarted: float = 0.0
    num_swaps: int = 0
    num_chunks: int = 0
    """Number of prefill steps of the request."""
    num_cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache."""
    blocked: tuple[Blocked, ...] = ()
    """Reasons for which the request was blocked, the longest first."""
    blocked_by: tuple[str, ...] = ()
    """Ids of blocking requests, the most frequent first."""

    @property
    def parts(self) -> dict[str, float]:
        """The parts of ``e2e``, in the order of a request's path."""
        return {name: getattr(self, name) for name in PARTS}


PARTS = ("tokenise", "queue", "prefill", "decode", "preempted", "swapped", "restarted", "delivery")
"""Names of the parts of a request's time, in ``RequestTimings``, the log, the metrics and receipts."""


@dataclass(slots=True)
class RequestOutput:
    """A piece of a request's stream: the output since the last piece. Do not change an object after its construction.

    ``text`` never ends inside a character and never has part of a stop string. The last piece has a ``finish_reason``.
    ``stop_reason`` is the stop string or token id that ended the stream, if there was one. The class is not frozen,
    because an object is made for every token and freezing triples its cost.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logits: tuple[TokenLogits, ...]
    """One entry for each token if ``SamplingParams.wants_logits``, otherwise empty."""
    num_prompt_tokens: int
    num_output_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    timings: RequestTimings | None = None
    num_cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache. Set only in the last piece of a sequence."""
    pooled: bytes = b""
    """Pooled result of a server of embeddings or scores, float32. Empty for generated text."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
