"""The section ``model_config``: the served model."""

from __future__ import annotations

from dataclasses import dataclass

from llm_serving.config.schema import own, published, without_effect
from llm_serving.model.number_formats import AUTO, GROUP_SIZES, GROUP_SIZES_TEXT, INTEGER_FORMATS, INTEGER_KV_FORMATS

MAX_TOKENS = 16 * 1024 * 1024
"""Largest value of the settings that count tokens or are a token id."""
MAX_SEQS = 4096
"""Largest batch size that a setting accepts."""
DTYPES = (AUTO, "float16", "bfloat16", "float32")
"""Values of ``model_dtype``."""

_PUBLISHED_DTYPES = {
    "DataType.FLOAT16": "float16",
    "DataType.BFLOAT16": "bfloat16",
    "DataType.FLOAT32": "float32",
}


def normalise_dtype(name: str) -> str:
    """Returns this project's name of a data type in a published config: ``DataType.FLOAT16`` becomes ``float16``."""
    return _PUBLISHED_DTYPES.get(name, name)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model: its source, the length of its sequences, and its number formats."""

    model_name: str | None = published(
        None,
        "Name of the model in `/v1/models` and in the URL `/models/{name}/generate`; letters, digits, `.`, `_`, `-`.",
        null="the name of the model folder",
    )
    max_generate_length: int = published(
        4096,
        "Maximum length of a sequence, prompt and output together. `auto`: that of the model.",
        unit="tokens",
        low=1,
        high=MAX_TOKENS,
        auto=True,
    )
    end_token: int | None = published(
        None,
        "Token id that ends a sequence.",
        low=0,
        high=MAX_TOKENS,
        null="the end tokens of the model folder (`generation_config.json`, else `config.json`)",
    )
    seq_length: tuple[int, ...] = published(
        (4096,),
        "Prompt lengths to prefill; the largest is the maximum length of a prompt. `[auto]`: as long as a sequence; "
        "without `scheduler_config.max_num_batched_tokens`, a step then has at most 2048 tokens.",
        unit="tokens",
        low=1,
        high=MAX_TOKENS,
        auto=True,
    )
    vocab_size: int | None = published(
        None,
        "Number of tokens in the vocabulary. It must equal the model's.",
        unit="tokens",
        low=1,
        high=4 * 1024 * 1024,
        null="the vocabulary size of the model",
    )
    prefill_batch_size: tuple[int, ...] = published(
        (1,), "Sequences in a prefill step; the largest number is the maximum.", unit="sequences", low=1, high=MAX_SEQS
    )
    decode_batch_size: tuple[int, ...] = published(
        (128,), "Sequences in a decode step; the largest number is the maximum.", unit="sequences", low=1, high=MAX_SEQS
    )
    zactivate_len: tuple[int, ...] = published(
        (4096,),
        "Cache lengths of static graphs.",
        unit="tokens",
        low=1,
        high=MAX_TOKENS,
        no_effect="the lengths of the graphs are dynamic",
    )
    model_type: str = published(
        "dyn",
        "Classes of the model: `dyn` those of this project, `mindformers` those of MindFormers 1.9 for the "
        "same architecture. `docs/mindformers.md` lists the architectures.",
        choices=("dyn", "mindformers", "static"),
        unavailable=(("static", "static graphs are not available; use dyn"),),
    )
    seq_type: str = published(
        "static",
        "Shape of prompts in the published server.",
        choices=("static", "dyn"),
        no_effect="prompts are never padded",
    )
    fastserve: bool = without_effect(
        "Order requests as FastServe does.",
        "FastServe's queues are not available; scheduler_config.policy chooses the order",
        default=False,
    )
    batch_waiting_time: float = published(
        0.0,
        "Maximum time that a prefill step which is not full waits for more prompts. With `dynamic` batching, "
        "the maximum time that a batch waits.",
        unit="seconds",
        low=0.0,
        high=60.0,
    )
    decode_batch_waiting_time: float = published(
        0.0,
        "Maximum time that a decode step which is not full waits for sequences in prefill.",
        unit="seconds",
        low=0.0,
        high=60.0,
    )
    batching_strategy: str = published(
        "continuous",
        "Which requests may start. `continuous`: at any step. `dynamic`: a batch starts when it is full "
        "(`batch_size`) or late (`batch_waiting_time`), after the previous batch has ended. `static`: all "
        "waiting requests form a batch when the device is free. `none`: one request at a time.",
        choices=("none", "static", "dynamic", "continuous"),
    )
    batch_size: int | None = own(
        None,
        "Requests in a batch with `static` or `dynamic` batching.",
        unit="sequences",
        low=1,
        high=MAX_SEQS,
        null="the largest of `decode_batch_size`",
    )
    current_index: bool = published(
        False,
        "Pass a cursor instead of lengths to the graph.",
        unavailable=((True, "graphs with a cursor input are not available; use False"),),
    )
    page_attention: bool = published(
        True,
        "Allocate blocks of the KV cache when they are needed (paged attention). False reserves blocks for "
        "the longest possible sequence at the start of a request.",
    )
    model_dtype: str = published(
        "float16",
        "Type of weights, activations and KV cache. The published spelling `DataType.FLOAT16` is accepted too. `auto`: "
        "bfloat16 on an Ascend, with native operators, and on a processor that multiplies bfloat16 (AVX-512 BF16, AMX, "
        "Arm BF16); else float32.",
        choices=DTYPES,
        normalise=normalise_dtype,
    )
    pad_token_id: int | None = published(
        None,
        "Token id for padding. Nothing is padded; clients can read the id.",
        low=0,
        high=MAX_TOKENS,
        null="the padding token of the model folder, or none",
    )
    backend: str = published(
        "kbk",
        "How MindSpore runs the graph: `kbk` kernel by kernel, `ge` with the graph engine (Ascend only).",
        choices=("kbk", "ge"),
    )
    model_cfg_path: str | None = published(
        None,
        "MindFormers YAML. Its `context` section is read, and without `model_path` also the model's sizes. A "
        "relative path is searched in the working directory, the folder of this config, and the repository.",
        null="none",
    )
    model_path: str | None = own(
        None,
        "Hugging Face folder with `config.json`, weights and tokenizer, or a GGUF file, which has all three. It is "
        "searched like `model_cfg_path`. `package:NAME` means the folder of an installed Python package.",
        null="none; sizes come from `model_cfg_path`, and `load_format` must be `dummy`",
    )
    task: str = own(
        "auto",
        "What the server computes. `generate`: text. `embed`: embeddings (`/v1/embeddings`). `score`: how well a text "
        "answers a query, with a model that answers yes or no (`/v1/rerank`, `/v1/score`). `classify`: classes of a "
        "text, with a model `*ForSequenceClassification` (`/classify`); with one class, also scores. `auto`: "
        "`classify` for this architecture, `embed` or `score` if the model folder has the files of "
        "sentence-transformers, else `generate`.",
        choices=("auto", "generate", "embed", "score", "classify"),
    )
    matryoshka_dimensions: tuple[int, ...] | None = own(
        None,
        "Numbers of dimensions to which a client may shorten embeddings (`dimensions`). `[0]`: any number.",
        low=0,
        high=65536,
        null="those that `config.json` declares, or none",
    )
    score_token_ids: tuple[int, ...] | None = own(
        None,
        "Token ids of no and yes, in this order, for `task: score`.",
        low=0,
        high=MAX_TOKENS,
        null="the tokens `no` and `yes` of the tokenizer",
    )
    pair_prompt: str = own(
        "auto",
        "How a classifier with one class reads a query and a document (`/v1/rerank`, `/v1/score`). `qwen3`: in the "
        "prompt of Qwen3-Reranker. `none`: one after the other, as a CrossEncoder of sentence-transformers does. "
        "`auto`: `qwen3` for `Qwen3ForSequenceClassification`, else `none`.",
        choices=("auto", "qwen3", "none"),
    )
    logits_processors: tuple[str, ...] | None = own(
        None,
        "Python classes `module:Class` that change the logits of each token before it is sampled, see "
        "`docs/logits_processors.md`. They run in the agents. Every step takes longer, also without changes.",
        null="none",
    )
    load_format: str = own(
        "auto",
        "Source of the weights: `safetensors` files, `dummy` (seeded random numbers of the right shapes), or "
        "`auto` (safetensors).",
        choices=("auto", "safetensors", "dummy"),
    )
    seed: int = own(0, "Seed of the `dummy` weights.", low=0, high=2**32 - 1)
    op_table: str = own(
        "auto",
        "Operators of the graph. `native`: MindSpore's inference primitives, as on an Ascend (float16, "
        "bfloat16). `fused`: fused CPU operators. `auto`: fused on a CPU, native on an Ascend.",
        choices=("auto", "native", "fused"),
    )
    weight_format: str = own(
        "auto",
        "Format of the linear layers' weights. `bf16`, `float16` and `float32`: floats, also of integers in the "
        "checkpoint (with that `model_dtype`). "
        + " ".join(f"`{each.name}`: {each.summary}." for each in INTEGER_FORMATS)
        + " `auto`: as in the checkpoint, else `model_dtype`. With `native` operators, `auto` means `model_dtype`.",
        choices=("auto", "bf16", "float16", "float32", *(each.name for each in INTEGER_FORMATS)),
    )
    weight_group: int = own(
        64,
        f"Inputs that share a scale, for formats with groups: {GROUP_SIZES_TEXT}. It must divide the input size of "
        "every linear layer.",
        unit="weights",
        low=GROUP_SIZES[0],
        high=GROUP_SIZES[-1],
    )
    kv_format: str = own(
        "auto",
        "Format of the KV cache. `bf16`: bfloat16 (with that `model_dtype`). `int8`: a scale for each token "
        "and head; `native` operators multiply the blocks of a step out before attention. `auto`: `model_dtype`.",
        choices=("auto", "bf16", *INTEGER_KV_FORMATS),
    )
    weight_cache_gib: int = own(
        64,
        "Maximum size of the folder of converted weights and stored programs. The second start of a model maps its "
        "weights from there, and on a CPU it compiles no graph. 0 turns the folder off.",
        unit="GiB",
        low=0,
        high=1024 * 1024,
    )
    weight_cache_path: str | None = own(
        None,
        "Folder of converted weights and stored programs. It is created; only this user may write to it.",
        null="`llm-serving/weights` in `$XDG_CACHE_HOME`, or in `~/.cache`",
    )
    weight_layout: str = own(
        "nd",
        "Layout of the integers of `weight_format: int8` on an Ascend. `nd`: as loaded. `nz`: in the blocks "
        "that the matrix unit reads, converted at the start. Not tried on a device yet.",
        choices=("nd", "nz"),
    )
    capture_launches: bool = own(
        False,
        "Ascend: capture the launches of a decode step once for each size of `decode_batch_size`, and replay "
        "them. Steps are padded to the next size. Not tried on a device yet.",
    )
    device_target: str | None = own(
        None,
        "Device of the model. `auto` chooses an Ascend if there is one, else the CPU.",
        choices=("auto", "CPU", "Ascend"),
        null="`context.device_target` of `model_cfg_path`, or `auto`",
    )
    cpu_nice: int = own(
        5,
        "Value added to the `nice` value of a CPU agent, so that the server can send tokens while the model "
        "computes. If Linux divides cores by sessions (`kernel.sched_autogroup_enabled`), it has no effect "
        "between processes of different sessions.",
        low=0,
        high=19,
    )
    cpu_cores: tuple[int, ...] | None = own(
        None,
        "Core numbers that agents may use. Several agents divide them.",
        low=0,
        high=4095,
        null="any core on a CPU; on an Ascend, the agent's part of the NUMA node of its device",
    )
    cpu_threads: int = own(
        0,
        "Threads of an agent's CPU operators. 0: one for each core; several agents divide the cores.",
        unit="threads",
        low=0,
        high=1024,
    )
