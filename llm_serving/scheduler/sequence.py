"""The scheduler's records of a request and of a step in flight."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from llm_serving.kvcache.kv_cache_manager import BlockCopy
from llm_serving.kvcache.prefix_cache import PrefixMatch
from llm_serving.kvcache.prefix_chain import PrefixChain
from llm_serving.request import Request
from llm_serving.scheduler.output import ScheduledStep

__all__ = ["InFlightStep", "Sequence", "SequenceState"]


class SequenceState(enum.Enum):
    """Where the scheduler keeps a sequence. Only RUNNING and LEAVING sequences have a batch row and blocks."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    LEAVING = enum.auto()
    """Finished or preempted, but steps in flight still use its batch row and blocks. No new step includes it. After the
    last of these steps it is removed, waits again or is swapped."""
    SWAPPED = enum.auto()
    """Preempted, with its computed tokens in host memory."""
    REMOVED = enum.auto()


class Sequence:
    """One request in the scheduler, with its blocks and its steps in flight."""

    __slots__ = (
        "arrival_index",
        "block_table",
        "copies",
        "drop_tokens",
        "ending_token_ids",
        "host_table",
        "is_decoding",
        "last_chosen",
        "max_output_tokens",
        "notes_tokens",
        "num_inflight_decodes",
        "num_inflight_steps",
        "on_host",
        "prefix_chain",
        "prefix_match",
        "request",
        "restarts",
        "state",
    )

    def __init__(self, request: Request, arrival_index: int, max_output_tokens: int) -> None:
        self.request = request
        self.arrival_index = arrival_index
        self.max_output_tokens = max_output_tokens
        """The sequence ends after this number of output tokens: at ``max_tokens`` or at the end of the context."""
        stop_token_ids = request.sampling.stop_token_ids
        self.ending_token_ids = (
            stop_token_ids if request.sampling.ignore_eos else stop_token_ids | request.end_token_ids
        )
        self.state = SequenceState.WAITING
        self.block_table: list[int] = []
        self.copies: list[BlockCopy] = []
        """Copies that its next step makes before it computes."""
        self.prefix_chain: PrefixChain | None = None
        """Its known tokens as the prefix cache stores them. None before the first lookup."""
        self.prefix_match: tuple[int, PrefixMatch] | None = None
        self.host_table: list[int] = []
        """Host blocks for its first blocks, while it is swapped or moves to or from the host."""
        self.on_host = False
        """The host blocks hold its computed tokens."""
        self.is_decoding = False
        """All its known tokens are computed, or steps in flight compute them. Its next step is a decode."""
        self.restarts = False
        """Its next step is the first on its batch row."""
        self.notes_tokens = False
        """Its next token changes its receipt or is charged to its tenant."""
        self.num_inflight_steps = 0
        self.num_inflight_decodes = 0
        self.drop_tokens = False
        """A step of this sequence never ran. The results of its steps in flight are void, and the content of its blocks
        is unknown."""
        self.last_chosen = 0
        """Number of its latest decode step, counted only while more sequences can decode than one step takes."""

    @property
    def wants_token(self) -> bool:
        """Whether the sequence needs another token that no step in flight samples."""
        request = self.request
        return len(request.output_token_ids) + request.num_inflight_tokens < self.max_output_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens that no completed step has computed and no step in flight computes."""
        return self.request.num_tokens - self.request.num_computed_tokens

    @property
    def max_cached_tokens(self) -> int:
        """Maximum number of its tokens in the KV cache: all except the last token of the longest output."""
        return len(self.request.prompt_token_ids) + self.max_output_tokens - 1

    def known_tokens(self, start: int, end: int) -> list[int]:
        """Returns the tokens ``start .. end - 1`` of prompt and output."""
        request = self.request
        num_prompt_tokens = len(request.prompt_token_ids)
        tokens = list(request.prompt_token_ids[start:end])
        if end > num_prompt_tokens:
            tokens += request.output_token_ids[max(start - num_prompt_tokens, 0) : end - num_prompt_tokens]
        return tokens

    def leave_device(self) -> None:
        """Resets the fields that describe a batch row, blocks and steps in flight."""
        self.request.num_inflight_tokens = 0
        self.request.row = -1
        self.block_table = []
        self.is_decoding = False
        self.restarts = False
        self.num_inflight_steps = 0
        self.num_inflight_decodes = 0
        self.drop_tokens = False


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step in flight and its sequences: ``sequences[i]`` is sequence ``i`` of the step, or one that a MOVE moves."""

    step: ScheduledStep
    sequences: list[Sequence]
    first_chunk: int
    """Index of the first sequence that computes a part of its prompt. The sequences before it decode."""
    copies: list[BlockCopy]
    """Copies that the step makes. Their sources are held."""
