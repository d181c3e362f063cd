"""Every section and key of a config. Attribute names are the YAML's; the published keys keep name and meaning.

A loaded ``Config`` holds these sections resolved: paths absolute, ``auto`` and null replaced where a value follows
from the model or the machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from llm_serving.config.model_section import MAX_SEQS, MAX_TOKENS, ModelConfig
from llm_serving.config.parallel_section import ParallelConfig
from llm_serving.config.schema import own, published

__all__ = [
    "SECTIONS",
    "BasicInputsConfig",
    "ExtraInputsConfig",
    "LogConfig",
    "ModelConfig",
    "PagedAttentionConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "ServingConfig",
    "TokenizerConfig",
    "WarmupInputsConfig",
]

MAX_BLOCKS = 64 * 1024 * 1024
MAX_SECONDS = 86_400.0
DEFAULT_SERVER_PORT = 8835
"""The only place that holds this number. Docs and examples repeat it; a test compares them."""


@dataclass(frozen=True, slots=True)
class ServingConfig:
    """Addresses of the server and its agents, and how long to wait for what."""

    agent_ports: tuple[int, ...] = published(
        (16002,),
        "Port of each agent, one a device, in order of rank; 0 takes any free one, and `[0]` alone stands for as "
        "many as `parallel_config` asks for.",
        low=0,
        high=65535,
    )
    agent_ip: str = published("127.0.0.1", "Address agents listen on; it must be a loopback address.")
    start_device_id: int = published(
        0, "Device of the first agent; the next agent takes the next one.", low=0, high=255
    )
    server_ip: str = published(
        "127.0.0.1", "Address the HTTP server listens on. Beyond loopback only with `allow_remote: true`."
    )
    server_port: int = published(
        DEFAULT_SERVER_PORT, "Port of the HTTP server; 0 takes any free one.", low=0, high=65535
    )
    allow_remote: bool = own(
        False, "Let `server_ip` be reachable from other machines. There is no authentication: whoever connects may ask."
    )
    max_body_bytes: int = own(
        8 * 1024 * 1024, "Largest HTTP request body.", unit="bytes", low=1024, high=1024 * 1024 * 1024
    )
    agent_restart_limit: int = own(
        5, "Restarts of a dying agent, with growing pauses, before the server gives up.", low=0, high=1000
    )
    agent_start_timeout_s: float = own(
        600.0, "Longest time an agent may load, compile and warm up.", unit="seconds", low=1.0, high=MAX_SECONDS
    )
    step_timeout_s: float = own(
        300.0,
        "Longest time a step may take before its agent counts as lost.",
        unit="seconds",
        low=1.0,
        high=MAX_SECONDS,
    )


@dataclass(frozen=True, slots=True)
class PagedAttentionConfig:
    """The KV cache."""

    num_blocks: int = published(
        1024, "Blocks of the KV cache; the first one pads block tables.", unit="blocks", low=2, high=MAX_BLOCKS
    )
    block_size: int = published(16, "Tokens a block holds.", unit="tokens", low=1, high=1024)
    decode_seq_length: int = published(
        4096, "Longest sequence the cache serves, prompt and output together.", unit="tokens", low=1, high=MAX_TOKENS
    )
    num_host_blocks: int | None = own(
        None,
        "Blocks of host memory that sequences are swapped out to when the cache is full; 0 swaps nothing.",
        unit="blocks",
        low=0,
        high=MAX_BLOCKS,
        null="as many as `num_blocks` where `scheduler_config.preemption` is `swap` or `auto`, else 0",
    )


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """The tokenizer."""

    type: str = published(
        "auto",
        "`LlamaTokenizer` reads a sentencepiece `tokenizer.model`, `LlamaTokenizerFast` a `tokenizer.json` or, "
        "without one, byte-level BPE in `vocab.json` and `merges.txt`; `auto` takes the first there is of "
        "`tokenizer.json`, `tokenizer.model` and `vocab.json`.",
        choices=("auto", "LlamaTokenizer", "LlamaTokenizerFast"),
    )
    vocab_file: str | None = published(
        None,
        "Tokenizer file, or the folder that holds it; looked up like `model_cfg_path`.",
        null="the model folder",
    )


@dataclass(frozen=True, slots=True)
class BasicInputsConfig:
    """Inputs every step passes to the graph."""

    type: str = published(
        "LlamaBasicInputs", "Kind of inputs. Accepted; the model decides.", choices=("LlamaBasicInputs",)
    )


@dataclass(frozen=True, slots=True)
class ExtraInputsConfig:
    """Inputs some graphs need beside the basic ones."""

    type: str = published(
        "LlamaExtraInputs", "Kind of inputs. Accepted; the model decides.", choices=("LlamaExtraInputs",)
    )


@dataclass(frozen=True, slots=True)
class WarmupInputsConfig:
    """Inputs of the warm-up."""

    type: str = published(
        "LlamaWarmupInputs",
        "Kind of inputs. Accepted; the warm-up runs the largest configured steps.",
        choices=("LlamaWarmupInputs",),
    )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Which requests run in which step."""

    policy: str = own(
        "prefill_first",
        "What runs next: `prefill_first` new prompts before running requests, `fcfs` both in turn, `decode_first` "
        "running requests before new prompts, `chunked` both in one step (parts of prompts beside the rows that "
        "decode, up to `chunk_tokens`), `slo` as `chunked`, with as many prompt tokens as the objectives allow, for as "
        "many requests as can meet theirs.",
        choices=("prefill_first", "fcfs", "decode_first", "chunked", "slo"),
    )
    max_num_seqs: int | None = own(
        None,
        "Most sequences that have blocks at a time.",
        unit="sequences",
        low=1,
        high=MAX_SEQS,
        null="the largest of `model_config.decode_batch_size`",
    )
    max_num_batched_tokens: int | None = own(
        None,
        "Most tokens a step computes, over all its sequences; a longer prompt is prefilled in several steps.",
        unit="tokens",
        low=1,
        high=MAX_TOKENS,
        null="the largest of `model_config.seq_length`, but no more than a prefill step's sequences can have",
    )
    decode_steps_ahead: int = own(
        1, "Decode steps sent before the one under way has answered.", unit="steps", low=0, high=3
    )
    max_waiting_requests: int = own(
        1024, "Requests that may wait; more are told to come back later (429).", unit="requests", low=1, high=1_000_000
    )
    max_waiting_tokens: int | None = own(
        None,
        "Prompt tokens that may wait; more are told to come back later (429).",
        unit="tokens",
        low=1,
        high=2**40,
        null="no limit",
    )
    cache_salt: str = own(
        "none",
        "Who shares the prefix cache: `none` lets all requests share it, `tenant` only those with the same API key, so "
        "that nobody can tell from an answer's speed what others have asked.",
        choices=("none", "tenant"),
    )
    chunk_tokens: int | None = own(
        None,
        "Tokens of a step of policy `chunked` (of `slo` until it knows what steps take): a token for each row that "
        "decodes, the rest for prompts (16 at least).",
        unit="tokens",
        low=1,
        high=MAX_TOKENS,
        null="256 or twice the largest of `model_config.decode_batch_size`, the larger; no more than "
        "`max_num_batched_tokens`",
    )
    preemption: str = own(
        "recompute",
        "What becomes of a running request whose blocks an older one needs: `recompute` computes its tokens again "
        "later, `swap` moves its blocks to the host (`pa_config.num_host_blocks`; without room there it is "
        "recomputed), `auto` what takes less time by the rates measured.",
        choices=("recompute", "swap", "auto"),
    )
    prefix_cache: bool = own(
        False, "Find what was computed for the beginning of a prompt before, and share it. With paged attention only."
    )
    admission: str = own(
        "none",
        "Whether a request that fits now may start: `none` at once, `router` if all running requests will fit until "
        "they have ended, by `max_schedule_total_token_num`; `aimd` the same with a limit that is learnt.",
        choices=("none", "router", "aimd"),
    )
    max_schedule_total_token_num: int | None = own(
        None,
        "Most tokens that running requests may grow to together, of `router`; where `aimd` starts.",
        unit="tokens",
        low=1,
        high=2**40,
        null="the tokens of the KV cache",
    )
    predict_output_length: bool = own(
        False,
        "Let `admission` expect answers as long as those seen lately; else as long as `max_tokens` lets them be.",
    )
    fairness: bool = own(
        True, "Let the API keys with waiting requests take turns by the tokens they got (virtual token counters)."
    )
    ttft_objective_ms: float = own(
        2000.0,
        "Time to the first token that policy `slo` aims at, for requests without an objective of their own.",
        unit="milliseconds",
        low=1.0,
        high=MAX_SECONDS * 1000,
    )
    tbt_objective_ms: float = own(
        200.0,
        "Time between tokens that policy `slo` aims at, for requests without an objective of their own.",
        unit="milliseconds",
        low=1.0,
        high=MAX_SECONDS * 1000,
    )


