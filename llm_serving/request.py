"""A request of the engine: prompt token ids, parameters, state and output. This module does not depend on HTTP, a clock
or a device.
"""

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

    from llm_serving.tracing.steps import StepGroup


class RequestStatus(enum.Enum):
    """The state of a request in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    """State of a request whose keys and values are in host memory. The request waits for blocks on the device."""
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """The reason why a request ended."""

    STOP = "stop"
    """The request ended because an end token, a stop token id or a stop string was generated."""
    LENGTH = "length"
    """The request ended because ``max_tokens`` or the end of the model's context was reached."""
    ABORT = "abort"
    """The client ended the request, or its deadline passed before it started. In the second case,
    ``RequestOutput.error`` is set.
    """
    ERROR = "error"
    """The request ended because the server could not continue. ``RequestOutput.error`` has the reason."""


class TraceSource(Protocol):
    """The trace of an HTTP request, which makes the traces of its sequences. See ``llm_serving.tracing``."""

    def sequence(self) -> RequestTrace:
        """Creates the trace of a further sequence."""


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
    pool: str = ""
    group: str = ""
    trace: TraceSource | None = None
    """The trace of the HTTP request. None if the request is not traced."""


DEFAULT_SCHEDULING = SchedulingParams()


class RequestTrace(Protocol):
    """Collects the spans of one sequence. See ``llm_serving.tracing``."""

    def step(self, step: StepGroup, /, *, has_token: bool) -> None:
        """Records a step of the sequence. The engine thread calls this method. See ``SequenceTrace.step``."""

    def end(self, request: Request, output: RequestOutput, timings: RequestTimings, /) -> None:
        """Emits the spans of the sequence, which has ended. Does not block. The event loop calls this method."""


class ConstraintError(Exception):
    """A constraint cannot continue, for example because its grammar has become too complex. The request then ends with
    an error.
    """


class Constraint(Protocol):
    """Decides which tokens may come next in one sequence. Only the engine thread calls the methods."""

    @property
    def num_words(self) -> int:
        """Length of a mask, in words of 32 tokens."""

    def advance(self, token_id: int) -> None:
        """Adds the next token of the sequence to the constraint.

        Raises ConstraintError if the constraint cannot continue.
        """

    def mask(self) -> npt.NDArray[np.uint32]:
        """Returns the mask of the tokens that may come next: bit ``id % 32`` of word ``id // 32`` is 1. The mask has at
        least one token.

        If the constraint has failed, all tokens are allowed, and the next ``advance`` raises ConstraintError.
        """


@runtime_checkable
class ForkableConstraint(Constraint, Protocol):
    """A constraint that can be copied, so that drafts (guessed tokens) can be checked in advance."""

    @property
    def has_failed(self) -> bool:
        """True if the next ``advance`` raises ConstraintError for any token."""

    def fork(self) -> ForkableConstraint | None:
        """Returns a copy that advances independently, or None if this constraint cannot be copied."""

    def forced_tokens(self) -> list[int]:
        """Returns tokens of the text that must come next, or an empty list if several texts are allowed.

        The constraint may also allow other tokens that spell the same text.
        """


def forked(constraint: Constraint | None) -> ForkableConstraint | None:
    """Returns a copy of a constraint that advances independently, or None if there is none or it cannot be copied."""
    return constraint.fork() if isinstance(constraint, ForkableConstraint) else None


class TileHold(Protocol):
    """Holds the places of a request's tiles in the shared memory of images."""

    def end(self) -> None:
        """Releases the places. May be called several times, by any thread."""


ALONE_TO_THE_END = 1 << 40
"""Value of ``Request.alone_until`` for a request that runs alone until its end."""


