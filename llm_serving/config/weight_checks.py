"""Refuses formats of weights that a checkpoint or the operators do not support.

Each check raises ConfigError with key, value and reason.
"""

from __future__ import annotations

from llm_serving.config.config import Config
from llm_serving.config.source import RawConfig
from llm_serving.model.number_formats import (
    AUTO,
    GROUP_SIZES,
    GROUP_SIZES_TEXT,
    formats_of_stored,
    weight_format,
)
from llm_serving.model.parallel import local_shape
from llm_serving.model.quantization import MAX_WEIGHT_ONLY_SIZE
from llm_serving.model.shape import ModelShape


def check_stored_format(raw: RawConfig, config: Config) -> None:
    """Checks that ``weight_format`` suits a quantized checkpoint.

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


def check_group(raw: RawConfig, config: Config) -> None:
    """Checks that ``weight_group``, the number of inputs with one scale, divides the number of inputs of each linear
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


def check_native_weights(raw: RawConfig, config: Config) -> None:
    """Checks the sizes of quantized layers against the limits of MindSpore's primitives (``docs/ascend.md``)."""
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
    """Checks quantized experts against the limits of the primitive GroupedMatmulV4.

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
    """Returns the number of inputs of each kind of linear layer. ``shape`` is one agent's part of the model."""
    inputs = (shape.hidden_size, shape.num_attention_heads * shape.head_dim)
    return (*inputs, shape.intermediate_size) if _has_mlps(shape) else inputs


def _layer_outputs(shape: ModelShape) -> tuple[int, ...]:
    """Returns the numbers of outputs of the two widest linear layers: joined q, k and v, and joined gate and up.

    Leaves out gate and up if all MLPs are experts. ``shape`` is one agent's part of the model.
    """
    heads = shape.num_attention_heads + 2 * shape.num_key_value_heads
    outputs = (heads * shape.head_dim,)
    return (*outputs, 2 * shape.intermediate_size) if _has_mlps(shape) else outputs


def _has_mlps(shape: ModelShape) -> bool:
    """Returns whether at least one layer has an ordinary MLP instead of experts."""
    return any(not shape.has_experts(layer) for layer in range(shape.num_layers))


def _refuse_wide_groups(raw: RawConfig, config: Config, fewest: int) -> None:
    """Raises ConfigError: the quantisation groups have too many inputs. A group must be smaller than each linear layer.

    ``fewest`` is the number of inputs of the smallest layer in one agent.
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
