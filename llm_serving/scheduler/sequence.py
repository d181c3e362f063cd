"""The objects in which the scheduler keeps the state of a request (``Sequence``) and of a step in flight
(``InFlightStep``).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from llm_serving.kvcache.block_pool import BlockCopy
from llm_serving.kvcache.prefix_cache import PrefixMatch
from llm_serving.kvcache.prefix_chain import PrefixChain
from llm_serving.request import Request
from llm_serving.scheduler.output import ScheduledStep


class SequenceState(enum.Enum):
    """The state of a sequence in the scheduler. Only RUNNING and LEAVING sequences have a batch row and blocks."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    LEAVING = enum.auto()
    """Finished or preempted, but steps in flight still use its batch row and blocks. No new step includes it. After the
    last of these steps it is removed, waits again or is swapped."""
    SWAPPED = enum.auto()
    """Preempted, with its computed tokens in host memory."""
    REMOVED = enum.auto()


class HandOverState(enum.IntEnum):
    """The progress of a sequence's hand-over from a prefill replica to a decode replica, see ``block_moves``."""

    NONE = 0
    WANTED = 1
    """After its prompt is computed, the sequence leaves for another replica."""
    LEAVING = 2
    """The prompt is computed. The sequence is LEAVING and holds its blocks until they are copied."""
    ARRIVING = 3
    """The blocks of the sequence come from another replica. The sequence is SWAPPED, or RUNNING while they are copied.
    """


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One sequence in the scheduler, with its blocks and its steps in flight.

    The sequence's known tokens are its prompt and the output tokens that the server has received.
    """

    request: Request
    arrival_index: int
    max_output_tokens: int
    """The sequence ends after this number of output tokens: at ``max_tokens`` or at the end of the context."""
    ending_token_ids: frozenset[int] = field(init=False)
    """The sequence ends when it samples one of these tokens."""
    state: SequenceState = SequenceState.WAITING
    block_table: list[int] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    """Copies of blocks that the sequence's next step makes before it computes."""
    prefix_chain: PrefixChain | None = None
    """The sequence's known tokens as the prefix cache stores them. None before the first lookup."""
    prefix_match: tuple[int, PrefixMatch] | None = None
    """The last match of the sequence in the prefix cache, with the ``version`` of the block supply at that time."""
    host_table: list[int] = field(default_factory=list)
    """Host blocks for the sequence's first blocks, while the sequence is swapped or moves to or from the host."""
    on_host: bool = False
    """True if the host blocks contain the sequence's computed tokens."""
    is_decoding: bool = False
    """True if steps have computed all known tokens or are computing them. The sequence's next step is a decode step."""
    restarts: bool = False
    """True if the sequence's next step is its first step on its batch row."""
    notes_tokens: bool = False
    """True if the next token must be noted in the request's receipt (times of its phases), as the first token after a
    start.
    """
    num_inflight_steps: int = 0
    num_inflight_decodes: int = 0
    draft: list[int] = field(default_factory=list)
    """Guesses of the next tokens, see ``Scheduler.offer_drafts``. While there are any, a step of the sequence is only
    sent when no other one is in flight."""
    num_inflight_drafts: int = 0
    """Number of drafts in the sequence's decode step in flight."""
    drop_tokens: bool = False
    """True after a step of this sequence failed or was dropped. The results of its steps in flight are then void, and
    the content of its blocks is unknown."""
    asked_from: int = -1
    """Index of the first block in the last request to the KV tiers. -1: there was no request."""
    waits_for_load: bool = False
    """True while the KV tiers look for blocks of the waiting sequence, or a step copies them to the device."""
    hand_over: HandOverState = HandOverState.NONE
    handed_blocks: list[int] = field(default_factory=list)
    """Blocks of the hand-over pool for the sequence's computed tokens."""
    num_handed: int = 0
    """Number of blocks of a hand-over that completed steps have copied. Above 0 while the sequence has these blocks."""
    last_chosen: int = 0
    """Number of the last choice of ``StepComposer._choose`` that included this sequence. If a decode step cannot have
    all decoding sequences, it has the sequences with the smallest numbers.
    """

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        end_token_ids = frozenset[int]() if sampling.ignore_eos else self.request.end_token_ids
        self.ending_token_ids = sampling.stop_token_ids | end_token_ids

    @property
    def wants_token(self) -> bool:
        """True if the sequence needs more tokens than its steps in flight will sample."""
        request = self.request
        return len(request.output_token_ids) + request.num_inflight_tokens < self.max_output_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Number of known tokens that no completed step has computed and no step in flight computes."""
        return self.request.num_tokens - self.request.num_computed_tokens

    @property
    def max_cached_tokens(self) -> int:
        """Maximum number of the sequence's tokens in the KV cache.

        The last token of the longest output never enters the cache.
        """
        return len(self.request.prompt_token_ids) + self.max_output_tokens - 1

    def known_tokens(self, start: int, end: int) -> list[int]:
        """Returns the tokens ``start .. end - 1`` of the prompt and the output together."""
        request = self.request
        num_prompt_tokens = len(request.prompt_token_ids)
        tokens = list(request.prompt_token_ids[start:end])
        if end > num_prompt_tokens:
            tokens += request.output_token_ids[max(start - num_prompt_tokens, 0) : end - num_prompt_tokens]
        return tokens

    def leave_device(self) -> None:
        """Resets the fields that describe the sequence's batch row, blocks and steps in flight."""
        self.request.num_inflight_tokens = 0
        self.request.row = -1
        self.block_table = []
        self.is_decoding = False
        self.restarts = False
        self.num_inflight_steps = 0
        self.num_inflight_decodes = 0
        self.draft = []
        self.num_inflight_drafts = 0
        self.drop_tokens = False
        self.asked_from = -1


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step in flight.

    ``sequences[i]`` is sequence ``i`` of the step. For a MOVE step, these are the sequences whose blocks are copied.
    """

    step: ScheduledStep
    sequences: list[Sequence]
    first_chunk: int
    """Index of the first sequence that computes a part of its prompt. The sequences before it decode."""
    copies: list[BlockCopy]
    """Copies of blocks that the step makes. The copied blocks are not freed before the step completes."""
