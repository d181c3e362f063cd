"""Refuses configuration values that cannot work together. Each check raises ConfigError with key, value and reason."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from llm_serving.access.key_store import ENVIRONMENT_VARIABLE
from llm_serving.config.config import Config
from llm_serving.config.model_section import ModelConfig
from llm_serving.config.parallel_section import MAX_RANKS, ParallelConfig
from llm_serving.config.sections import PagedAttentionConfig, ServingConfig, TelemetryConfig
from llm_serving.config.source import RawConfig
from llm_serving.lora.targets import ADAPTED_FAMILIES
from llm_serving.model.number_formats import (
    AUTO,
    GROUP_SIZES,
    GROUP_SIZES_TEXT,
    formats_of_stored,
    weight_format,
)
from llm_serving.model.parallel import find_obstacle, local_shape
from llm_serving.model.quantization import MAX_WEIGHT_ONLY_SIZE
from llm_serving.model.shape import ModelShape

MAX_CACHE_SLOTS = 2**31 - 1
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+", re.IGNORECASE)
_PROCESSOR_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_telemetry(raw: RawConfig, telemetry: TelemetryConfig) -> None:
    """Check the URL of the collector of traces."""
    endpoint = telemetry.traces_endpoint
    if endpoint is not None and not re.fullmatch(r"https?://[^/\s@]+/\S*", endpoint):
        problem = "must be a URL with a path and without a password, as http://localhost:4318/v1/traces"
        raise raw.error("telemetry_config.traces_endpoint", endpoint, problem)


def check_serving(raw: RawConfig, serving: ServingConfig, parallel: ParallelConfig) -> None:
    """Check ports and addresses."""
    if parallel.world_size > MAX_RANKS:
        problem = f"{_product(parallel)} makes {parallel.world_size} agents; at most {MAX_RANKS}"
        raise raw.error("parallel_config.data_parallel", parallel.data_parallel, problem)
    ports = [port for port in serving.agent_ports if port != 0]
    key, value = "serving_config.agent_ports", list(serving.agent_ports)
    if len(set(ports)) != len(ports):
        raise raw.error(key, value, "a port appears twice")
    if len(value) != parallel.world_size and value != [0] and not parallel.is_remote:
        raise raw.error(key, value, _ports_problem(len(value), parallel))
    for name in ("server_port", "admin_port"):
        if getattr(serving, name) in ports:
            raise raw.error(f"serving_config.{name}", getattr(serving, name), "is the port of an agent too")
    if serving.admin_port and serving.admin_port == serving.server_port:
        raise raw.error("serving_config.admin_port", serving.admin_port, "is server_port, too; choose another port")
    if not _is_loopback(raw, "serving_config.agent_ip", serving.agent_ip):
        raise raw.error("serving_config.agent_ip", serving.agent_ip, "agents listen on a loopback address only")
    for name in ("server_ip", "admin_ip"):
        address, key = getattr(serving, name), f"serving_config.{name}"
        if not _is_loopback(raw, key, address) and not serving.allow_remote:
            raise raw.error(key, address, "other machines could connect; set serving_config.allow_remote: true")
    _check_protection(raw, serving)
    for origin in serving.cors_origins or ():
        if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
            problem = "must be an origin without a path, as https://chat.example or http://localhost:3000, or *"
            raise raw.error("serving_config.cors_origins", origin, problem)
    for network in serving.trusted_proxies or ():
        if not _is_network(network):
            problem = "must be an IP address or a network, as in 10.1.0.0/16"
            raise raw.error("serving_config.trusted_proxies", network, problem)


def _check_protection(raw: RawConfig, serving: ServingConfig) -> None:
    """Check that the TLS files are complete, and that a server that other machines can reach is protected."""
    if (serving.tls_cert is None) != (serving.tls_key is None):
        missing = "tls_key" if serving.tls_key is None else "tls_cert"
        raise raw.error(f"serving_config.{missing}", None, "is missing; TLS needs both tls_cert and tls_key")
    if serving.tls_client_ca is not None and serving.tls_cert is None:
        raise raw.error("serving_config.tls_client_ca", serving.tls_client_ca, "needs tls_cert and tls_key")
    if not serving.allow_remote or serving.allow_remote_unprotected:
        return
    has_keys = serving.api_keys_file is not None or bool(os.environ.get(ENVIRONMENT_VARIABLE, "").strip(" ;\n"))
    missing_parts = [] if has_keys or serving.tls_client_ca is not None else ["API keys (serving_config.api_keys_file)"]
    missing_parts += [] if serving.tls_cert is not None else ["TLS (serving_config.tls_cert and tls_key)"]
    if missing_parts:
        problem = (
            f"the server would have no {' and no '.join(missing_parts)}; set them, or "
            "serving_config.allow_remote_unprotected: true if a proxy or a firewall protects the server"
        )
        raise raw.error("serving_config.allow_remote", True, problem)


def agents_of_graphs(raw: RawConfig, sections: Mapping[str, Any]) -> int | None:
    """Return the number of agents that a published config implies, or None if it implies none.

    The published server has one agent for each prefill graph of ``model_path``. The result is None if there is at most
    one graph, or if the config has its own ``parallel_config``. Raises ConfigError if the numbers of prefill graphs,
    decode graphs and agents' ports differ.
    """
    graphs, decode, ports = (
        sections["model_path"].prefill_model or (),
        sections["model_path"].decode_model or (),
        sections["serving_config"].agent_ports,
    )
    key = "model_path.prefill_model"
    if graphs and decode and len(graphs) != len(decode):
        raise raw.error(key, list(graphs), f"has {len(graphs)} graphs, and decode_model has {len(decode)}")
    if raw.sections.get("parallel_config") or len(graphs) <= 1:
        return None
    if ports != (0,) and len(ports) != len(graphs):
        problem = f"has {len(graphs)} graphs, and serving_config.agent_ports has {len(ports)} ports; they must agree"
        raise raw.error(key, list(graphs), problem)
    return len(graphs)


def _ports_problem(num_ports: int, parallel: ParallelConfig) -> str:
    agents = "is 1 agent" if parallel.world_size == 1 else f"are {parallel.world_size} agents ({_product(parallel)})"
    return f"there {agents} and {num_ports} ports; give each agent one, or [0] for any free ones"


def _product(parallel: ParallelConfig) -> str:
    return (
        f"tensor_parallel {parallel.tensor_parallel} x pipeline_parallel {parallel.pipeline_parallel} x "
        f"data_parallel {parallel.data_parallel}"
    )


def _is_loopback(raw: RawConfig, key: str, address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        raise raw.error(key, address, "must be an IP address or localhost") from None


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def check_model_name(raw: RawConfig, name: str | None) -> None:
    """Check that the model's name can be part of a URL."""
    if name is not None and not _MODEL_NAME.fullmatch(name):
        problem = "must begin with a letter or digit and hold only letters, digits, '.', '_', '-' (128 at most)"
        raise raw.error("model_config.model_name", name, problem)


