"""All sections of the configuration, and the keys of the small ones. Attributes have the names of the YAML.

Large sections have a file of their own. To add a key, add a field to the section's dataclass.

In a loaded ``Config``, paths are absolute, and ``auto`` and null are replaced by values of the model or the machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from llm_serving.config.batch_section import BatchConfig
from llm_serving.config.events_section import KvEventsConfig
from llm_serving.config.image_section import ImageConfig
from llm_serving.config.kv_tier_section import KvTierConfig
from llm_serving.config.model_section import MAX_TOKENS, ModelConfig
from llm_serving.config.models_section import ModelsConfig
from llm_serving.config.parallel_section import ParallelConfig
from llm_serving.config.scheduler_section import SchedulerConfig
from llm_serving.config.schema import MAX_SECONDS, own, published
from llm_serving.config.serving_section import ServingConfig
from llm_serving.config.shadow_section import ShadowConfig

MAX_BLOCKS = 64 * 1024 * 1024
"""Largest number of KV blocks that a setting accepts."""


@dataclass(frozen=True, slots=True)
class PagedAttentionConfig:
    """The KV cache."""

    num_blocks: int = published(
        1024,
        "Blocks of the KV cache. The first one pads block tables. `auto`: as many as fit the free memory after the "
        "weights, at most those that all running sequences can use, if there is no prefix cache.",
        unit="blocks",
        low=2,
        high=MAX_BLOCKS,
        auto=True,
    )
    block_size: int = published(
        16,
        "Tokens in a block. `auto`: 16 on a CPU, and on an Ascend the largest size of its kernels, up to 128.",
        unit="tokens",
        low=1,
        high=1024,
        auto=True,
    )
    decode_seq_length: int = published(
        4096,
        "Maximum length of a sequence in the cache, prompt and output together. `auto`: as long as the model and the "
        "memory permit; with a number of blocks, also as long as the blocks.",
        unit="tokens",
        low=1,
        high=MAX_TOKENS,
        auto=True,
    )
    num_host_blocks: int | None = own(
        None,
        "Blocks of host memory for swapped sequences. 0 turns swapping off.",
        unit="blocks",
        low=0,
        high=MAX_BLOCKS,
        null="equal to `num_blocks` if `scheduler_config.preemption` is `swap` or `auto`, else 0",
    )


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """The tokenizer."""

    type: str = published(
        "auto",
        "Kind of tokenizer. `LlamaTokenizer` reads a SentencePiece `tokenizer.model`. `LlamaTokenizerFast` "
        "reads `tokenizer.json` or, without it, byte-level BPE in `vocab.json` and `merges.txt`. `auto` takes "
        "the first of `tokenizer.json`, `tokenizer.model` and `vocab.json` that exists.",
        choices=("auto", "LlamaTokenizer", "LlamaTokenizerFast"),
    )
    vocab_file: str | None = published(
        None,
        "Tokenizer file, or the folder that holds it. It is searched like `model_cfg_path`.",
        null="the model folder",
    )


@dataclass(frozen=True, slots=True)
class BasicInputsConfig:
    """Inputs of every step."""

    type: str = published("LlamaBasicInputs", "Kind of inputs, without effect.", choices=("LlamaBasicInputs",))


@dataclass(frozen=True, slots=True)
class ExtraInputsConfig:
    """Additional inputs of a step for some graphs."""

    type: str = published("LlamaExtraInputs", "Kind of inputs, without effect.", choices=("LlamaExtraInputs",))


@dataclass(frozen=True, slots=True)
class WarmupInputsConfig:
    """Inputs of the warm-up."""

    type: str = published(
        "LlamaWarmupInputs",
        "Kind of inputs, without effect: the warm-up runs the largest configured steps.",
        choices=("LlamaWarmupInputs",),
    )


@dataclass(frozen=True, slots=True)
class LogConfig:
    """The event log."""

    path: str = own("output/server.log", "File of the log, with one JSON object on each line. Its folder is created.")
    level: str = own("info", "Lowest level that is written.", choices=("debug", "info", "warning", "error"))
    log_prompts: bool = own(False, "Write prompts and outputs into the log.")
    max_mib: int = own(
        256,
        "Size at which a log is rotated: `server.log` becomes `server.log.1`. Applies to the event log and to the log "
        "of each agent. 0 turns rotation off.",
        unit="MiB",
        low=0,
        high=1024 * 1024,
    )
    keep_files: int = own(4, "Rotated files that are kept of each log.", unit="files", low=0, high=1000)
    state_interval_s: float = own(
        5.0, "Time between the `engine_state` events.", unit="seconds", low=0.1, high=MAX_SECONDS
    )
    flight_recorder: str | None = own(
        None,
        "Folder of the flight recorder, see `docs/flight_recorder.md`. It is created.",
        null="the folder `flight` next to the log",
    )
    flight_recorder_mib: int = own(
        64, "Maximum size of the flight recording. 0 turns it off.", unit="MiB", low=0, high=1024 * 1024
    )



@dataclass(frozen=True, slots=True)
class LoraConfig:
    """LoRA adapters, which requests choose by their name in the field `model`. See `docs/lora.md`."""

    max_adapters: int = own(
        0,
        "Number of adapter slots: the maximum number of LoRA adapters that are loaded at the same time. 0 turns "
        "adapters off.",
        low=0,
        high=256,
    )
    max_rank: int = own(
        16, "Maximum rank of an adapter. It limits the memory of an adapter.", low=1, high=512
    )
    adapters: tuple[str, ...] | None = own(
        None,
        "Adapters to load at the start, each as `NAME=FOLDER`. The folders are those of the library PEFT, with "
        "`adapter_config.json` and `adapter_model.safetensors`.",
        null="no adapters at the start",
    )
    batching: str = own(
        "mixed",
        "Adapters of a batch. `mixed`: requests with different adapters run in the same step. `split`: a request "
        "starts when no request with another adapter runs, in the order of the queue. This is for comparison; it needs "
        "`log_config.flight_recorder_mib: 0`.",
        choices=("mixed", "split"),
    )


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """Metrics and traces for other systems, see `docs/observability.md`."""

    vllm_metric_names: bool = own(
        False,
        "Repeat metrics in `/metrics` under the names of vLLM. vLLM's dashboards and the Gateway API Inference "
        "Extension then work without changes.",
    )
    traces_endpoint: str | None = own(
        None,
        "URL to which traces are sent with OTLP over HTTP, for example `http://localhost:4318/v1/traces`. Needs `pip "
        "install 'llm-serving[tracing]'`.",
        null="no traces",
    )
    trace_sample_ratio: float = own(
        1.0,
        "Fraction of the requests without a header `traceparent` that are traced. A request with the header is traced "
        "if its flag `sampled` is set.",
        low=0.0,
        high=1.0,
    )


@dataclass(frozen=True, slots=True)
class PowerConfig:
    """The server's use of energy, see `docs/power.md`."""

    mode: str = own(
        "normal",
        "`quiet`: one thread computes small steps, waiting threads sleep immediately, and a prompt waits for others up "
        "to `batch_wait_ms`. This saves energy and makes single requests slower. Texts stay the same.",
        choices=("normal", "quiet"),
    )
    batch_wait_ms: float = own(
        10.0,
        "Maximum time that a prompt waits for others in mode `quiet`, if `model_config.batch_waiting_time` is 0.",
        unit="milliseconds",
        low=0.0,
        high=10_000.0,
    )
    report_interval_s: float = own(
        60.0,
        "Time between two log events `energy`. An interval without output has none. 0: no event.",
        unit="seconds",
        low=0.0,
        high=MAX_SECONDS,
    )

    @property
    def is_quiet(self) -> bool:
        return self.mode == "quiet"


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Speculative decoding, see `docs/speculation.md`. It never changes a text."""

    method: str = own(
        "auto",
        "Where drafts (guesses of the next tokens) come from. `auto`: as `suffix`, but only while drafts are expected "
        "to make decoding faster. `suffix`: from earlier tokens of the same request, and from its grammar, always. "
        "`draft`: from a second model (`speculative_config.model`), while they are expected to make decoding faster. "
        "`eagle`: as `draft`, from an EAGLE-3 head (`speculative_config.model`). `mtp`: as `draft`, from the MTP layer "
        "of the model, which DeepSeek V3, Qwen3-Next and Qwen3.5 have. `off`: no drafts.",
        choices=("auto", "off", "suffix", "draft", "eagle", "mtp"),
    )
    model: str | None = own(
        None,
        "Draft model for `method: draft`: a Hugging Face folder or a GGUF file of a small model with the same "
        "tokenizer. For `method: eagle`, the folder of an EAGLE-3 head in a published format, see "
        "`docs/speculation.md`. A path is searched like `model_cfg_path`. A name such as `Qwen/Qwen3-0.6B` is that of "
        "a model on a hub, as for `--model`. The draft model computes in the agents, in the types and formats of "
        "`model_config`, and needs a KV cache of its own.",
        null="none",
    )
    always: bool = own(
        False,
        "`method: draft`, `eagle` or `mtp` makes and verifies drafts in every step, even if that makes decoding "
        "slower. For tests and measurements.",
    )
    max_draft_tokens: int = own(
        7,
        "Maximum number of drafts of a sequence in a decode step. A step of one sequence always has space for them, "
        "within `max_num_batched_tokens`.",
        unit="tokens",
        low=1,
        high=63,
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
    "lora_config": LoraConfig,
    "image_config": ImageConfig,
    "log_config": LogConfig,
    "telemetry_config": TelemetryConfig,
    "batch_config": BatchConfig,
    "models_config": ModelsConfig,
    "kv_tier_config": KvTierConfig,
    "kv_events_config": KvEventsConfig,
    "shadow_config": ShadowConfig,
    "power": PowerConfig,
    "speculative_config": SpeculativeConfig,
}
"""Maps the name of each YAML section to its dataclass, in the order of the documentation."""
