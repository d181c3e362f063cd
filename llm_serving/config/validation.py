"""Refuses configuration values that cannot work together. Each check raises ConfigError with key, value and reason."""

from __future__ import annotations

import os
import re
from typing import NoReturn

from llm_serving.config.config import Config
from llm_serving.config.draft_config import draft_config
from llm_serving.config.model_section import ModelConfig
from llm_serving.config.sections import PagedAttentionConfig
from llm_serving.config.source import RawConfig
from llm_serving.lora.targets import ADAPTED_FAMILIES
from llm_serving.model.number_formats import weight_format
from llm_serving.model.parallel import find_obstacle

MAX_CACHE_SLOTS = 2**31 - 1
"""Maximum of KV blocks times block size, because kernels store the position of a token as an int32."""
_PROCESSOR_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_model_name(raw: RawConfig, name: str | None) -> None:
    """Checks that the model's name can be part of a URL."""
    if name is not None and not _MODEL_NAME.fullmatch(name):
        problem = "must begin with a letter or digit and hold only letters, digits, '.', '_', '-' (128 at most)"
        raise raw.error("model_config.model_name", name, problem)


def check_cache(raw: RawConfig, cache: PagedAttentionConfig) -> None:
    """Checks that the KV cache has less than 2^31 token positions, because kernels count them in 32 bits."""
    if cache.num_blocks * cache.block_size > MAX_CACHE_SLOTS:
        problem = f"num_blocks x block_size = {cache.num_blocks * cache.block_size}; at most {MAX_CACHE_SLOTS}"
        raise raw.error("pa_config.num_blocks", cache.num_blocks, problem)


def check_device(raw: RawConfig, device: str, op_table: str, dtype: str, backend: str) -> None:
    """Checks that the device has the op table, and that the operators support the data type and the backend."""
    if backend == "ge" and device == "CPU":
        raise raw.error("model_config.backend", backend, "the graph engine runs on an Ascend only; on a CPU use kbk")
    if op_table == "fused" and device == "Ascend":
        raise raw.error(
            "model_config.op_table", op_table, "the fused operators are CPU kernels; on an Ascend use native"
        )
    if op_table == "native" and dtype == "float32":
        problem = (
            "the primitives ApplyRotaryPosEmb, ReshapeAndCache and PagedAttention take float16 and bfloat16 only; "
            "use op_table fused (CPU), or model_dtype float16 or bfloat16"
        )
        raise raw.error("model_config.op_table", op_table, f"cannot be used with model_dtype float32: {problem}")


def check_formats(raw: RawConfig, model: ModelConfig) -> None:
    """Checks that the operators and the data type support the formats of weights and KV cache."""
    for key, value in (("weight_format", model.weight_format), ("kv_format", model.kv_format)):
        dtype = {"bf16": "bfloat16", "float16": "float16", "float32": "float32"}.get(value, model.model_dtype)
        if dtype != model.model_dtype:
            problem = f"needs model_dtype {dtype}, which is {model.model_dtype}; set it, or use auto"
            raise raw.error(f"model_config.{key}", value, problem)
    if model.kv_format == "int8" and model.model_type == "mindformers":
        problem = "MindFormers' models write keys and values of floats; use auto"
        raise raw.error("model_config.kv_format", model.kv_format, problem)


def check_cores(raw: RawConfig, cores: tuple[int, ...] | None) -> None:
    """Checks that this process may run on the cores of ``model_config.cpu_cores``."""
    usable = os.sched_getaffinity(0)
    missing = [core for core in cores or () if core not in usable]
    if missing:
        problem = f"there is no core {missing[0]} for this process; it may use {sorted(usable)}"
        raise raw.error("model_config.cpu_cores", list(cores or ()), problem)


def check_model_parts(raw: RawConfig, config: Config) -> None:
    """Checks that the operators support the model's kind of attention, of norms, of experts and of routing."""
    shape = config.shape
    if shape.latent is not None and config.kv_format == "int8":
        problem = "latent attention needs a cache of floats; use auto"
        raise raw.error("model_config.kv_format", config.model_config.kv_format, problem)
    if config.op_table != "native":
        return
    if shape.sinks and config.kv_format == "int8":
        problem = "attention with sinks needs a cache of floats with native operators; use auto"
        raise raw.error("model_config.kv_format", config.model_config.kv_format, problem)
    if shape.delta is not None:
        refuse_native(raw, config, "Gated DeltaNet and no states of sequences")


