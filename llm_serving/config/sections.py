"""Every section and key of a config. Attribute names are the YAML's; the published keys keep name and meaning.

A loaded ``Config`` holds these sections resolved: paths absolute, ``auto`` and null replaced where a value follows
from the model or the machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from llm_serving.config.model_section import MAX_SEQS, MAX_TOKENS, ModelConfig
from llm_serving.config.schema import own, published

__all__ = [
    "SECTIONS",
    "BasicInputsConfig",
    "ExtraInputsConfig",
    "LogConfig",
    "ModelConfig",
    "PagedAttentionConfig",
    "SchedulerConfig",
    "ServingConfig",
    "TokenizerConfig",
    "WarmupInputsConfig",
]

MAX_BLOCKS = 64 * 1024 * 1024
MAX_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class ServingConfig:
    """Addresses of the server and its agents, and how long to wait for what."""

    agent_ports: tuple[int, ...] = published(
        (16002,),
        "Port of each agent, one a device; 0 takes any free one. More than one is not available yet.",
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
    server_port: int = published(8835, "Port of the HTTP server; 0 takes any free one.", low=0, high=65535)
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
        "Order in which an agent takes queued steps: `prefill_first` runs prompts before decodes, `fcfs` runs them in "
        "the order they were sent.",
        choices=("prefill_first", "fcfs"),
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


@dataclass(frozen=True, slots=True)
class LogConfig:
    """The event log."""

    path: str = own("output/server.log", "File of the log, one JSON object a line; its folder is made.")
    level: str = own("info", "Least level that is written.", choices=("debug", "info", "warning", "error"))
    log_prompts: bool = own(False, "Write prompts and answers into the log.")
    state_interval_s: float = own(
        5.0, "Time between lines about the engine's state.", unit="seconds", low=0.1, high=MAX_SECONDS
    )


SECTIONS: dict[str, type] = {
    "model_config": ModelConfig,
    "serving_config": ServingConfig,
    "pa_config": PagedAttentionConfig,
    "tokenizer": TokenizerConfig,
    "basic_inputs": BasicInputsConfig,
    "extra_inputs": ExtraInputsConfig,
    "warmup_inputs": WarmupInputsConfig,
    "scheduler_config": SchedulerConfig,
    "log_config": LogConfig,
}
"""Section classes by their name in the YAML, in the order they are documented."""
