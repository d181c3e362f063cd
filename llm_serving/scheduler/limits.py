"""Policies, kinds of preemption and of admission control by name; see ``policies`` and ``slo``.

The sizes the scheduler works within, and which request can never fit them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llm_serving.errors import ContextLengthError
from llm_serving.request import Request

if TYPE_CHECKING:
    from llm_serving.config import Config

__all__ = ["MAX_DECODE_STEPS_AHEAD", "AdmissionKind", "BatchingStrategy", "Policy", "PreemptionKind", "SchedulerLimits"]


class Policy(enum.Enum):
    """``scheduler_config.policy``."""

    PREFILL_FIRST = "prefill_first"
    FCFS = "fcfs"
    DECODE_FIRST = "decode_first"
    CHUNKED = "chunked"
    SLO = "slo"


class BatchingStrategy(enum.Enum):
    """``model_config.batching_strategy``; see the file of each."""

    NONE = "none"
    STATIC = "static"
    DYNAMIC = "dynamic"
    CONTINUOUS = "continuous"


class PreemptionKind(enum.Enum):
    """``scheduler_config.preemption``: what becomes of a sequence whose blocks are needed by an older one."""

    RECOMPUTE = "recompute"
    """It waits, and all its known tokens are computed again."""
    SWAP = "swap"
    """Its blocks go to host memory, and come back; where the host has no room it is recomputed."""
    AUTO = "auto"
    """Whatever takes less time, by the rates measured so far."""


class AdmissionKind(enum.Enum):
    """``scheduler_config.admission``; see ``admission``."""

    NONE = "none"
    ROUTER = "router"
    AIMD = "aimd"


MAX_DECODE_STEPS_AHEAD = 3

_AT_LEAST_ONE = (
    "block_size",
    "max_model_len",
    "max_prompt_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "prefill_batch_size",
    "decode_batch_size",
)
_AT_LEAST_ONE_IF_SET = ("chunk_tokens", "batch_size")


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Everything the scheduler reads of the configuration. Times are seconds, lengths tokens."""

    num_blocks: int
    """Blocks of the KV cache, the null block among them."""
    block_size: int
    max_model_len: int
    """Longest context: prompt and output."""
    max_prompt_len: int
    max_num_seqs: int
    """Rows of the agent's state table: sequences that have blocks at a time."""
    max_num_batched_tokens: int
    """Tokens of a step."""
    prefill_batch_size: int
    decode_batch_size: int
    policy: Policy = Policy.PREFILL_FIRST
    decode_steps_ahead: int = 1
    """Unanswered decode steps a row may have behind the one that is running."""
    chunk_tokens: int | None = None
    """Tokens of a mixed step, rows that decode included; None for ``mixed_step_tokens``' own choice."""
    batching: BatchingStrategy = BatchingStrategy.CONTINUOUS
    batch_size: int | None = None
    """Requests of a static or dynamic batch; None for as many as a decode step takes."""
    batch_waiting_time: float = 0.0
    """How long a prefill step that could take more requests may wait for them, or a dynamic batch that is not full."""
    decode_batch_waiting_time: float = 0.0
    """How long a decode step that is not full may wait for rows still being prefilled."""
    max_waiting_requests: int = 1024
    max_waiting_tokens: int | None = None
    num_host_blocks: int = 0
    """Blocks of host memory that sequences can be swapped out to."""
    page_attention: bool = True
    """Blocks on demand; else a sequence reserves a range of blocks for its longest answer."""
    prefix_cache: bool = False
    cache_namespace: bytes = b""
    """All that keys and values depend on besides tokens: model, weights, format of the cache."""
    preemption: PreemptionKind = PreemptionKind.RECOMPUTE
    admission: AdmissionKind = AdmissionKind.NONE
    max_total_tokens: int | None = None
    """What ``admission`` lets running requests grow to together; None for the tokens of the cache."""
    predict_output_length: bool = False
    """Whether ``admission`` expects answers as long as those seen, and not as long as they may be."""
    fairness: bool = True
    """Whether tenants take turns in the queue by the service they got."""
    ttft_objective: float = 2.0
    """Seconds from arrival to first token that a request without an objective of its own is to have."""
    tbt_objective: float = 0.2
    """Seconds between two tokens of a request without an objective of its own."""

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in _AT_LEAST_ONE_IF_SET:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.prefix_cache and not self.page_attention:
            raise ValueError("prefix_cache shares blocks, which sequences in one piece (page_attention False) cannot")
        if not 0 <= self.decode_steps_ahead <= MAX_DECODE_STEPS_AHEAD:
            raise ValueError(
                f"decode_steps_ahead is {self.decode_steps_ahead}; it must be 0 to {MAX_DECODE_STEPS_AHEAD}"
            )

    @classmethod
    def from_config(cls, config: Config) -> SchedulerLimits:
        """What a deployment's configuration says."""
        model, scheduler = config.model_config, config.scheduler_config
        return cls(
            num_blocks=config.pa_config.num_blocks,
            block_size=config.pa_config.block_size,
            max_model_len=config.max_model_len,
            max_prompt_len=config.max_prompt_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            prefill_batch_size=config.max_prefill_seqs,
            decode_batch_size=config.max_decode_seqs,
            policy=Policy(scheduler.policy),
            decode_steps_ahead=scheduler.decode_steps_ahead,
            chunk_tokens=scheduler.chunk_tokens,
            page_attention=model.page_attention,
            prefix_cache=scheduler.prefix_cache,
            cache_namespace=config.cache_namespace,
            preemption=PreemptionKind(scheduler.preemption),
            admission=AdmissionKind(scheduler.admission),
            max_total_tokens=scheduler.max_schedule_total_token_num,
            predict_output_length=scheduler.predict_output_length,
            fairness=scheduler.fairness,
            ttft_objective=scheduler.ttft_objective_ms / 1000,
            tbt_objective=scheduler.tbt_objective_ms / 1000,
            batching=BatchingStrategy(model.batching_strategy),
            batch_size=model.batch_size,
            batch_waiting_time=model.batch_waiting_time,
            decode_batch_waiting_time=model.decode_batch_waiting_time,
            max_waiting_requests=scheduler.max_waiting_requests,
            max_waiting_tokens=scheduler.max_waiting_tokens,
            num_host_blocks=config.num_host_blocks,
        )

    @property
    def mixed_step_tokens(self) -> int:
        """The token budget of a mixed step. Twice the rows of a decode step, and 256 at least, unless configured:
        prompts then get no less of a step than the rows do."""
        wanted = max(256, 2 * self.decode_batch_size) if self.chunk_tokens is None else self.chunk_tokens
        return min(wanted, self.max_num_batched_tokens)

    @property
    def max_batch_size(self) -> int:
        """Requests of a static or dynamic batch."""
        wanted = self.decode_batch_size if self.batch_size is None else self.batch_size
        return min(wanted, self.max_num_seqs)

    @property
    def max_moves(self) -> int:
        """Most blocks that one step moves."""
        return -(-self.max_model_len // self.block_size) + self.max_num_seqs

    @property
    def max_step_history(self) -> int:
        """Most history tokens in one step: a whole context, sent with the last chunk of it, or a step's tokens."""
        return max(self.max_num_batched_tokens, self.max_model_len)

    @property
    def watermark_blocks(self) -> int:
        """Blocks that admitting a request leaves free at least while others run. A twentieth: in a simulation of
        400 requests on 1024 blocks of 16 it preempted a fifth to a half as often as a hundredth did."""
        return self.num_blocks // 20

    def max_output_tokens(self, request: Request) -> int:
        """Output tokens after which the request is over: ``max_tokens``, or less where the context ends.

        Raises ContextLengthError when the request can never be served, with the arithmetic.
        """
        prompt = len(request.prompt_token_ids)
        if prompt < 1:
            raise ContextLengthError("the prompt has no tokens; it must have at least 1", param="prompt")
        if request.sampling.max_tokens < 1:
            raise ContextLengthError(
                f"max_tokens is {request.sampling.max_tokens}; it must be at least 1", param="max_tokens"
            )
        if prompt > self.max_prompt_len:
            raise ContextLengthError(
                f"the prompt has {prompt} tokens, the longest prompt served is {self.max_prompt_len} tokens"
                " (model_config.seq_length). Shorten the prompt.",
                param="prompt",
            )
        if prompt + 1 > self.max_model_len:
            raise ContextLengthError(
                f"the prompt has {prompt} tokens and the context is {self.max_model_len} tokens, which leaves no room"
                " for an answer. Shorten the prompt.",
                param="prompt",
            )
        max_output = min(request.sampling.max_tokens, self.max_model_len - prompt)
        self._check_cache(prompt, max_output)
        return max_output

    def _check_cache(self, prompt: int, max_output: int) -> None:
        cached = prompt + max_output - 1
        needed, usable = -(-cached // self.block_size), self.num_blocks - 1
        if needed > usable:
            raise ContextLengthError(
                f"a prompt of {prompt} tokens and up to {max_output} output tokens need ceil(({prompt} + {max_output}"
                f" - 1) / {self.block_size}) = {needed} blocks of the KV cache; it has {usable}"
                f" (pa_config.num_blocks {self.num_blocks} less the null block), room for"
                f" {usable * self.block_size} tokens. Shorten the prompt or ask for fewer tokens.",
                param="max_tokens",
            )
