"""The limits and modes of a scheduler. ``engine/scheduler_limits.py`` reads them from the configuration."""

from __future__ import annotations

import enum
from dataclasses import dataclass

MAX_DECODE_STEPS_AHEAD = 3  # maximum number of decode steps that are sent ahead

_AT_LEAST_ONE = ("block_size", "max_model_len", "max_prompt_len", "max_num_seqs", "max_num_batched_tokens",
                 "prefill_batch_size", "decode_batch_size", "chunk_tokens", "batch_size")  # fmt: skip


class Policy(enum.Enum):
    """Values of ``scheduler_config.policy``. The policy chooses whether the next step has prompts, decoding sequences
    or both.

    To add a policy, see ``llm_serving/policies``.
    """

    PREFILL_FIRST = "prefill_first"
    FCFS = "fcfs"
    DECODE_FIRST = "decode_first"
    CHUNKED = "chunked"
    SLO = "slo"


class BatchingStrategy(enum.Enum):
    """Values of ``model_config.batching_strategy``. The batching mode decides which requests may start.

    To add a batching mode, see ``llm_serving/admission/batching.py``.
    """

    NONE = "none"
    STATIC = "static"
    DYNAMIC = "dynamic"
    CONTINUOUS = "continuous"


class PreemptionKind(enum.Enum):
    """Values of ``scheduler_config.preemption``: whether preempted sequences are recomputed or swapped."""

    RECOMPUTE = "recompute"
    """The sequence waits, and its known tokens are computed again."""
    SWAP = "swap"
    """The sequence's blocks move to host memory and come back. If the host pool is full, the sequence is recomputed."""
    AUTO = "auto"
    """Recompute or swap, whichever takes less time at the measured rates of prefill and block moves."""