def check_cache(raw: RawConfig, cache: PagedAttentionConfig) -> None:
    """Check that the KV cache has less than 2^31 token positions, because kernels count them in 32 bits."""
    if cache.num_blocks * cache.block_size > MAX_CACHE_SLOTS:
        problem = f"num_blocks x block_size = {cache.num_blocks * cache.block_size}; at most {MAX_CACHE_SLOTS}"
        raise raw.error("pa_config.num_blocks", cache.num_blocks, problem)


def check_device(raw: RawConfig, device: str, op_table: str, dtype: str, backend: str) -> None:
    """Check that the device has the op table, and that the operators support the data type and the backend."""
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
        raise raw.error("model_config.op_table", op_table, f"not with model_dtype float32: {problem}")


def check_formats(raw: RawConfig, model: ModelConfig) -> None:
    """Check that the operators and the data type support the formats of weights and KV cache."""
    for key, value in (("weight_format", model.weight_format), ("kv_format", model.kv_format)):
        dtype = {"bf16": "bfloat16", "float16": "float16", "float32": "float32"}.get(value, model.model_dtype)
        if dtype != model.model_dtype:
            problem = f"needs model_dtype {dtype}, which is {model.model_dtype}; set it, or use auto"
            raise raw.error(f"model_config.{key}", value, problem)
    if model.kv_format == "int8" and model.model_type == "mindformers":
        problem = "MindFormers' models write keys and values of floats; use auto"
        raise raw.error("model_config.kv_format", model.kv_format, problem)


def check_stored_format(raw: RawConfig, config: Config) -> None:
    """Check that ``weight_format`` suits a quantized checkpoint.

    The format must keep the checkpoint's integers or convert them to floats. Integers are never rounded to another
    integer format.
    """
    wanted, stored = config.model_config.weight_format, config.stored_weight_format
    if stored is None or wanted == AUTO or weight_format(wanted).is_float:
        return
    kept = formats_of_stored(stored)
    if wanted not in kept:
        problem = f"the model folder holds {stored} weights; use auto, {' or '.join(kept)}, or bf16"
        raise raw.error("model_config.weight_format", wanted, problem)