def refuse_native(raw: RawConfig, config: Config, missing: str) -> NoReturn:
    """Raises ConfigError for a model with a part that has no native operator. ``missing`` names this part.

    The error suggests fused operators, or a CPU if the device is an Ascend, which has only native operators.
    """
    architecture = config.shape.architecture
    if config.device == "Ascend":
        problem = f"the Ascend has no {missing} for {architecture}; use CPU, with op_table auto"
        raise raw.error("model_config.device_target", config.model_config.device_target, problem)
    problem = f"the native operators have no {missing} for {architecture}; use op_table fused (CPU)"
    raise raw.error("model_config.op_table", config.op_table, problem)


def check_parallel(raw: RawConfig, config: Config) -> None:
    """Checks that the agents can share the model as ``parallel_config`` states."""
    obstacle = find_obstacle(config.shape, config.parallel_config, config.shard_group)
    if obstacle is not None:
        key, problem = obstacle
        raise raw.error(f"parallel_config.{key}", getattr(config.parallel_config, key), problem)


def check_pooling(raw: RawConfig, config: Config) -> None:
    """Checks that embeddings or scores are possible with the other settings."""
    pooling, model = config.pooling, config.model_config
    if pooling is None:
        return
    key, task = "model_config.task", model.task
    if model.model_type == "mindformers":
        raise raw.error(key, task, "the classes of MindFormers return no hidden states; use model_type dyn")
    if config.device != "CPU":
        raise raw.error(key, task, f"embeddings and scores need a CPU, and the device is {config.device}; use CPU")
    if any(layer for layer in pooling.dense) and model.load_format == "dummy":
        raise raw.error("model_config.load_format", "dummy", "Dense layers have no random weights; use safetensors")
    if model.score_token_ids is not None and len(model.score_token_ids) != 2:
        problem = "must be two token ids: that of no, and that of yes"
        raise raw.error("model_config.score_token_ids", list(model.score_token_ids), problem)
    wrong = [token for token in pooling.score_tokens if token >= config.shape.vocab_size]
    if wrong:
        problem = f"token {wrong[0]} is outside the vocabulary of {config.shape.vocab_size} tokens"
        raise raw.error("model_config.score_token_ids", list(pooling.score_tokens), problem)


def check_processors(raw: RawConfig, config: Config) -> None:
    """Checks the names of the operator's logits processors, and that the other settings permit processors."""
    names, key = config.model_config.logits_processors, "model_config.logits_processors"
    if not names:
        return
    wrong = next((name for name in names if not _PROCESSOR_NAME.fullmatch(name)), None)
    if wrong is not None:
        raise raw.error(key, wrong, "must have the form module:Class")
    if config.pooling is not None:
        raise raw.error(key, list(names), "a server of embeddings, scores or classes samples no tokens; use null")
    if not config.serving_config.structured_outputs:
        problem = "the agents change logits in steps with token masks; use serving_config.structured_outputs: true"
        raise raw.error(key, list(names), problem)


def check_lora(raw: RawConfig, config: Config) -> None:
    """Checks that LoRA adapters are possible with the other settings."""
    lora, parallel, key = config.lora_config, config.parallel_config, "lora_config.max_adapters"
    adapters = lora.adapters or ()
    if len(adapters) > lora.max_adapters:
        raise raw.error("lora_config.adapters", list(adapters), f"are more than {key} = {lora.max_adapters}")
    if lora.max_adapters == 0:
        return
    if lora.batching == "split" and config.log_config.flight_recorder_mib:
        needs = "a flight recording has no adapters, so it cannot be replayed; set log_config.flight_recorder_mib: 0"
        raise raw.error("lora_config.batching", lora.batching, needs)
    problem = None
    if config.model_config.model_type == "mindformers":
        problem = "the classes of MindFormers add no adapters; use model_type dyn"
    elif config.shape.architecture not in ADAPTED_FAMILIES:
        problem = f"the family {config.shape.architecture} has no adapters yet; merge the adapter into the model"
    elif parallel.sum_parts > 1:
        problem = f"sum_parts is {parallel.sum_parts}, and the sums of parts have no adapters; use sum_parts 1"
    elif config.pooling is not None:
        problem = "the server computes embeddings or scores, which have no adapters; use task generate"
    if problem is not None:
        raise raw.error(key, lora.max_adapters, problem)
    for number, entry in enumerate(adapters):
        name, equals, folder = entry.partition("=")
        if not equals or not name.strip() or not folder.strip():
            raise raw.error(f"lora_config.adapters[{number}]", entry, "must be NAME=FOLDER, as sql=/adapters/sql")