class AdmissionKind(enum.Enum):
    """Values of ``scheduler_config.admission``. The admission control limits which requests run at the same time.

    See ``llm_serving/admission/controls.py``.
    """

    NONE = "none"
    ROUTER = "router"
    AIMD = "aimd"


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """All settings that the scheduler reads from the configuration. Times are seconds, lengths are tokens."""

    num_blocks: int
    """Blocks of the KV cache, including the null block."""
    block_size: int
    max_model_len: int
    """Maximum length of the context: prompt and output."""
    max_prompt_len: int
    max_num_seqs: int
    """Number of batch rows, which is the maximum number of sequences with blocks."""
    max_num_batched_tokens: int
    """Maximum number of tokens in a step."""
    prefill_batch_size: int
    decode_batch_size: int
    max_decode_entries: int | None = None
    """Maximum number of input tokens of a decode step: its sequences and drafts. None: ``decode_batch_size``."""
    policy: Policy = Policy.PREFILL_FIRST
    decode_steps_ahead: int = 1
    """Number of decode steps that may wait at the agent while another decode step runs."""
    chunk_tokens: int | None = None
    """Maximum tokens of a mixed step, including decoding sequences. None: the default of ``mixed_step_tokens``."""
    batching: BatchingStrategy = BatchingStrategy.CONTINUOUS
    batch_size: int | None = None
    """Number of requests in a static or dynamic batch. None: as many as a decode step can have."""
    batch_waiting_time: float = 0.0
    """Maximum seconds for which a prefill step, or a dynamic batch that is not full, waits for more requests."""
    decode_batch_waiting_time: float = 0.0
    """Maximum seconds for which a decode step that is not full waits for sequences in prefill."""
    max_waiting_requests: int = 1024
    max_waiting_tokens: int | None = None
    num_host_blocks: int = 0
    """Blocks of host memory for swapped sequences."""
    has_tiers: bool = False
    """True if KV tiers keep copies of computed blocks, see ``block_moves/tier_moves``."""
    hands_over: bool = False
    """True if replicas hand the blocks of computed prompts over to each other, see ``block_moves/hand_overs``."""
    page_attention: bool = True
    """True if sequences get blocks on demand. False if each sequence reserves one range for its longest output."""
    prefix_cache: bool = False
    copies_tails: bool = True
    """True if a sequence copies a cached block of which only the first tokens match. False: it computes the tokens."""
    num_state_snapshots: int = 0
    """Number of snapshots of states that the prefix cache needs for linear attention. 0 for models without it."""
    cache_namespace: bytes = b""
    """Identifies the model, the weights and the format of the cache. Keys and values depend on these and on tokens."""
    preemption: PreemptionKind = PreemptionKind.RECOMPUTE
    admission: AdmissionKind = AdmissionKind.NONE
    max_total_tokens: int | None = None
    """Maximum number of tokens that ``admission`` lets all running sequences hold. None: those of the KV cache."""
    predict_output_length: bool = False
    """True if ``admission`` expects outputs as long as recent ones. False if it expects the maximum length."""
    fairness: bool = True
    """True if the queue shares service equally between tenants."""
    splits_adapters: bool = False
    """True if all running requests have the same LoRA adapter. A request with another adapter waits until they end."""
    light_keys_first: bool = True
    """True if requests of tenants with few requests start before requests of tenants with many, see ``light_keys``."""
    runs_light_prefills_first: bool = False
    """True if the agent runs prefill steps for light keys before queued steps (``ScheduledStep.overtakes``)."""
    ttft_objective: float = 2.0
    """Objective in seconds from the arrival to the first token, for requests that state no objective."""
    tbt_objective: float = 0.2
    """Objective in seconds between two tokens, for requests that state no objective."""

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.prefix_cache and not self.page_attention:
            raise ValueError("prefix_cache needs page_attention, because contiguous sequences cannot share blocks")
        if self.num_state_snapshots and (not self.prefix_cache or self.has_tiers or self.hands_over):
            raise ValueError("num_state_snapshots needs prefix_cache, without has_tiers and hands_over")
        if self.has_tiers and not self.prefix_cache:
            raise ValueError("has_tiers needs prefix_cache, which finds the blocks that the tiers keep")
        if self.hands_over and not self.page_attention:
            raise ValueError("hands_over needs page_attention, because blocks arrive one by one")
        if not 0 <= self.decode_steps_ahead <= MAX_DECODE_STEPS_AHEAD:
            raise ValueError(
                f"decode_steps_ahead is {self.decode_steps_ahead}; it must be 0 to {MAX_DECODE_STEPS_AHEAD}"
            )

    @property
    def mixed_step_tokens(self) -> int:
        """Token budget of a mixed step.

        The default is at least twice the maximum number of sequences in a decode step. Prompts then get at least as
        many tokens as decoding sequences.
        """
        wanted = max(256, 2 * self.decode_batch_size) if self.chunk_tokens is None else self.chunk_tokens
        return min(wanted, self.max_num_batched_tokens)

    @property
    def max_batch_size(self) -> int:
        """Maximum number of requests in a static or dynamic batch."""
        return min(self.batch_size or self.decode_batch_size, self.max_num_seqs)

    @property
    def max_moves(self) -> int:
        """Maximum number of blocks that one step may copy."""
        return -(-self.max_model_len // self.block_size) + self.max_num_seqs

    @property
    def max_step_history(self) -> int:
        """Maximum total length, in tokens, of the token histories that one step sends to the sampler for penalties.

        This is the maximum number of tokens in a step, or the maximum length of one context if that is larger.
        """
        return max(self.max_num_batched_tokens, self.max_model_len)

    @property
    def watermark_blocks(self) -> int:
        """Number of blocks that must stay free when a sequence starts while others run: a twentieth of the cache.

        These blocks prevent preemptions. With a hundredth instead of a twentieth, a simulation had two to five times as
        many preemptions (400 requests, 1024 blocks of 16 tokens).
        """
        return self.num_blocks // 20
