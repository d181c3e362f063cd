"""A request as the engine sees it: token ids in, token ids and text out. No HTTP here, no clock, no device."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from llm_serving.telemetry.receipt import BlockReason, Receipt

MAX_TOP_LOGITS = 32
"""Most (token id, logit) pairs a step returns per sampled token."""


class RequestStatus(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    """Its keys and values are in host memory; it waits to come back."""
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"
    """End token, a stop token id or a stop string."""
    LENGTH = "length"
    """``max_tokens`` or the model's context was reached."""
    ABORT = "abort"
    """The client went away or asked to stop; or, with ``RequestOutput.error``, its deadline passed before it began."""
    ERROR = "error"
    """The server could not go on; ``RequestOutput.error`` says why."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Ranges are checked at the HTTP edge, before the request reaches the engine.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 and ``min_p`` 0 switch the filter off.
    ``repetition_penalty`` acts on prompt and output (CTRL, Keskar et al. 2019), ``presence_penalty`` and
    ``frequency_penalty`` on the output (OpenAI). ``seed`` is an unsigned 64-bit number; the text depends on it,
    the prompt and these parameters alone. ``logprobs`` asks for a ``TokenLogits`` with every token; ``top_logits``
    for that many best (id, logit) pairs in it, and so for ``logprobs``, too.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: bool = False
    top_logits: int = 0

    @property
    def wants_logits(self) -> bool:
        """Whether pieces are to carry ``logits``."""
        return self.logprobs or self.top_logits > 0

    @property
    def has_penalties(self) -> bool:
        """True when the choice of a token depends on the tokens before it by more than the model."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class SchedulingParams:
    """What a request asks of the order of work, and whose it is. Nothing here changes a token of its answer.

    Times are seconds; those of ``Request`` that have the same names say what they mean. ``deadline`` counts from the
    request's arrival.
    """

    priority: int = 0
    tenant: str = ""
    cache_salt: bytes = b""
    ttft_objective: float | None = None
    tbt_objective: float | None = None
    deadline: float | None = None
    group: str = ""


DEFAULT_SCHEDULING = SchedulingParams()


@dataclass(slots=True, eq=False)
class Request:
    """One sequence in the scheduler. Owned by it from ``add_request`` until it is finished.

    ``arrival_time`` and the other times are seconds on the engine's monotonic clock. Its ``receipt`` counts from
    ``arrival_time`` unless it is given one.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    arrival_time: float
    end_token_ids: frozenset[int] = frozenset()
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    """Tokens whose keys and values are in the cache, or will be once the steps in flight have run."""
    num_inflight_tokens: int = 0
    """Sampled tokens that steps in flight will deliver; their values are not known to the server yet."""
    row: int = -1
    """Index of the sequence's state on the agent (last token, token history); -1 while it has none."""
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finish_time: float | None = None
    priority: int = 0
    """Smaller is served earlier, inside the policy's order."""
    tenant: str = ""
    """Whose it is, for fairness: a short hash of the API key; empty without one."""
    cache_salt: bytes = b""
    """Goes into the hashes of the prefix cache: requests with other salts share nothing with it."""
    ttft_objective: float | None = None
    """Seconds from its arrival to its first token that would be good enough; None for the config's."""
    tbt_objective: float | None = None
    """Seconds between two of its tokens that would be good enough; None for the config's."""
    deadline: float | None = None
    """When it is of no use any more: not prefilled by then, it is dropped (``FinishReason.ABORT``)."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at its first start."""
    group: str = ""
    """Requests of one group have their prompt in common and go to one replica of the model; empty: it is alone."""
    replica: int | None = 0
    """Replica of the model that serves it, or did last; None before it had one of several."""
    receipt: Receipt = field(default_factory=Receipt)

    def __post_init__(self) -> None:
        if not self.receipt.start_us:
            self.receipt = Receipt(self.arrival_time)

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED


@dataclass(frozen=True, slots=True)
class TokenLogits:
    """What one step knew about one sampled token. ``logprob = logit - logsumexp`` of the raw logits (float32)."""

    token_id: int
    logprob: float
    logsumexp: float
    top: tuple[tuple[int, float], ...] = ()
    """Best (token id, raw logit) pairs, best first; ties by the smaller id."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """A reason that kept a request from starting, or while it was not the first in line the one that was."""

    reason: BlockReason
    times: int
    """So often the scheduler passed it over for this reason while it was the first; 0 if it never was."""
    seconds: float
    """Time from those looks to the next ones; in ``RequestTimings.queue``, or for one that was in ``preempted`` or
    ``restarted``."""


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Where a request spent its time, in seconds: ``tokenise + queue + prefill + decode + preempted + swapped +
    restarted + delivery == e2e``, to the microsecond, of which all are whole numbers.

    As the engine makes it, the request ends with its last step and ``delivery`` is 0. What is logged counts to the
    moment the last byte was written to the client's socket, see ``llm_serving.engine.open_request``.
    """

    queue: float
    prefill: float
    decode: float
    e2e: float
    ttft: float | None
    num_preemptions: int = 0
    delivery: float = 0.0
    tpot: float | None = None
    """Mean time between tokens; None for fewer than two."""
    tokenise: float = 0.0
    """From the first byte to the queue: reading and checking the body, and its text's tokens."""
    preempted: float = 0.0
    swapped: float = 0.0
    restarted: float = 0.0
    num_swaps: int = 0
    num_chunks: int = 0
    """Prefill steps it was in."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    blocked: tuple[Blocked, ...] = ()
    """Longest first."""
    blocked_by: tuple[str, ...] = ()
    """Ids of requests that stood in its way, those seen most often first."""

    @property
    def parts(self) -> dict[str, float]:
        """What ``e2e`` is made of, in the order in which a request meets it."""
        return {name: getattr(self, name) for name in PARTS}


PARTS = ("tokenise", "queue", "prefill", "decode", "preempted", "swapped", "restarted", "delivery")
"""Names of the parts of a request's time, in ``RequestTimings``, the log, the metrics and receipts."""


@dataclass(slots=True)
class RequestOutput:
    """A piece of a request's stream: what became known since the last piece.

    ``text`` never ends inside a character and never holds part of a stop string. The last piece has
    ``finish_reason`` set, and ``stop_reason`` names the stop string or token id that ended it, if one did.
    Not to be changed once made; not frozen, because one is made for every token and that triples its cost.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logits: tuple[TokenLogits, ...]
    """One a token, where ``SamplingParams.wants_logits``; else empty."""
    num_prompt_tokens: int
    num_output_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    timings: RequestTimings | None = None
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache; told with the last piece."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