def check_shadow(raw: RawConfig, config: Config) -> None:
    """Checks that the candidate of shadow serving is another model of the server, and that answers can be scored."""
    name = config.shadow_config.model
    if name is None:
        return
    problem = ""
    if name not in {model.name for model in config.models_config.models or ()}:
        problem = "is not in models_config.models; add it there"
    elif not config.serving_config.structured_outputs:
        problem = "scores tokens with masks; set serving_config.structured_outputs: true"
    elif config.pooling is not None:
        problem = "the server computes embeddings or scores, which have no tokens to compare; leave it out"
    if problem:
        raise raw.error("shadow_config.model", name, problem)


def check_kv_tiers(raw: RawConfig, config: Config) -> None:
    """Checks that KV tiers are possible with the other settings."""
    tiers = config.kv_tier_config
    if not tiers.host_blocks:
        for name, folder in (("ssd_folder", tiers.ssd_folder), ("shared_folder", tiers.shared_folder)):
            if folder is not None:
                problem = "needs host memory on the way to the disk; set kv_tier_config.host_blocks above 0"
                raise raw.error(f"kv_tier_config.{name}", folder, problem)
        return
    problem = ""
    if config.shape.delta is not None:
        problem = f"keeps blocks, and the states of {config.shape.architecture} are in no blocks; use 0"
    elif not config.uses_prefix_cache:
        problem = "keeps blocks that the prefix cache finds; set scheduler_config.prefix_cache: True"
    elif config.pooling is not None:
        problem = "the server computes embeddings or scores, which have no KV tiers; use 0"
    elif config.op_table == "native" and config.kv_format == "int8":
        problem = "native operators keep the scales of an int8 KV cache in blocks of another size; use kv_format auto"
    if problem:
        raise raw.error("kv_tier_config.host_blocks", tiers.host_blocks, problem)


def check_sum_parts(raw: RawConfig, config: Config) -> None:
    """Checks that the model and its operators support ``parallel_config.sum_parts``."""
    parallel = config.parallel_config
    if parallel.sum_parts == 1:
        return
    problem = None
    if parallel.tensor_parallel > 1:
        problem = f"tensor_parallel is {parallel.tensor_parallel}: its agents are the parts; use 1"
    elif config.op_table != "fused":
        problem = (
            f"op_table is {config.op_table}, whose sums are rounded for each agent; use op_table fused (CPU), or 1"
        )
    elif config.shape.experts is not None:
        problem = "the model has experts, whose sums have no parts; use 1"
    elif config.shape.latent is not None:
        problem = "the model has latent attention, whose sums have no parts; use 1"
    elif config.shape.delta is not None:
        problem = "the model has linear attention, whose sums have no parts; use 1"
    elif config.stored_weight_format is not None and not weight_format(config.weight_format).is_float:
        problem = f"the folder's weights are stored as {config.stored_weight_format}; use weight_format bf16, or 1"
    else:
        obstacle = find_obstacle(config.shape, parallel.as_summed, config.shard_group)
        problem = None if obstacle is None else obstacle[1]
    if problem is not None:
        raise raw.error("parallel_config.sum_parts", parallel.sum_parts, problem)