@dataclass(frozen=True, slots=True)
class LogConfig:
    """The event log."""

    path: str = own("output/server.log", "File of the log, one JSON object a line; its folder is made.")
    level: str = own("info", "Least level that is written.", choices=("debug", "info", "warning", "error"))
    log_prompts: bool = own(False, "Write prompts and answers into the log.")
    state_interval_s: float = own(
        5.0, "Time between lines about the engine's state.", unit="seconds", low=0.1, high=MAX_SECONDS
    )
    flight_recorder: str | None = own(
        None,
        "Folder of the flight recorder's files, see `docs/flight_recorder.md`; it is made.",
        null="the folder `flight` beside the log",
    )
    flight_recorder_mib: int = own(
        64, "Most that the flight recorder keeps; 0 switches it off.", unit="MiB", low=0, high=1024 * 1024
    )


SECTIONS: dict[str, type] = {
    "model_config": ModelConfig,
    "serving_config": ServingConfig,
    "pa_config": PagedAttentionConfig,
    "tokenizer": TokenizerConfig,
    "basic_inputs": BasicInputsConfig,
    "extra_inputs": ExtraInputsConfig,
    "warmup_inputs": WarmupInputsConfig,
    "parallel_config": ParallelConfig,
    "scheduler_config": SchedulerConfig,
    "log_config": LogConfig,
}
"""Section classes by their name in the YAML, in the order they are documented."""
