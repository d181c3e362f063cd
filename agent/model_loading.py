"""Builds a model with the operators of the op table, reads its weights and allocates its KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.backends.base import OpTable
from agent.backends.device import BlockMoves
from agent.group.model_part import ModelPart
from agent.kv_cache import KVCache
from agent.lora.store import AdapterSlots
from agent.pooling.weights import needed_specs
from agent.weights import LinearForms, Packing, WeightSource, WeightSpec, load_weights, open_weights
from agent.weights.cache.folder import WeightCache
from agent.weights.sharding import part_forms, shard_specs
from agent.weights.source import CutSource
from agent.weights.storage import Array
from llm_serving.config import Config
from llm_serving.errors import CheckpointError
from llm_serving.ipc.host_pool import HostPoolMemory

if TYPE_CHECKING:
    from agent.models.registry import ModelDefinition


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model. Owns the memory of weights and KV cache, which the parameters of ``network`` use in place."""

    network: Any
    """The model as a MindSpore Cell. None if the agent replays stored launches (``agent.stored_program``)."""
    ops: OpTable
    weights: dict[str, Array]
    """Maps names of the model's parameters to weights in host memory. Empty if the device has its own memory."""
    weight_bytes: int
    """Size of the weights in bytes, in host memory or on the device."""
    kv_cache: KVCache
    moves: BlockMoves
    """Copies blocks of ``kv_cache``."""
    adapters: AdapterSlots | None
    """The adapter slots for LoRA adapters. None if the server has no LoRA adapters."""


def load_model(
    config: Config,
    part: ModelPart,
    report: Callable[[int, int], None],
    cache: WeightCache | None = None,
    pool: HostPoolMemory | None = None,
    definition: ModelDefinition | None = None,
) -> LoadedModel:
    """Builds this agent's part of the model, loads its weights and allocates its KV cache.

    ``config`` has the sizes of the part. ``report`` is called with the number of loaded tensors and the total number.
    ``cache`` is the cache of converted weights, and ``pool`` the shared memory of the host blocks. ``definition`` is
    the network; None means the network of the config's architecture. Imports mindspore. Raises CheckpointError or
    AgentStartError.
    """
    from agent.backends.selector import select_op_table
    from agent.models.registry import find_model

    whole = part.whole
    definition = definition or find_model(whole.architecture, config.model_config.model_type)
    specs = definition.weight_specs(whole)
    ignorable = definition.ignorable_suffixes(whole)
    if config.pooling is not None:
        specs, ignorable = needed_specs(specs, ignorable, config.pooling)
    source = open_weights(_folder(config), specs, seed=_seed(config), ignorable=ignorable)
    try:
        forms = _forms(config, specs, part, source)
        ops = select_op_table(config, part, forms=forms)
        packs = ops.traits.packs_weights
        own = shard_specs(specs, part, equal_vocabularies=not packs)
        # Allocates the KV cache while another thread reads the weights from the cache of converted weights.
        kv_cache = KVCache(config, ops, pool) if cache is not None and cache.has_entry else None
        weights = None if cache is None else cache.load()
        if weights is None:
            cut = CutSource(source, own.cuts) if own.cuts else source
            keeping = nullcontext(None) if cache is None else cache.keeping()
            with keeping as keep:
                weights = load_weights(
                    own.specs,
                    cut,
                    config.model_config.model_dtype,
                    report,
                    _packing(config) if packs else None,
                    forms,
                    keep,
                )
    finally:
        source.close()
    kv_cache = kv_cache or KVCache(config, ops, pool)
    network = definition.build(config, ops)
    parameters, weight_bytes = network.parameters_dict(), sum(array.nbytes for array in weights.values())
    _bind_weights(parameters, weights, config.device if ops.traits.own_memory else None)
    moves = kv_cache.bind(parameters)
    is_whole = ops.is_first_stage and ops.is_last_stage
    if not ops.traits.own_memory:
        ops.hooks.take_weights(weights, tied=whole.shares_output and is_whole)
    adapters = ops.adapter_slots(parameters, weights)
    return LoadedModel(network, ops, weights, weight_bytes, kv_cache, moves, adapters)


def load_without_network(
    config: Config, part: ModelPart, cache: WeightCache, pool: HostPoolMemory | None = None
) -> LoadedModel | None:
    """Reads converted weights from their cache and allocates the KV cache, without MindSpore.

    Call this only if the config has fused operators. Returns None if ``cache`` has no valid weights. ``with_network``
    can add the network later.
    """
    from agent.backends.selector import select_op_table

    ops = select_op_table(config, part)
    kv_cache = KVCache(config, ops, pool)  # allocated here, while another thread still reads the weights
    weights = cache.load()
    if weights is None:
        return None
    num_bytes = sum(array.nbytes for array in weights.values())
    adapters = ops.adapter_slots({}, weights)
    return LoadedModel(None, ops, weights, num_bytes, kv_cache, kv_cache.block_moves(()), adapters)


def with_network(
    config: Config, part: ModelPart, model: LoadedModel, definition: ModelDefinition | None = None
) -> LoadedModel:
    """Builds the network of a model that was loaded without a network. The network uses the weights and caches of
    ``model``.

    ``load_model`` describes ``definition``. Imports mindspore, which must have been set up.
    """
    from agent.models.registry import find_model

    definition = definition or find_model(part.whole.architecture, config.model_config.model_type)
    network = definition.build(config, model.ops)
    parameters = network.parameters_dict()
    _bind_weights(parameters, model.weights, None)
    model.kv_cache.bind_parameters(parameters)
    return replace(model, network=network)


def _bind_weights(parameters: dict[str, Any], weights: dict[str, Array], device: str | None) -> None:
    """Makes the model's parameters use the memory of the arrays in ``weights``. Both have the same names.

    If MindSpore must copy an array, the copy replaces it in ``weights``. If ``device`` is given, copies each array to
    that device instead, and removes it from ``weights``. So the host memory of each array is free before the next array
    is copied.
    """
    from agent.layers.parameter import bind, move_to_device

    for name in list(weights):
        if device is None:
            weights[name] = bind(parameters[name], weights[name])
        else:
            move_to_device(parameters[name], weights.pop(name), device)


def _packing(config: Config) -> Packing:
    return Packing(config.model_config.weight_format, config.model_config.weight_group)


def _forms(config: Config, specs: Sequence[WeightSpec], part: ModelPart, source: WeightSource) -> LinearForms | None:
    """Returns how the native op table multiplies each kind of linear weight: with floats, or with integers and their
    scales. Returns None for the fused op table, whose packed weights contain this information."""
    return part_forms(specs, part, source, _packing(config)) if config.op_table == "native" else None


def _folder(config: Config) -> Path | None:
    path = config.model_config.model_path
    return None if path is None else Path(path)


def _seed(config: Config) -> int | None:
    """Returns the seed of random weights, or None if the weights come from files."""
    if config.model_config.load_format == "dummy":
        return config.model_config.seed
    if config.model_config.model_path is None:
        raise CheckpointError(
            "model_config.model_path is missing; set it, or serve random weights (load_format: dummy)"
        )
    return None