def check_ascend_options(raw: RawConfig, config: Config) -> None:
    """Checks ``weight_layout`` and ``capture_launches``, which only an Ascend supports (``docs/ascend.md``)."""
    model = config.model_config
    if model.weight_layout == "nz":
        _check_ascend_only(raw, config, "weight_layout", "nz", "nd")
        if not config.quantises_activations:
            problem = f"needs weight_format int8, and it is {config.weight_format}; use nd"
            raise raw.error("model_config.weight_layout", "nz", problem)
    if not model.capture_launches:
        return
    _check_ascend_only(raw, config, "capture_launches", True, "False")
    obstacles = {
        "model_config.backend ge, which runs the whole graph by itself": model.backend != "kbk",
        "model_type mindformers": model.model_type == "mindformers",
        "model_config.kv_format int8, whose steps gather a varying number of blocks": config.kv_format == "int8",
        "attention sinks, as their attention reads the lengths of sequences on the host": config.shape.sinks,
        "parallel_config.pipeline_parallel above 1, as sends and receives have not been captured yet": (
            config.parallel_config.pipeline_parallel > 1
        ),
    }
    for obstacle, is_there in obstacles.items():
        if is_there:
            raise raw.error("model_config.capture_launches", True, f"cannot be used with {obstacle}; use False")


def _check_ascend_only(raw: RawConfig, config: Config, key: str, value: object, instead: str) -> None:
    if config.device != "Ascend":
        problem = f"is for an Ascend, and the device is {config.device}; use {instead}"
        raise raw.error(f"model_config.{key}", value, problem)


def check_speculation(raw: RawConfig, config: Config) -> None:
    """Checks that the method of speculative decoding works with the other settings."""
    method, key = config.speculative_config.method, "speculative_config.method"
    if method in ("draft", "eagle", "mtp"):
        _check_draft_model(raw, config)
    if method == "suffix" and config.parallel_config.pipeline_parallel > 1:
        raise raw.error(key, method, "needs parallel_config.pipeline_parallel: 1; set auto or off")


def _check_draft_model(raw: RawConfig, config: Config) -> None:
    """Checks that a draft model or a head works with the other settings."""
    method, parallel = config.speculative_config.method, config.parallel_config
    obstacles = {
        "a model_config.model_type mindformers": config.model_config.model_type == "mindformers",
        "an Ascend, as it has not been run there": config.device == "Ascend",
        "stages of a pipeline (parallel_config.pipeline_parallel)": parallel.pipeline_parallel > 1,
        "embeddings, scores or classes (model_config.task)": config.pooling is not None,
        "model_config.page_attention: False": not config.model_config.page_attention,
        "native operators and model_config.kv_format: int8": method != "draft" and config.gathers_blocks,
    }
    for obstacle, is_there in obstacles.items():
        if is_there:
            raise raw.error("speculative_config.method", method, f"cannot be used with {obstacle}; set auto or off")


def note_lengths(raw: RawConfig, config: Config) -> tuple[str, ...]:
    """Returns notes for the log about lengths on the command line that a smaller limit makes ineffective."""
    model, longest = config.model_config, config.max_model_len
    limits = {
        "pa_config.decode_seq_length": config.pa_config.decode_seq_length,
        "model_config.max_generate_length": model.max_generate_length,
        "the model's number of positions": config.shape.max_positions,
    }
    smallest = min(limits, key=lambda name: limits[name])
    problem = f"a sequence has at most {longest} tokens, because {smallest} is {longest}"
    lengths: dict[str, tuple[object, int]] = {
        "model_config.seq_length": (list(model.seq_length), max(model.seq_length)),
        "model_config.max_generate_length": (model.max_generate_length, model.max_generate_length),
        "pa_config.decode_seq_length": (config.pa_config.decode_seq_length, config.pa_config.decode_seq_length),
    }
    return tuple(
        str(raw.error(key, value, problem))
        for key, (value, length) in lengths.items()
        if length > longest and raw.is_overridden(key) and not _is_auto(raw, key)
    )


def note_step_tokens(raw: RawConfig, config: Config) -> tuple[str, ...]:
    """Returns a note for the log if the command line allows more tokens in a step than its sequences can have."""
    key, value = "scheduler_config.max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens
    most = config.max_num_batched_tokens
    if value is None or value <= most or not raw.is_overridden(key):
        return ()
    sequences, limit = config.max_prefill_seqs, "model_config.prefill_batch_size"
    if config.max_num_seqs < max(config.model_config.prefill_batch_size):
        is_set = config.scheduler_config.max_num_seqs is not None
        limit = "scheduler_config.max_num_seqs" if is_set else "model_config.decode_batch_size"
    plural = "" if sequences == 1 else "s"
    reason = f"a prefill step has at most {sequences} sequence{plural} ({limit}) of {config.max_model_len} tokens"
    if most > sequences * config.max_model_len:
        reason = f"{reason}, and a decode step has at most {most}"
    return (str(raw.error(key, value, f"a step has at most {most} tokens, because {reason}")),)


