"""The section ``scheduler_config``: the choice of requests for each step."""

from __future__ import annotations

from dataclasses import dataclass

from llm_serving.config.model_section import MAX_SEQS, MAX_TOKENS
from llm_serving.config.schema import MAX_SECONDS, own

SNAPSHOTS_PER_SEQUENCE = 4
"""Default number of state snapshots (linear attention) for each sequence that can run. One snapshot is for the running
sequence. The other ones are for prompts and conversations that later requests may continue."""
MAX_SNAPSHOTS = 1 << 20
"""Largest number of snapshots that a setting accepts."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The choice of requests for each step, and limits on waiting requests. `docs/scheduling.md` compares policies."""

    policy: str = own(
        "prefill_first",
        "Which step comes next. `prefill_first`: prompts before running requests. `fcfs`: prefill and decode "
        "steps alternate. `decode_first`: running requests before prompts. `chunked`: all decodes and chunks "
        "of prompts in one step, up to `chunk_tokens`. `slo`: as `chunked`, with as many prompt tokens as the "
        "objectives permit.",
        choices=("prefill_first", "fcfs", "decode_first", "chunked", "slo"),
    )
    max_num_seqs: int | None = own(
        None,
        "Maximum number of sequences that have blocks at the same time.",
        unit="sequences",
        low=1,
        high=MAX_SEQS,
        null="the largest of `model_config.decode_batch_size`",
    )
    max_num_batched_tokens: int | None = own(
        None,
        "Maximum number of tokens in a step. A longer prompt is prefilled in several steps.",
        unit="tokens",
        low=1,
        high=MAX_TOKENS,
        null="the largest of `model_config.seq_length`, limited to what a prefill step can hold",
    )
    decode_steps_ahead: int = own(
        1, "Decode steps that are sent before the result of the current one has arrived.", unit="steps", low=0, high=3
    )
    max_waiting_requests: int = own(
        1024, "Maximum number of waiting requests. Others get a 429.", unit="requests", low=1, high=1_000_000
    )
    max_waiting_tokens: int | None = own(
        None,
        "Maximum number of waiting prompt tokens. Other requests get a 429.",
        unit="tokens",
        low=1,
        high=2**40,
        null="no limit",
    )
    cache_salt: str = own(
        "auto",
        "Which requests share the prefix cache. `none`: all. `tenant`: only those with the same API key, so "
        "that response times reveal nothing about the prompts of others. `auto`: as `tenant` if the server has API "
        "keys, otherwise as `none`.",
        choices=("auto", "none", "tenant"),
    )
    chunk_tokens: int | None = own(
        None,
        "Tokens in a step of policy `chunked`: one for each decoding sequence, the rest (at least 16) for "
        "prompts. Policy `slo` uses it until it has learned step times.",
        unit="tokens",
        low=1,
        high=MAX_TOKENS,
        null="the larger of 256 and twice the largest of `model_config.decode_batch_size`; at most "
        "`max_num_batched_tokens`",
    )
    preemption: str = own(
        "recompute",
        "Treatment of a running sequence whose blocks an older one needs. `recompute`: its tokens are "
        "computed again later. `swap`: its blocks move to host memory (`pa_config.num_host_blocks`); if that "
        "is full, it is recomputed. `auto`: the faster way by measured rates. Models with linear attention always "
        "recompute.",
        choices=("recompute", "swap", "auto"),
    )
    prefix_cache: bool | None = own(
        None,
        "Share the blocks of computed prompts with later requests that begin alike. Needs paged attention.",
        null="True with paged attention",
    )
    state_snapshots: int | None = own(
        None,
        "Only for models with linear attention: number of states that the prefix cache keeps. A request resumes where "
        "the cache has its blocks and a state, see `docs/models.md`. 0 turns the prefix cache off.",
        low=0,
        high=MAX_SNAPSHOTS,
        null=f"{SNAPSHOTS_PER_SEQUENCE} for each sequence that can run",
    )
    admission: str = own(
        "none",
        "Whether a request that fits now may start. `none`: immediately. `router`: if all running requests "
        "will fit until they end, within `max_schedule_total_token_num`. `aimd`: the same with a limit that "
        "adapts.",
        choices=("none", "router", "aimd"),
    )
    max_schedule_total_token_num: int | None = own(
        None,
        "Maximum number of tokens that running requests may grow to together, for `router`. `aimd` starts with it.",
        unit="tokens",
        low=1,
        high=2**40,
        null="the tokens of the KV cache",
    )
    predict_output_length: bool = own(
        False,
        "Let `admission` expect outputs as long as recent ones, instead of `max_tokens`.",
    )
    fairness: bool = own(
        True, "Serve waiting API keys equally, by the tokens that they have received (virtual token counters)."
    )
    light_keys_first: bool = own(
        True,
        "Start requests of API keys with few requests first: at most a 16th of all requests, and a quarter of the "
        "largest key's. Some batch rows and blocks are kept free for them. Needs `fairness`, and changes nothing with "
        "one key.",
    )
    ttft_objective_ms: float = own(
        2000.0,
        "Objective of policy `slo` for the time to the first token, unless a request states its own.",
        unit="milliseconds",
        low=1.0,
        high=MAX_SECONDS * 1000,
    )
    tbt_objective_ms: float = own(
        200.0,
        "Objective of policy `slo` for the time between tokens, unless a request states its own.",
        unit="milliseconds",
        low=1.0,
        high=MAX_SECONDS * 1000,
    )