@dataclass(slots=True, eq=False)
class Request:
    """One sequence in the scheduler, which owns it from ``add_request`` to its end.

    ``arrival_time`` and the other times are seconds on the engine's monotonic clock. ``receipt`` records the time in
    each phase. If the caller passes no receipt, a new one is made, whose first phase begins at ``arrival_time``.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    arrival_time: float
    end_token_ids: frozenset[int] = frozenset()
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    """Number of tokens whose keys and values are in the cache, including those that the steps in flight compute."""
    num_inflight_tokens: int = 0
    """Number of sampled tokens that steps in flight will return. The server does not know their values yet."""
    row: int = -1
    """The batch row of the sequence: its place in the agent's state (last token, token history). -1 if it has none."""
    num_preemptions: int = 0
    num_losses: int = 0
    """Number of times that the agent was lost while a step with this request was in flight."""
    alone_until: int = 0
    """The request runs alone until it has this number of output tokens, because it may have killed its agent.

    See ``llm_serving.scheduler.quarantine``."""
    finish_reason: FinishReason | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finish_time: float | None = None
    priority: int = 0
    """Priority. A smaller number is more urgent."""
    tenant: str = ""
    """The tenant, for fairness: a short hash of the API key. Empty without a key."""
    cache_salt: bytes = b""
    """A value that enters the hashes of the prefix cache. Requests with different salts share no blocks."""
    ttft_objective: float | None = None
    """Objective for the time to the first token, in seconds. None means the objective in the config."""
    tbt_objective: float | None = None
    """Objective for the time between two tokens, in seconds. None means the objective in the config."""
    deadline: float | None = None
    """A request without a first token at this time is dropped (``FinishReason.ABORT``)."""
    num_cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache at the first start."""
    pool: str = ""
    """Name of the pool of replicas. Empty for the pool that the length of the prompt decides."""
    group: str = ""
    """Name of the request group: samples of one prompt, or beams of one search. They run on the same replica. Empty
    without a group.
    """
    replica: int | None = 0
    """Number of the replica that serves the request or served it last. With several replicas, None until the router has
    placed the request.
    """
    constraint: Constraint | None = None
    """Decides which tokens may come next. None if every token is allowed."""
    adapter_slot: int = -1
    """Number of the adapter slot with the LoRA adapter of the request. -1 if it uses no adapter."""
    tiles: tuple[PromptTile, ...] = ()
    """The tiles of the prompt's images, in order of position."""
    tile_hold: TileHold | None = None
    """Holds the places of ``tiles`` in shared memory until no step in flight reads them. None without images."""
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

    def tile_cost_after(self, position: int) -> int:
        """Returns the cost of encoding the tiles that end after ``position``, as a number of prompt tokens."""
        if not self.tiles or self.tiles[-1].end <= position:
            return 0
        return sum(tile.cost for tile in self.tiles if tile.end > position)

    def end_tiles(self) -> None:
        """Releases the places of the tiles. Called when the request has ended and no step in flight reads them."""
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
    """One reason why a request waited in the queue, and for how long.

    The reason blocked the request itself, or the request that was first in the queue at that time.
    """

    reason: BlockReason
    times: int
    """Number of times that the request was first in the queue and could not start for this reason."""
    seconds: float
    """Seconds for which this reason blocked the request, or the request that was first in the queue.

    This time is a part of ``queue``, ``preempted`` or ``restarted`` in ``RequestTimings``.
    """


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """The parts of a request's time, in seconds. All times are whole microseconds, and the parts add up exactly:
    ``tokenise + queue + prefill + decode + preempted + swapped + restarted + delivery == e2e``.

    For the engine, a request ends with its last step, and ``delivery`` is 0. For the log, the request ends when its
    last byte is written to the client's socket, see ``llm_serving.engine.open_request``.
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
    """Time from the request's first byte until the request enters the queue: the body is read, checked and tokenized.
    """
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
    """Ids of the requests that prevented this request from starting, the most frequent first."""

    @property
    def parts(self) -> dict[str, float]:
        """The parts of ``e2e``, in the order in which a request usually passes through them."""
        return {name: getattr(self, name) for name in PARTS}


PARTS = ("tokenise", "queue", "prefill", "decode", "preempted", "swapped", "restarted", "delivery")
"""Names of the parts of a request's time, in ``RequestTimings``, the log, the metrics and receipts."""


@dataclass(slots=True)
class RequestOutput:
    """The output of a request since its previous ``RequestOutput``. The object must not be changed after its
    construction.

    ``text`` does not end within a character and contains no part of a stop string. Only the last output of a request
    has a ``finish_reason``. ``stop_reason`` is the stop string or token id that ended the request, if any. The class is
    not frozen, because an object is created for each token, and a frozen class would take three times as long.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logits: Sequence[TokenLogits]
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
    """The embedding or the scores of the request, as the bytes of float32 numbers. Empty for generated text."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