def _is_auto(raw: RawConfig, key: str) -> bool:
    """Returns whether a key has the value ``auto`` or ``[auto]``."""
    section, _, name = key.partition(".")
    return raw.sections[section][name] in ("auto", ["auto"])


def note_drafts(raw: RawConfig, config: Config) -> tuple[str, ...]:
    """Returns notes for the log about settings that allow fewer drafts than ``speculative_config`` states."""
    return (*_note_small_steps(raw, config), *_note_short_contexts(raw, config))


def _note_small_steps(raw: RawConfig, config: Config) -> tuple[str, ...]:
    """Returns a note if a step has too few tokens for all drafts of one sequence."""
    if config.max_drafts == config.wanted_drafts:
        return ()
    key, value = "scheduler_config.max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens
    if value is None:
        key, value = "model_config.seq_length", max(config.model_config.seq_length)
    problem = (
        f"a step has space for {config.max_drafts or 'none'} of the {config.wanted_drafts} drafts of a sequence "
        "(speculative_config.max_draft_tokens); "
        f"all of them need a step of at least {1 + config.wanted_drafts} tokens"
    )
    return (str(raw.error(key, value, problem)),)


def _note_short_contexts(raw: RawConfig, config: Config) -> tuple[str, ...]:
    """Returns a note if the draft model has shorter contexts than the server."""
    if config.draft is None or config.draft.head is not None:
        return ()
    longest = draft_config(config).max_model_len
    if longest >= config.max_model_len:
        return ()
    problem = f"has contexts of {longest} tokens; longer sequences get no drafts of the draft model"
    return (str(raw.error("speculative_config.model", config.draft.path, problem)),)


def check_sharing(raw: RawConfig, config: Config) -> None:
    """Checks that the prefix cache is only used with paged attention."""
    if config.scheduler_config.prefix_cache and not config.model_config.page_attention:
        problem = "shares blocks between requests, which needs model_config.page_attention: True"
        raise raw.error("scheduler_config.prefix_cache", True, problem)


def check_batches(raw: RawConfig, config: Config) -> None:
    """Checks ``chunk_tokens`` and ``batch_size`` against the limits of a step.

    ``chunk_tokens`` must not exceed the maximum number of tokens in a step. ``batch_size`` must not exceed the maximum
    number of running sequences.
    """
    chunk_tokens, most_tokens = config.scheduler_config.chunk_tokens, config.max_num_batched_tokens
    if chunk_tokens is not None and chunk_tokens > most_tokens:
        problem = f"must be at most {most_tokens}, the tokens of a step (scheduler_config.max_num_batched_tokens)"
        raise raw.error("scheduler_config.chunk_tokens", chunk_tokens, problem)
    batch_size = config.model_config.batch_size
    if batch_size is not None and batch_size > config.max_num_seqs:
        problem = f"must be at most {config.max_num_seqs}, the sequences that run at a time (max_num_seqs)"
        raise raw.error("model_config.batch_size", batch_size, problem)


def check_lengths(raw: RawConfig, config: Config) -> None:
    """Raises ConfigError if the KV cache cannot hold the longest sequence, or if the token limit of a step is too low.

    A decode step needs a token for each running sequence.

    The cache never needs space for the last token of a sequence, because no later token reads its keys and values.
    """
    cache, longest = config.pa_config, config.max_model_len
    usable = (cache.num_blocks - 1) * cache.block_size
    if usable < longest - 1:
        problem = (
            f"{cache.num_blocks} blocks of {cache.block_size} tokens, less the padding block, hold {usable} tokens: "
            f"not one sequence of {longest}; use at least {-(-(longest - 1) // cache.block_size) + 1} blocks, "
            f"or a pa_config.decode_seq_length of {usable + 1} at most"
        )
        raise raw.error("pa_config.num_blocks", cache.num_blocks, problem)
    limit = config.scheduler_config.max_num_batched_tokens
    if limit is not None and limit < config.max_decode_seqs:
        problem = f"must be at least {config.max_decode_seqs}, a token for each sequence of a decode step"
        raise raw.error("scheduler_config.max_num_batched_tokens", limit, problem)
