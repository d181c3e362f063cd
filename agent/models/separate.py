"""Reads weights that an agent needs in addition to its part of the model, without mindspore."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agent.models.names import weight_specs
from agent.weights import Packing, WeightSpec, load_weights, open_weights
from agent.weights.storage import Array
from llm_serving.config import Config

_EMBEDDING = "embedding.weight"


def load_separately(config: Config, specs: Sequence[WeightSpec]) -> dict[str, Array]:
    """Loads the parameters ``specs`` from the model folder and returns them by name. Raises CheckpointError."""
    settings, dtype = config.model_config, config.model_config.model_dtype
    seed = settings.seed if settings.load_format == "dummy" else None
    folder = None if settings.model_path is None else Path(settings.model_path)
    # Ignores all other tensors, because loading the text model has already checked them.
    source = open_weights(folder, specs, seed=seed, ignorable=("",))
    try:
        return load_weights(specs, source, dtype, lambda done, total: None, Packing(dtype))
    finally:
        source.close()


def whole_embedding(config: Config) -> Array:
    """Loads the embedding of all tokens [vocabulary, hidden size], for an agent that has only a part of it.

    Raises CheckpointError.
    """
    specs = [spec for spec in weight_specs(config.shape) if spec.parameter == _EMBEDDING]
    return load_separately(config, specs)[_EMBEDDING]
