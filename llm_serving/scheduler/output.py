"""Scheduled steps and their results, which the scheduler and the executor exchange.

A step consists of columns (lists), because the executor writes them into NumPy arrays. Index ``i`` of every column
describes sequence ``i`` of the step. ``block_tables[i]`` is the sequence's own list, not a copy. The executor reads it
in ``submit`` and keeps no reference.

The executor may rely on the following rules. With these rules, the executor does most of its work once per change of
the batch, and not in each step:

* A decode step may verify drafts (``num_drafts``), see ``llm_serving.ipc.drafts``. A sequence with k drafts then has
  1 + k consecutive elements in each column, with the same request and batch row. Until this step has completed, no
  later step of the sequence is sent.
* A sequence keeps its batch row until no step in flight uses it. The sampling parameters of a batch row never change.
* If ``restarts[i]`` is True, the step is the first step of sequence ``i`` on its batch row. This step is usually a
  prefill step. Its tokens can begin after position 0, because a prefix may be cached or the sequence may come back from
  the host. The last token of the sequence is never ``LAST_TOKEN`` in this step. Until the next restart of the batch
  row, the sequence's block table only grows at the end.
* Several sequences may read a block. A block that a step writes, by tokens or by a move, belongs to one sequence only.
* Steps are sent in the order of ``seq``, which increases by one. PREFILL and MIXED steps run in this order among
  themselves. DECODE steps also run in this order among themselves. The order between the two groups may change, and
  does not change the tokens. A MOVE step may overtake other steps. No other step in flight uses the blocks that it
  writes, and completed steps wrote the blocks that it reads.
* A PREFILL step with ``overtakes`` may run before steps that were sent earlier. Its sequences are in no other step in
  flight, and completed steps wrote the cached blocks that it reads. So the order does not change the tokens.
* Blocks in ``moves`` stay with their sequences until the step completes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from llm_serving.ipc.shm import MoveKind
from llm_serving.ipc.tiles import StepTile
from llm_serving.request import Request

NOT_FINITE_ERROR = "the model's logits for this request were NaN or infinite"
"""``RequestUpdate.error`` of a request whose sampled id is ``NOT_FINITE``."""


class StepKind(enum.Enum):
    """The kind of a step. It determines which kind of message the executor sends to the agent."""

    PREFILL = "prefill"
    """Computes prompts or chunks of prompts."""
    DECODE = "decode"
    """Computes one token of each sequence."""
    MIXED = "mixed"
    """Computes chunks of prompts and one token of each decoding sequence. The agent receives it as a prefill step."""
    MOVE = "move"
    """Computes no tokens. It copies blocks to host memory or back."""


@dataclass(frozen=True, slots=True)
class BlockMove:
    """A copy of one block, with the keys and values of all layers.

    ``kind`` determines whether an id refers to the KV cache or the host pool.
    """

    kind: MoveKind
    source: int
    destination: int


class StepReason(enum.Enum):
    """Why the policy chose a step, for logs and the flight recorder."""

    PROMPT_READY = "a prompt could start or continue"
    PROMPT_OVERDUE = "prompts had waited for the maximum number of decode steps"
    ROWS_READY = "sequences could decode, and no prompt had precedence"
    ROWS_OVERDUE = "decoding sequences had waited for the maximum number of prefill steps"
    BUDGET_SHARED = "sequences decode, and prompts fill the rest of the token budget"
    BUDGET_CUT = "sequences decode, and prompts get the tokens that keep the time between tokens within its objective"
    SWAP_OUT = "blocks were needed: a sequence moves to the host"
    SWAP_IN = "blocks are free again: a sequence comes back from the host"
    STORE = "blocks were computed: copies of them go to the KV tiers"
    LOAD = "a KV tier has blocks of a waiting sequence"
    HAND_OUT = "prompts are computed: their blocks go to the replica that decodes"
    HAND_IN = "another replica has computed a prompt: its blocks arrive"
    SUSPECT = "the sequence may have killed an agent, so it runs alone"


@dataclass(frozen=True, slots=True)
class History:
    """The known tokens of a sequence with penalties, for the sampler.

    The first step that samples for the sequence on its batch row sends the history. ``index`` is the index of the
    sequence in the step. The first ``num_prompt_tokens`` of ``token_ids`` are the prompt.
    """

    index: int
    token_ids: list[int]
    num_prompt_tokens: int

    @classmethod
    def of(cls, index: int, request: Request) -> History:
        """Returns the history of a request's sequence, which has this index in the step."""
        prompt, output = request.prompt_token_ids, request.output_token_ids
        return cls(index, [*prompt, *output], len(prompt))


