"""What the scheduler hands to the executor, and what comes back: one step, in columns.

A step is columnar because it is written into NumPy arrays: index ``i`` of every list is sequence ``i`` of the
step. Nothing here is copied: ``block_tables[i]`` is the sequence's own list, so the executor reads it during
``submit`` and keeps no reference to it.

What an executor may rely on, to do work per change instead of per step:

* A sequence holds its row until no step in flight can touch it, and a row's sampling parameters never change.
* A row is (re)started by a step whose ``restarts[i]`` is True, at whatever position: blocks may have been found in
  the prefix cache or swapped in. Its tokens are all known. From then on its block table only grows at the end, until
  the next restart of that row, which comes with a table of its own.
* Several sequences may read a block; a block that a step writes, by its tokens or by a move, is one sequence's alone.
* Steps are handed over in the order of ``seq``, which goes up by one. Run in that order, with every prefill before
  every decode or the other way round, each of the two in its order, they give the same tokens. A step of moves
  alone may overtake any step but one of its kind: what it reads was written by steps that are answered, what it
  writes no unanswered step touches.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from llm_serving.ipc.shm import MoveKind
from llm_serving.request import Request

__all__ = [
    "BlockMove",
    "History",
    "MoveKind",
    "RequestUpdate",
    "ScheduledStep",
    "StepKind",
    "StepReason",
    "StepResult",
]


class StepKind(enum.Enum):
    """What a step consists of, and so which message announces it."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    """Prompts or parts of prompts together with decoding rows; announced as a prefill."""
    MOVE = "move"
    """Block moves alone: no sequences, no tokens."""


class StepReason(enum.Enum):
    """Why the scheduler chose this step and not another."""

    ONLY_CHOICE = "only_choice"
    """Nothing else could run."""
    POLICY = "policy"
    """The policy puts its kind first."""
    TURN = "turn"
    """The other kind has had its turn, or as many in a row as it may."""
    BATCH_FULL = "batch_full"
    """No more sequences, tokens or rows fit it."""
    WAITED = "waited"
    """Its waiting time was over."""
    OBJECTIVE = "objective"
    """A latency objective was closest to being missed."""
    MAKE_ROOM = "make_room"
    """Blocks go out to the host for others."""
    BRING_BACK = "bring_back"
    """Blocks come back from the host, there being room again."""


@dataclass(frozen=True, slots=True)
class BlockMove:
    """Keys and values of one block, over all layers, copied. Block numbers are of the pools that ``kind`` names."""

    kind: MoveKind
    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class History:
    """The known tokens of a sequence with penalties, sent by the step that samples its first token on a row.

    ``index`` is the sequence's place in the step; the first ``num_prompt_tokens`` of ``token_ids`` are the prompt.
    """

    index: int
    token_ids: list[int]
    num_prompt_tokens: int


@dataclass(slots=True)
class ScheduledStep:
    """One step: S sequences, T tokens. A decode step has one token a sequence (T == S) and samples for each; a step of
    moves has S == T == 0."""

    seq: int
    """Number of the step; the first is 0, the next one more."""
    kind: StepKind
    requests: list[Request] = field(default_factory=list)
    """[S] for ``sampling`` alone; the other fields change while the step is in flight."""
    rows: list[int] = field(default_factory=list)
    """[S] row of the agent's state table; no row occurs twice in a step."""
    token_ids: list[int] = field(default_factory=list)
    """[T] the sequences' tokens one after the other; ``LAST_TOKEN`` (-1) where only the agent knows it yet."""
    query_lens: list[int] = field(default_factory=list)
    """[S] tokens of each sequence in this step; they sum to T."""
    starts: list[int] = field(default_factory=list)
    """[S] position of each sequence's first token here, which is also how many of its tokens are cached before the
    step. Its tokens sit at ``start .. start + query_len - 1``; its context afterwards is ``start + query_len``."""
    block_tables: list[list[int]] = field(default_factory=list)
    """[S] block ids in order of position, at least ``ceil(context / block_size)`` of them, never the null block 0
    (with which the executor pads)."""
    do_sample: list[bool] = field(default_factory=list)
    """[S] False for all but the last chunk of a prompt that does not fit one step."""
    sample_positions: list[int] = field(default_factory=list)
    """[S] index in the output of the token to sample: the key of its random number."""
    histories: list[History] = field(default_factory=list)
    """For sequences with penalties that (re)start their row; in order of ``index``, mostly empty."""
    restarts: list[bool] = field(default_factory=list)
    """[S] whether this is a sequence's first step on its row; empty says of none."""
    moves: list[BlockMove] = field(default_factory=list)
    """Run in this order before the step's tokens are computed."""
    reason: StepReason = StepReason.ONLY_CHOICE
    """For logs and recordings; an executor does not care."""

    @property
    def num_seqs(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True)
class StepResult:
    """The answer to one step, index ``i`` being sequence ``i`` of the step.

    ``aborted``: the step was dropped before it began; ``error``: it raised. In both cases the lists are empty.
    """

    seq: int
    sampled_ids: list[int] = field(default_factory=list)
    """[S] the token, or -1 where ``do_sample`` was False."""
    logits: list[float] = field(default_factory=list)
    """[S] raw logit of the sampled token."""
    logsumexps: list[float] = field(default_factory=list)
    """[S] log of the sum of exp of the raw logits."""
    tops: list[tuple[tuple[int, float], ...]] | None = None
    """[S] best (token id, raw logit) pairs of each sequence, as many as it asked for; None when nobody asked."""
    aborted: bool = False
    error: str | None = None
    queue_us: int = 0
    graph_us: int = 0
    sample_us: int = 0


@dataclass(slots=True)
class RequestUpdate:
    """What one step's answer, or an event, meant for one request: a token, its end, or both.

    When ``request.is_finished``, it has left the scheduler for good and this is its last update.
    """

    request: Request
    token_id: int | None = None
    """The new token, already appended to ``request.output_token_ids``."""
    index: int = -1
    """Place of the sequence in the StepResult, for the logits; -1 without a token."""
    stop_token_id: int | None = None
    """The one of ``sampling.stop_token_ids`` that ended the request."""
    error: str | None = None
    """Why it ended with ``FinishReason.ERROR``."""
