"""What the scheduler knows of a request beyond the request itself."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from llm_serving.kvcache.kv_cache_manager import BlockCopy, KVCacheManager
from llm_serving.kvcache.prefix_cache import PrefixMatch
from llm_serving.kvcache.prefix_chain import PrefixChain
from llm_serving.request import Request

__all__ = ["Sequence", "SequenceState"]

_PLAIN_STATE = (
    "arrival_index",
    "max_output_tokens",
    "on_host",
    "is_decoding",
    "restarts",
    "notes_tokens",
    "num_inflight_steps",
    "num_inflight_decodes",
    "drop_tokens",
    "last_turn",
)
"""Attributes of a sequence that are numbers."""


class SequenceState(enum.Enum):
    """Where the scheduler keeps a sequence. Only RUNNING and LEAVING ones have a row and blocks."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    LEAVING = enum.auto()
    """Finished or preempted, but steps in flight still touch its row and blocks, or are to move them to the host:
    nothing else is scheduled for it, and when the last of them is answered it is gone, waiting again or swapped."""
    SWAPPED = enum.auto()
    """Preempted, what it has computed being in host memory."""
    GONE = enum.auto()


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
        "last_turn",
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
        """Output tokens after which the sequence is over, whatever they are: max_tokens or the end of the context."""
        stop_token_ids = request.sampling.stop_token_ids
        self.ending_token_ids = (
            stop_token_ids if request.sampling.ignore_eos else stop_token_ids | request.end_token_ids
        )
        self.state = SequenceState.WAITING
        self.block_table: list[int] = []
        self.copies: list[BlockCopy] = []
        """To be made by its next step, before anything else."""
        self.prefix_chain: PrefixChain | None = None
        """Its known tokens as the prefix cache sees them, once it was looked up there."""
        self.prefix_match: tuple[int, PrefixMatch] | None = None
        self.host_table: list[int] = []
        """Blocks of host memory for its first blocks: to be swapped out to, or to come back from."""
        self.on_host = False
        """They hold what was computed."""
        self.is_decoding = False
        """All its known tokens are computed, or will be by steps in flight: a decode step comes next."""
        self.restarts = False
        """Its next step is the first on its row."""
        self.notes_tokens = False
        """Its next token means something to its receipt, or to its tenant."""
        self.num_inflight_steps = 0
        self.num_inflight_decodes = 0
        self.drop_tokens = False
        """What the steps in flight will deliver is void, and what its blocks hold is not known: a step never ran."""
        self.last_turn = 0
        """Goes up from turn to turn, where more rows want to decode than a step takes."""

    @property
    def wants_token(self) -> bool:
        """Whether a further token, not yet on its way, is wanted. False for sure endings: max_tokens, context."""
        request = self.request
        return len(request.output_token_ids) + request.num_inflight_tokens < self.max_output_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens that no step has computed, nor one in flight will."""
        return self.request.num_tokens - self.request.num_computed_tokens

    @property
    def max_cached_tokens(self) -> int:
        """Tokens it has in the cache at most: all but the last of the longest output."""
        return len(self.request.prompt_token_ids) + self.max_output_tokens - 1

    def known_tokens(self, start: int, end: int) -> list[int]:
        """Tokens ``start .. end - 1`` of prompt and output."""
        request = self.request
        num_prompt_tokens = len(request.prompt_token_ids)
        tokens = list(request.prompt_token_ids[start:end])
        if end > num_prompt_tokens:
            tokens += request.output_token_ids[max(start - num_prompt_tokens, 0) : end - num_prompt_tokens]
        return tokens

    def snapshot(
        self, request: Any, chain_tokens: Callable[[PrefixChain, Request], bytes], version: int
    ) -> dict[str, Any]:
        """Returns the sequence with ``request`` in place of its request. A prefix match of another ``version`` is void.

        ``chain_tokens`` returns the packed tokens of a prefix chain."""
        chain, match = self.prefix_chain, self.prefix_match
        return {
            "request": request,
            "state": self.state.name,
            "block_table": self.block_table.copy(),
            "copies": [[copy.source, copy.destination] for copy in self.copies],
            "prefix_chain": None if chain is None else chain.snapshot(chain_tokens(chain, self.request)),
            "prefix_match": None if match is None or match[0] != version else match[1].snapshot(),
            "host_table": self.host_table.copy(),
            **{name: getattr(self, name) for name in _PLAIN_STATE},
        }

    @classmethod
    def restored(cls, state: dict[str, Any], request: Request, kv_cache: KVCacheManager, version: int) -> Sequence:
        """Returns the sequence that ``snapshot`` saved. ``version`` is the present version of prefix matches."""
        sequence = cls(request, state["arrival_index"], state["max_output_tokens"])
        sequence.state = SequenceState[state["state"]]
        sequence.block_table, sequence.host_table = state["block_table"], state["host_table"]
        sequence.copies = [BlockCopy(source, destination) for source, destination in state["copies"]]
        if state["prefix_chain"] is not None:
            sequence.prefix_chain = kv_cache.restore_chain(state["prefix_chain"], request.cache_salt)
        if state["prefix_match"] is not None:
            sequence.prefix_match = (version, PrefixMatch.restored(state["prefix_match"]))
        for name in _PLAIN_STATE:
            setattr(sequence, name, state[name])
        return sequence

    def leave_device(self) -> None:
        """No row, no blocks, nothing in flight."""
        self.request.num_inflight_tokens = 0
        self.request.row = -1
        self.block_table = []
        self.is_decoding = False
        self.restarts = False
        self.num_inflight_steps = 0
        self.num_inflight_decodes = 0
        self.drop_tokens = False