@dataclass(slots=True)
class ScheduledStep:
    """One step with S sequences and T tokens.

    A DECODE step has one token per sequence (T == S) and samples a token for each sequence. In S and in all columns,
    each draft counts as one more sequence. A MOVE step only copies blocks (S == T == 0).
    """

    seq: int
    """Number of the step. Numbers start at 0 and increase by one."""
    kind: StepKind
    requests: list[Request] = field(default_factory=list)
    """[S] The request of each sequence. Only its ``sampling`` stays the same while the step is in flight."""
    rows: list[int] = field(default_factory=list)
    """[S] The batch row of each sequence. A batch row occurs once in a step, and once more for each draft."""
    token_ids: list[int] = field(default_factory=list)
    """[T] The tokens of all sequences, one sequence after the other. ``LAST_TOKEN`` (-1) stands for a token that only
    the agent knows yet."""
    query_lens: list[int] = field(default_factory=list)
    """[S] Number of tokens of each sequence in this step. The sum is T."""
    starts: list[int] = field(default_factory=list)
    """[S] Position of each sequence's first token in this step. This is also the number of the sequence's tokens that
    the KV cache has before the step. The tokens have positions ``start .. start + query_len - 1``."""
    block_tables: list[list[int]] = field(default_factory=list)
    """[S] Block ids in order of position, at least ``ceil((start + query_len) / block_size)`` of them. The null block
    0, which the executor uses for padding, never occurs."""
    do_sample: list[bool] = field(default_factory=list)
    """[S] True if the step samples a token for the sequence. False for all chunks of a prompt except the last."""
    sample_positions: list[int] = field(default_factory=list)
    """[S] Index of the sampled token in the output. It selects the random number with which the token is sampled."""
    histories: list[History] = field(default_factory=list)
    """The histories of sequences with penalties whose ``restarts`` is True, in order of ``index``."""
    restarts: list[bool] = field(default_factory=list)
    """[S] True in a sequence's first step on its batch row. An empty list means False for all sequences."""
    moves: list[BlockMove] = field(default_factory=list)
    """Copies of blocks. They run before the computation, in this order."""
    headers: list[bytes] = field(default_factory=list)
    """The header of each move to or from the hand-over pool. The router sets them, see ``handover.header``."""
    num_drafts: int = 0
    """Number of input tokens of a DECODE step that are drafts."""
    num_wanted: int = 0
    """Number of drafts that the agent's draft model makes for each sequence after the step. The engine sets it."""
    is_held: bool = False
    """True if the next step verifies drafts that follow from the result of this step. The engine then sends no step
    before it has the result. The engine sets this field when it sends the step."""
    state_moves: list[tuple[int, int, int]] = field(default_factory=list)
    """Loads and saves of states of linear attention: (index of a sequence in the step, n, snapshot). With n = 0, the
    sequence resumes from the snapshot. Otherwise, the step saves the state after the sequence's first n tokens."""
    tiles: list[StepTile] = field(default_factory=list)
    """Tiles of images whose rows replace the embeddings of tokens of this step. Only chunks of prompts have tiles."""
    reason: StepReason = StepReason.PROMPT_READY
    overtakes: bool = False
    """True for a PREFILL step that the agent runs before queued steps, except moves. It is for light keys."""

    @property
    def constrained(self) -> list[int]:
        """The indices of sequences that sample a token under a constraint. They need a mask of allowed tokens."""
        return [
            index
            for index, (request, samples) in enumerate(zip(self.requests, self.do_sample, strict=True))
            if samples and request.constraint is not None
        ]

    @property
    def num_seqs(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True)
class StepResult:
    """The result of one step. Index ``i`` describes sequence ``i`` of the step.

    The lists are empty if the step was dropped before it began (``aborted``) or failed (``error``).
    """

    seq: int
    sampled_ids: list[int] = field(default_factory=list)
    """[S] The sampled token. -1 if ``do_sample`` was False. ``NOT_FINITE`` if the logits were NaN or infinite.
    ``REJECTED`` for a token that does not count, because a draft before it was wrong."""
    logits: list[float] = field(default_factory=list)
    """[S] Raw logit of the sampled token."""
    logsumexps: list[float] = field(default_factory=list)
    """[S] Logarithm of the sum of the exponentials of the raw logits."""
    tops: list[tuple[tuple[int, float], ...]] | None = None
    """[S] The best (token id, raw logit) pairs that each sequence asked for. None if no sequence asked."""
    pooled: list[bytes] | None = None
    """[S] The pooled result of each sequence, float32. None if the agents sample tokens."""
    aborted: bool = False
    """True if the step was dropped before it began."""
    error: str | None = None
    """Why the step failed. None if it did not fail."""
    bad_moves: list[int] = field(default_factory=list)
    """Indices of the moves from the hand-over pool whose block had another header or other bytes than expected."""
    queue_us: int = 0
    """Microseconds that the step waited in the agent's queue."""
    graph_us: int = 0
    """Microseconds in which the agent ran the graph of the model, or copied blocks."""
    sample_us: int = 0
    """Microseconds in which the agent chose the tokens."""
    checked_row: bool = False
    """True if the agents computed one sequence of the step again, with the same result."""
    fetched_bytes: int = 0
    """Bytes that the agents copied from their devices to choose the tokens."""
    draft_us: int = 0
    """Microseconds in which the draft model made drafts. They are a part of ``sample_us``."""
    device_draws: int = 0
    """Number of tokens that the device drew, and with which the step was launched. Tokens of sequences without
    ``top_k`` are not counted.
    """
    wrong_draws: int = 0
    """Number of the tokens in ``device_draws`` that the sampler did not choose."""
    second_launches: int = 0
    """1 if the step was launched again, because its first launch had a wrong token. Otherwise 0."""
    drafts: list[list[int]] | None = None
    """[S] Drafts of the next tokens of each sequence, by the draft model. None if the step wanted none."""


@dataclass(slots=True)
class RequestUpdate:
    """One change of a request: a new token, its end, or both.

    If ``request.is_finished`` is True and ``num_later`` is 0, this is the last update of the request.
    """

    request: Request
    token_id: int | None = None
    """The new token. ``request.output_token_ids`` contains it already."""
    index: int = -1
    """Index of the sequence in the ``StepResult``, which has its logits. -1 if the update has no token."""
    num_later: int = 0
    """Number of later tokens that the same result has for this request. ``request.output_token_ids`` contains them
    already.
    """
    stop_token_id: int | None = None
    """The member of ``sampling.stop_token_ids`` that ended the request."""
    error: str | None = None
    """Why the request ended with ``FinishReason.ERROR``, or with ``ABORT`` at its deadline."""
