"""The section ``model_config``: what is served."""

from __future__ import annotations

from dataclasses import dataclass

from llm_serving.config.schema import own, published
from llm_serving.model.number_formats import GROUP_SIZES, GROUP_SIZES_TEXT, INTEGER_FORMATS, INTEGER_KV_FORMATS

MAX_TOKENS = 16 * 1024 * 1024
MAX_SEQS = 4096

_PUBLISHED_DTYPES = {
    "DataType.FLOAT16": "float16",
    "DataType.BFLOAT16": "bfloat16",
    "DataType.FLOAT32": "float32",
}


def normalise_dtype(name: str) -> str:
    """The plain name of a published data type (``DataType.FLOAT16`` is ``float16``); other names pass unchanged."""
    return _PUBLISHED_DTYPES.get(name, name)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model: where it comes from, how long its sequences may be, how it is computed."""

    model_name: str | None = published(
        None,
        "Name of the model in `/v1/models` and in the URL `/models/{name}/generate`; letters, digits, `.`, `_`, `-`.",
        null="the name of the model folder",
    )
    max_generate_length: int = published(
        4096, "Longest sequence, prompt and output together.", unit="tokens", low=1, high=MAX_TOKENS
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
        "Prompt lengths to prefill; the largest is the longest prompt taken.",
        unit="tokens",
        low=1,
        high=MAX_TOKENS,
    )
    vocab_size: int | None = published(
        None,
        "Number of tokens in the vocabulary. It must agree with the model's.",
        unit="tokens",
        low=1,
        high=4 * 1024 * 1024,
        null="the vocabulary size of the model",
    )
    prefill_batch_size: tuple[int, ...] = published(
        (1,), "Sequences a prefill step may hold; the largest counts.", unit="sequences", low=1, high=MAX_SEQS
    )
    decode_batch_size: tuple[int, ...] = published(
        (128,), "Sequences a decode step may hold; the largest counts.", unit="sequences", low=1, high=MAX_SEQS
    )
    zactivate_len: tuple[int, ...] = published(
        (4096,),
        "Cache lengths that static graphs were built for. Accepted; without effect, as lengths are dynamic.",
        unit="tokens",
        low=1,
        high=MAX_TOKENS,
    )
    model_type: str = published(
        "dyn",
        "Whose model, and the shapes of its graphs: `dyn` the classes of this project, `mindformers` the inference "
        "model of MindFormers 1.9 for the same architecture (Llama, Qwen2, Qwen3, Qwen3-MoE; see "
        "`docs/mindformers.md`), both dynamic.",
        choices=("dyn", "mindformers", "static"),
        unavailable=(("static", "static graphs are not available; use dyn"),),
    )
    seq_type: str = published(
        "static",
        "How the published server shaped prompts. Accepted; without effect, as prompts are never padded.",
        choices=("static", "dyn"),
    )
    batch_waiting_time: float = published(
        0.0,
        "Longest time a prefill step that is not full waits for more prompts; of `dynamic` batching, how long a batch "
        "that is not full waits.",
        unit="seconds",
        low=0.0,
        high=60.0,
    )
    decode_batch_waiting_time: float = published(
        0.0,
        "Longest time a decode step that is not full waits for sequences still being prefilled.",
        unit="seconds",
        low=0.0,
        high=60.0,
    )
    batching_strategy: str = published(
        "continuous",
        "How requests share steps: `continuous` they join and leave at any step; `dynamic` a batch leaves when it is "
        "full (`batch_size`) or late (`batch_waiting_time`), and the next waits until it has ended; `static` what "
        "waits when the device becomes free runs as one batch; `none` one request at a time.",
        choices=("none", "static", "dynamic", "continuous"),
    )
    batch_size: int | None = own(
        None,
        "Requests of a batch of `static` or `dynamic` batching.",
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
        "Give a request blocks of the KV cache as it needs them (paged attention); False reserves a range of blocks "
        "for the longest answer it may get, when it starts.",
    )
    model_dtype: str = published(
        "float16",
        "Type of weights, activations and KV cache; the published `DataType.FLOAT16` spelling is taken too.",
        choices=("float16", "bfloat16", "float32"),
        normalise=normalise_dtype,
    )
    pad_token_id: int | None = published(
        None,
        "Token id for padding. Nothing is padded; it is reported to clients that ask.",
        low=0,
        high=MAX_TOKENS,
        null="the padding token of the model folder, or none",
    )
    backend: str = published(
        "kbk",
        "How MindSpore runs the graph: `kbk` kernel by kernel, `ge` the graph engine (Ascend only).",
        choices=("kbk", "ge"),
    )
    model_cfg_path: str | None = published(
        None,
        "MindFormers YAML, read for its `context` section and, where there is no `model_path`, for the model's sizes. "
        "A relative path is looked up from the working directory, the folder of this config, the repository.",
        null="none",
    )
    model_path: str | None = own(
        None,
        "Hugging Face folder with `config.json`, weights and tokenizer; looked up like `model_cfg_path`.",
        null="none: sizes come from `model_cfg_path`, and `load_format` must be `dummy`",
    )
    load_format: str = own(
        "auto",
        "Where weights come from: `safetensors` files, `dummy` (seeded random numbers of the right shapes), or `auto`: "
        "safetensors.",
        choices=("auto", "safetensors", "dummy"),
    )
    seed: int = own(0, "Seed of the `dummy` weights.", low=0, high=2**32 - 1)
    op_table: str = own(
        "auto",
        "`native` runs MindSpore's inference primitives as an Ascend does (float16, bfloat16); `fused` swaps in fused "
        "CPU operators; `auto`: fused on a CPU, native on an Ascend.",
        choices=("auto", "native", "fused"),
    )
    weight_format: str = own(
        "auto",
        "How the weights of the linear layers are stored: `bf16` (with model_dtype bfloat16), "
        + ", ".join(f"`{each.name}` ({each.summary})" for each in INTEGER_FORMATS)
        + "; `auto`: as in the checkpoint, else in `model_dtype`; with `native` operators always in `model_dtype`.",
        choices=("auto", "bf16", *(each.name for each in INTEGER_FORMATS)),
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
        "How the KV cache is stored: `bf16` (with model_dtype bfloat16), `int8` (a scale for each token and head), "
        "`auto`: in `model_dtype`. `int8` with `fused` operators only.",
        choices=("auto", "bf16", *INTEGER_KV_FORMATS),
    )
    weight_layout: str = own(
        "nd",
        "How an Ascend keeps the integers of `weight_format: int8`: `nd` as they are loaded, `nz` in the blocks that "
        "its matrix unit reads, converted once at the start. Not tried on a device yet.",
        choices=("nd", "nz"),
    )
    capture_launches: bool = own(
        False,
        "Ascend: capture what a decode step launches, once for each size of `decode_batch_size`, and replay it; steps "
        "are padded to the next size. Not tried on a device yet.",
    )
    device_target: str | None = own(
        None,
        "Device the model runs on; `auto` picks Ascend where there is one, else CPU.",
        choices=("auto", "CPU", "Ascend"),
        null="`context.device_target` of `model_cfg_path`, else `auto`",
    )
    cpu_nice: int = own(
        5,
        "How far the agent of a CPU gives way to server and clients that run on the same cores (added to its `nice` "
        "value): tokens are then sent on at once, and the model computes in between. Linux that shares cores out by "
        "sessions first (`kernel.sched_autogroup_enabled`) counts it within the agent alone.",
        low=0,
        high=19,
    )
    cpu_cores: tuple[int, ...] | None = own(
        None,
        "Cores the agent of a CPU keeps to, by their numbers; of several agents each has its share.",
        low=0,
        high=4095,
        null="wherever the system puts it",
    )
    cpu_threads: int = own(
        0,
        "Threads of an agent's CPU operators; 0 uses every core, of several agents each its share.",
        unit="threads",
        low=0,
        high=1024,
    )
