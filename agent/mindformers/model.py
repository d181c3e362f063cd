"""Builds a MindFormers model instead of this project's own model. Implements ``agent.models.registry.ModelDefinition``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspore.nn.utils import no_init_parameters

from agent.backends.base import OpTable
from agent.mindformers.families import inference_model
from agent.mindformers.names import cache_names, names_of, our_parameters, weight_specs
from agent.mindformers.package import attribute, import_mindformers, without_prints
from agent.models.names import ignorable_suffixes
from llm_serving.config import Config
from llm_serving.errors import AgentStartError

__all__ = ["build", "ignorable_suffixes", "weight_specs"]


def build(config: Config, ops_table: OpTable) -> Any:
    """Builds a network of MindFormers and returns it in an adapter.

    The parameters have this project's names, but no memory yet. Raises AgentStartError if MindFormers is not installed
    or its model does not fit the weights.
    """
    import_mindformers(Path(config.log_config.path).parent)
    classes = inference_model(config.shape.architecture)
    with no_init_parameters(), without_prints():
        network = attribute(classes.network)(attribute(classes.config)(**classes.settings(config)))
    network.set_train(False)
    adapter = attribute(classes.adapter)
    wanted = our_parameters(config.shape)
    if adapter.owns_caches:
        wanted |= _caches(config, ops_table)
    _rename_parameters(network.parameters_dict(), wanted, config.shape.architecture)
    return adapter(network, config, ops_table)


def _caches(config: Config, ops_table: OpTable) -> dict[str, tuple[int, ...]]:
    shape, cache = config.shape, config.pa_config
    layout = ops_table.cache_layout(cache.num_blocks, cache.block_size, shape.num_key_value_heads, shape.head_dim)
    return {name: layout[0] for pair in cache_names(shape.num_layers) for name in pair}


def _rename_parameters(found: Mapping[str, Any], wanted: Mapping[str, tuple[int, ...]], architecture: str) -> None:
    """Renames MindFormers' parameters to this project's names. Weights are loaded by these names."""
    names = names_of(architecture)
    ours = {names.theirs(name): name for name in wanted}
    for name in sorted(found.keys() | ours.keys()):
        shape = found[name].shape if name in found else "none"
        loaded = wanted[ours[name]] if name in ours else "none"
        if shape != loaded:
            raise AgentStartError(
                f"parameter {name} has shape {shape} in MindFormers' model and shape {loaded} in the model folder"
            )
    for name, parameter in found.items():
        parameter.name = ours[name]