def check_cores(raw: RawConfig, cores: tuple[int, ...] | None) -> None:
    """Check that this process may run on the cores of ``model_config.cpu_cores``."""
    usable = os.sched_getaffinity(0)
    missing = [core for core in cores or () if core not in usable]
    if missing:
        problem = f"there is no core {missing[0]} for this process; it may use {sorted(usable)}"
        raise raw.error("model_config.cpu_cores", list(cores or ()), problem)


def check_group(raw: RawConfig, config: Config) -> None:
    """Check that ``weight_group``, the number of inputs with one scale, divides the number of inputs of each linear
    layer.
    """
    if not weight_format(config.weight_format).has_groups or config.stored_weight_format is not None:
        return
    shape, group = config.shape, config.model_config.weight_group
    sizes = {
        "hidden size": shape.hidden_size,
        "size of all heads": shape.num_attention_heads * shape.value_dim,
    }
    if shape.latent is not None and shape.latent.query_rank:
        sizes["q_lora_rank"] = shape.latent.query_rank
    if _has_mlps(shape):
        sizes["intermediate size"] = shape.intermediate_size
    if shape.delta is not None:
        sizes["size of the linear attention's values"] = shape.delta.values
    if shape.experts is not None:
        sizes["experts' intermediate size"] = shape.experts.intermediate_size
        sizes |= {"size of the shared experts": shape.experts.shared_size} if shape.experts.shared_size else {}
    for name, size in sizes.items():
        if group not in GROUP_SIZES or size % group:
            problem = f"must be {GROUP_SIZES_TEXT} and divide the model's {name} of {size}; or use int8"
            raise raw.error("model_config.weight_group", group, problem)


def check_model_parts(raw: RawConfig, config: Config) -> None:
    """Check that the operators support the model's kind of attention, of norms, of experts and of routing."""
    shape = config.shape
    if shape.latent is not None and config.kv_format == "int8":
        problem = "latent attention needs a cache of floats; use auto"
        raise raw.error("model_config.kv_format", config.model_config.kv_format, problem)
    if config.op_table != "native":
        return
    routing = None if shape.experts is None else shape.experts.routing
    if routing is not None and not routing.sigmoid and routing.groups > 1:
        refuse_native(raw, config, f"router with {routing.groups} groups of experts and a float32 softmax")
    if shape.sinks:
        refuse_native(raw, config, "attention sinks and no clamped SwiGLU")
    if shape.delta is not None:
        refuse_native(raw, config, "Gated DeltaNet and no states of sequences")
    if shape.gemma is not None:
        refuse_native(raw, config, "GeGLU and no norms after attention and MLP")


def refuse_native(raw: RawConfig, config: Config, missing: str) -> NoReturn:
    """Refuse a model with a part for which there is no native operator. ``missing`` names this part.

    An Ascend has the native operators only, so the remedy is another device there.
    """
    architecture = config.shape.architecture
    if config.device == "Ascend":
        problem = f"the Ascend has no {missing} for {architecture}; use CPU, with op_table auto"
        raise raw.error("model_config.device_target", config.model_config.device_target, problem)
    problem = f"the native operators have no {missing} for {architecture}; use op_table fused (CPU)"
    raise raw.error("model_config.op_table", config.op_table, problem)


def check_parallel(raw: RawConfig, config: Config) -> None:
    """Check that the model can be split among the agents."""
    obstacle = find_obstacle(config.shape, config.parallel_config, config.shard_group)
    if obstacle is not None:
        key, problem = obstacle
        raise raw.error(f"parallel_config.{key}", getattr(config.parallel_config, key), problem)


def check_pooling(raw: RawConfig, config: Config) -> None:
    """Check that embeddings or scores are possible with the other settings."""
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
    """Check the names of the operator's logits processors, and that the other settings permit processors."""
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
    """Check that LoRA adapters are possible with the other settings."""
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
    """Check that the candidate of shadow serving is another model of the server, and that answers can be scored."""
    name = config.shadow_config.model
    if name is None:
        return
    problem = ""
    if name not in {model.name for model in config.models_config.models or ()}:
        problem = "is none of models_config.models; add it there"
    elif not config.serving_config.structured_outputs:
        problem = "scores tokens with masks; set serving_config.structured_outputs: true"
    elif config.pooling is not None:
        problem = "the server computes embeddings or scores, which have no tokens to compare; leave it out"
    if problem:
        raise raw.error("shadow_config.model", name, problem)


