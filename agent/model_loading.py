"""A model made ready to run: its Cells built over the op table, its weights read into them, its KV cache made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.backends.base import BlockMoves, OpTable
from agent.group.model_part import ModelPart
from agent.kv_cache import KVCache
from agent.weights import LinearForms, Packing, WeightSource, WeightSpec, load_weights, open_weights
from agent.weights.sharding import part_forms, shard_specs
from agent.weights.source import CutSource
from agent.weights.storage import Array
from llm_serving.config import Config
from llm_serving.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Owns the memory of weights and KV cache, which the parameters of ``network`` use as theirs."""

    network: Any
    """A MindSpore Cell."""
    ops: OpTable
    weights: dict[str, Array]
    """By the names of the parameters."""
    kv_cache: KVCache
    moves: BlockMoves
    """What moves blocks of ``kv_cache``."""


def load_model(config: Config, part: ModelPart, report: Callable[[int, int], None]) -> LoadedModel:
    """Build a part of the model, whose sizes ``config`` has, and give its parameters their values.

    ``report`` takes how many tensors are done, of how many. Imports mindspore. Raises CheckpointError or
    AgentStartError.
    """
    from agent.backends.selector import select_op_table
    from agent.models.registry import find_model

    whole = part.whole
    definition = find_model(whole.architecture, config.model_config.model_type)
    specs = definition.weight_specs(whole)
    ignorable = definition.ignorable_suffixes(whole)
    source = open_weights(_folder(config), specs, seed=_seed(config), ignorable=ignorable)
    try:
        forms = _forms(config, specs, part, source)
        ops = select_op_table(config, part, forms=forms)
        own = shard_specs(specs, part, equal_vocabularies=not ops.packs_weights)
        weights = load_weights(
            own.specs,
            CutSource(source, own.cuts) if own.cuts else source,
            config.model_config.model_dtype,
            report,
            _packing(config) if ops.packs_weights else None,
            forms,
        )
    finally:
        source.close()
    kv_cache = KVCache(config, ops)
    network = definition.build(config, ops)
    moves = _bind_parameters(network.parameters_dict(), weights, kv_cache)
    is_whole = ops.is_first_stage and ops.is_last_stage
    ops.take_weights(weights, tied=whole.tie_word_embeddings and is_whole)
    return LoadedModel(network, ops, weights, kv_cache, moves)


def _bind_parameters(parameters: dict[str, Any], weights: dict[str, Array], kv_cache: KVCache) -> BlockMoves:
    """Make the arrays the parameters' memory; ``weights`` then has them as they are bound."""
    from agent.layers.parameter import bind

    for name, array in list(weights.items()):
        weights[name] = bind(parameters[name], array)
    for name, array in kv_cache.arrays.items():
        bind(parameters[name], array)
    return kv_cache.block_moves([parameters[name] for name in kv_cache.arrays])


def _packing(config: Config) -> Packing:
    return Packing(config.model_config.weight_format, config.model_config.weight_group)


def _forms(config: Config, specs: Sequence[WeightSpec], part: ModelPart, source: WeightSource) -> LinearForms | None:
    """Of the native op tables; None where weights are packed."""
    return part_forms(specs, part, source, _packing(config)) if config.op_table == "native" else None


def _folder(config: Config) -> Path | None:
    path = config.model_config.model_path
    return None if path is None else Path(path)


def _seed(config: Config) -> int | None:
    """The seed of random weights; None for weights from files."""
    if config.model_config.load_format == "dummy":
        return config.model_config.seed
    if config.model_config.model_path is None:
        raise CheckpointError("there is no model_config.model_path to load weights from; or set load_format: dummy")
    return None
