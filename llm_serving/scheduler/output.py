"""What the scheduler hands to the executor, and what comes back: one step, in columns.

A step is columnar because it is written into NumPy arrays: index ``i`` of every list is sequence ``i`` of the
step. Nothing here is copied: ``block_tables[i]`` is the sequence's own list, so the executor reads it during
``submit`` and keeps no reference to it.

What an executor may rely on, to do work per change instead of per step:

* A sequence holds its row until no step in flight can touch it, and a row's sampling parameters never change.
* A row is (re)started by a step whose ``restarts[i]`` is True, a prefill step mostly, not always at position 0: a
  prefix may be cached, or the sequence may come back from the host. Its last token is then never ``LAST_TOKEN``.
  From then on its block table only grows at the end, until the next restart of that row, which comes with a table
  of its own.
* Several sequences may read a block; a block that a step writes, by its tokens or by a move, is one sequence's alone.
* Steps are handed over in the order of ``seq``, which goes up by one. Steps of one kind run in that order, PREFILL
  and MIXED being one kind here. Run in the order of ``seq``, or with one kind before the other, they give the same
  tokens. A MOVE step may overtake any other: no step in flight touches the blocks it writes, and what it reads has
  been written by steps that were answered.
* Blocks named in ``moves`` stay with their owners until the step is answered.
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
    """What a step does, and which message announces it."""

    PREFILL = "prefill"
    """Prompts, or chunks of them."""
    DECODE = "decode"
    """One token of each sequence."""
    MIXED = "mixed"
    """Chunks of prompts together with rows that decode; announced like a prefill."""
    MOVE = "move"
    """No tokens: blocks go to the host's memory, or come back."""


@dataclass(frozen=True, slots=True)
class BlockMove:
    """One block is copied, keys and values of all layers. Ids are of the device's cache or of the host's pool."""

    kind: MoveKind
    source: int
    destination: int


class StepReason(enum.Enum):
    """Why this step and not another; for people, and for the flight recorder."""

    PROMPT_READY = "a prompt could start or go on"
    PROMPT_OVERDUE = "prompts had waited for as many decode steps as they may"
    ROWS_READY = "rows could decode, and no prompt goes before them"
    ROWS_OVERDUE = "rows had waited for as many prefill steps as they may"
    BUDGET_SHARED = "rows decode, and prompts fill the rest of the token budget"
    BUDGET_CUT = "rows decode, and prompts get as many tokens as leave the rows their time between tokens"
    SWAP_OUT = "blocks were needed: a sequence leaves for the host"
    SWAP_IN = "blocks are free again: a sequence comes back from the host"


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
    """One step: S sequences, T tokens.

    A DECODE step has one token a sequence (T == S) and samples for each; a MOVE step has neither (S == T == 0).
    """

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
    """[S] True in a sequence's first step on its row; empty says False of all."""
    moves: list[BlockMove] = field(default_factory=list)
    """Copies to run before anything else, in this order; mostly empty."""
    reason: StepReason = StepReason.PROMPT_READY

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
    """Why it ended with ``FinishReason.ERROR``, or of itself with ``ABORT``: its deadline passed."""