def check_kv_tiers(raw: RawConfig, config: Config) -> None:
    """Check that KV tiers are possible with the other settings."""
    tiers = config.kv_tier_config
    if not tiers.host_blocks:
        for name, folder in (("ssd_folder", tiers.ssd_folder), ("shared_folder", tiers.shared_folder)):
            if folder is not None:
                problem = "needs host memory on the way to the disk; set kv_tier_config.host_blocks above 0"
                raise raw.error(f"kv_tier_config.{name}", folder, problem)
        return
    problem = ""
    if config.shape.delta is not None:
        problem = f"keeps blocks that the prefix cache finds, and {config.shape.architecture} has none; use 0"
    elif not config.uses_prefix_cache:
        problem = "keeps blocks that the prefix cache finds; set scheduler_config.prefix_cache: True"
    elif config.pooling is not None:
        problem = "the server computes embeddings or scores, which have no KV tiers; use 0"
    elif config.op_table == "native" and config.kv_format == "int8":
        problem = "native operators keep the scales of an int8 KV cache in blocks of another size; use kv_format auto"
    if problem:
        raise raw.error("kv_tier_config.host_blocks", tiers.host_blocks, problem)


def check_sum_parts(raw: RawConfig, config: Config) -> None:
    """Check that the model and its operators support ``parallel_config.sum_parts``."""
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
    elif config.stored_weight_format is not None and not weight_format(config.weight_format).is_float:
        problem = f"the folder's weights are stored as {config.stored_weight_format}; use weight_format bf16, or 1"
    else:
        obstacle = find_obstacle(config.shape, parallel.as_summed, config.shard_group)
        problem = None if obstacle is None else obstacle[1]
    if problem is not None:
        raise raw.error("parallel_config.sum_parts", parallel.sum_parts, problem)


def check_native_weights(raw: RawConfig, config: Config) -> None:
    """Check the sizes of quantized layers against the limits of MindSpore's primitives (``docs/ascend.md``)."""
    key, wanted, shape = "model_config.weight_format", config.model_config.weight_format, config.shape
    if config.op_table != "native" or weight_format(config.weight_format).is_float:
        return
    if weight_format(wanted).native is None:
        raise raw.error(key, wanted, "the native primitives do not have this format; use another one, or auto")
    weight_only = not config.quantises_activations
    agents = [local_shape(shape, config.shard(rank)) for rank in range(config.parallel_config.group_size)]
    widest = max(size for each in agents for size in (*_layer_inputs(each), *_layer_outputs(each)))
    if weight_only and widest > MAX_WEIGHT_ONLY_SIZE:
        problem = (
            f"a layer of the model is {widest} wide; WeightQuantBatchMatmul takes at most {MAX_WEIGHT_ONLY_SIZE}; "
            "use int8"
        )
        raise raw.error(key, wanted, problem)
    if shape.experts is not None:
        _check_native_experts(raw, config, max(2 * each.experts.intermediate_size for each in agents if each.experts))
    fewest = min(size for each in agents for size in _layer_inputs(each))
    if weight_only and config.shard_group > 1 and config.shard_group >= fewest:
        _refuse_wide_groups(raw, config, fewest)


def _check_native_experts(raw: RawConfig, config: Config, outputs: int) -> None:
    """Check quantized experts against the limits of the primitive GroupedMatmulV4.

    ``outputs`` is the number of outputs of an expert's gate and up layers together.
    """
    key, wanted, group = "model_config.weight_format", config.model_config.weight_format, config.shard_group
    if max(outputs, config.shape.hidden_size) > MAX_WEIGHT_ONLY_SIZE:
        problem = f"an expert is {outputs} wide; GroupedMatmulV4 takes at most {MAX_WEIGHT_ONLY_SIZE}; use auto"
        raise raw.error(key, wanted, problem)
    if not config.linear_format.has_groups and group > 1:
        problem = (
            f"the folder's experts have a scale for each {group} inputs, and GroupedMatmulV4 takes one for each output "
            f"of {config.stored_weight_format} weights; use auto, which multiplies the weights by their scales"
        )
        raise raw.error(key, wanted, problem)


def _layer_inputs(shape: ModelShape) -> tuple[int, ...]:
    """Return the number of inputs of each kind of linear layer. ``shape`` is one agent's part of the model."""
    inputs = (shape.hidden_size, shape.num_attention_heads * shape.head_dim)
    return (*inputs, shape.intermediate_size) if _has_mlps(shape) else inputs


def _layer_outputs(shape: ModelShape) -> tuple[int, ...]:
    """Return the number of outputs of each kind of linear layer that has more outputs than inputs."""
    heads = shape.num_attention_heads + 2 * shape.num_key_value_heads
    outputs = (heads * shape.head_dim,)
    return (*outputs, 2 * shape.intermediate_size) if _has_mlps(shape) else outputs


def _has_mlps(shape: ModelShape) -> bool:
    """Return True if at least one layer has an ordinary MLP instead of experts."""
    return any(not shape.has_experts(layer) for layer in range(shape.num_layers))


def _refuse_wide_groups(raw: RawConfig, config: Config, fewest: int) -> None:
    """Raise the ConfigError for a quantisation group that is larger than the inputs of a linear layer.

    ``fewest`` is the smallest number of inputs of a layer in one agent.
    """
    group, agents = config.shard_group, config.parallel_config.tensor_parallel
    whose = "the inputs of every layer with native operators" if agents == 1 else "an agent's inputs of every layer"
    if config.stored_weight_format is None:
        problem = f"must be smaller than {whose}; one has {fewest}"
        raise raw.error("model_config.weight_group", group, problem)
    problem = f"the folder's groups of {group} inputs must be smaller than {whose}; one has {fewest}"
    if agents > 1:
        raise raw.error("parallel_config.tensor_parallel", agents, f"{problem}; use fewer agents")
    raise raw.error("model_config.weight_format", config.model_config.weight_format, f"{problem}; use auto")


def check_ascend_options(raw: RawConfig, config: Config) -> None:
    """Check ``weight_layout`` and ``capture_launches``, which only an Ascend supports (``docs/ascend.md``)."""
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
        "parallel_config.pipeline_parallel above 1, as sends and receives have not been captured yet": (
            config.parallel_config.pipeline_parallel > 1
        ),
    }
    for obstacle, is_there in obstacles.items():
        if is_there:
            raise raw.error("model_config.capture_launches", True, f"not with {obstacle}; use False")


def _check_ascend_only(raw: RawConfig, config: Config, key: str, value: object, instead: str) -> None:
    if config.device != "Ascend":
        problem = f"is for an Ascend, and the device is {config.device}; use {instead}"
        raise raw.error(f"model_config.{key}", value, problem)


def check_speculation(raw: RawConfig, config: Config) -> None:
    """Check that the method of speculative decoding works with the other settings."""
    method, key = config.speculative_config.method, "speculative_config.method"
    if method in ("draft", "eagle", "mtp"):
        _check_draft_model(raw, config)
    if method == "suffix" and config.parallel_config.pipeline_parallel > 1:
        raise raw.error(key, method, "needs parallel_config.pipeline_parallel: 1; set auto or off")


def _check_draft_model(raw: RawConfig, config: Config) -> None:
    """Check that the settings of the deployment work with a draft model or a head, and that it has as long contexts.

    The contexts of a head are those of the model, whatever its config.json states. Published heads state less.
    """
    method, draft = config.speculative_config.method, config.draft
    obstacles = {
        "a model_config.model_type mindformers": config.model_config.model_type == "mindformers",
        "an Ascend, as it has not been run there": config.device == "Ascend",
        "agents that share a model (parallel_config.tensor_parallel, pipeline_parallel)": (
            config.parallel_config.group_size > 1
        ),
        "embeddings, scores or classes (model_config.task)": config.pooling is not None,
        "model_config.page_attention: False": not config.model_config.page_attention,
        "native operators and model_config.kv_format: int8": method != "draft" and config.gathers_blocks,
    }
    for obstacle, is_there in obstacles.items():
        if is_there:
            raise raw.error("speculative_config.method", method, f"not with {obstacle}; set auto or off")
    assert draft is not None, "the resolver reads the draft model"
    if draft.head is None and draft.shape.max_positions < config.max_model_len:
        problem = (
            f"has contexts of {draft.shape.max_positions} tokens, and sequences may have {config.max_model_len}; "
            f"set pa_config.decode_seq_length to {draft.shape.max_positions} or less"
        )
        raise raw.error("speculative_config.model", draft.path, problem)


def check_sharing(raw: RawConfig, config: Config) -> None:
    """Check that the prefix cache is only used with paged attention."""
    if config.scheduler_config.prefix_cache and not config.model_config.page_attention:
        problem = "shares blocks between requests, which needs model_config.page_attention: True"
        raise raw.error("scheduler_config.prefix_cache", True, problem)


def check_batches(raw: RawConfig, config: Config) -> None:
    """Check ``chunk_tokens`` and ``batch_size`` against the limits of a step.

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
    """Check that the KV cache can hold the longest sequence, and that a decode step can hold all running sequences.

    The cache never holds the last token of a sequence, because no later token reads its keys and values.
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
