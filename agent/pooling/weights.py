"""Reads the weights that pooling needs after the last decoder layer.

These are the last norm, Dense layers, and the output rows of the tokens or classes that are scored.

These weights are float32. Every start reads them from the checkpoint again, because they are small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from agent.models.names import ignorable_suffixes, weight_specs
from agent.weights.cuts import TensorCut
from agent.weights.layout import WeightPart, WeightSpec
from agent.weights.loader import open_weights
from agent.weights.safetensors_file import SafetensorsFile
from agent.weights.source import WeightSource
from agent.weights.storage import to_float32
from llm_serving.config import Config
from llm_serving.errors import CheckpointError
from llm_serving.model.parallel import Span
from llm_serving.model.pooling import DenseLayer, Pooling
from llm_serving.model.shape import ModelShape

Floats = npt.NDArray[np.float32]
OUTPUT = "lm_head.weight"
CLASSES = "score.weight"
"""The name of a classifier's last layer, which has a row for each class."""
_PREFIXES = ("linear.", "")
"""Prefixes of the names of a Dense layer's tensors."""


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """One Dense layer: ``weight`` [outputs, inputs], ``bias`` [outputs] or None, and the activation."""

    weight: Floats
    bias: Floats | None
    activation: str


@dataclass(frozen=True, slots=True)
class PoolingWeights:
    """All weights of the pooling, as float32."""

    norm: Floats
    """[hidden_size]: the weight of the norm after the last layer."""
    epsilon: np.float32
    dense: tuple[DenseWeights, ...] = ()
    score_rows: Floats | None = None
    """[2, hidden_size]: the rows of the output layer for the tokens "no" and "yes". None if the model does not score
    texts.
    """
    class_rows: Floats | None = None
    """[classes, hidden_size]: the last layer of a classifier. None if the model is not a classifier."""


def needed_specs(
    specs: Sequence[WeightSpec], ignorable: Sequence[str], pooling: Pooling
) -> tuple[Sequence[WeightSpec], tuple[str, ...]]:
    """Returns the parameters that a model folder must have, and the endings of the names of other tensors that it may
    have.

    Only scores need the output layer (``lm_head``). If the server returns embeddings or classes, the folder may lack
    it.
    """
    if pooling.scores:
        return specs, tuple(ignorable)
    others = (OUTPUT, CLASSES) if pooling.labels else (OUTPUT,)
    return [spec for spec in specs if spec.parameter != OUTPUT], (*ignorable, *others)


def read_pooling_weights(config: Config, pooling: Pooling) -> PoolingWeights:
    """Reads the weights of ``pooling``. Raises CheckpointError if a tensor is missing or has another shape."""
    specs, ignorable = weight_specs(config.shape), ignorable_suffixes(config.shape)
    model, shape = config.model_config, config.shape
    path = None if model.model_path is None else Path(model.model_path)
    seed = model.seed if model.load_format == "dummy" else None
    wanted, others = needed_specs(specs, ignorable, pooling)
    if pooling.labels:  # a spec makes ``open_weights`` check that the layer has a row for each label
        wanted = [*wanted, WeightSpec(CLASSES, (WeightPart(CLASSES, (len(pooling.labels), shape.hidden_size)),))]
    source = open_weights(path, wanted, seed=seed, ignorable=others)
    try:
        norm = np.empty(shape.hidden_size, np.float32)
        source.read_into("model.norm.weight", norm, "float32")
        rows = _score_rows(source, shape, pooling.score_tokens) if pooling.scores else None
        classes = _class_rows(source, len(pooling.labels), shape.hidden_size) if pooling.labels else None
    finally:
        source.close()
    dense = tuple(map(_read_dense, pooling.dense))
    return PoolingWeights(norm, np.float32(shape.rms_norm_eps), dense, rows, classes)


def _score_rows(source: WeightSource, shape: ModelShape, tokens: Sequence[int]) -> Floats:
    name = "model.embed_tokens.weight" if shape.tie_word_embeddings else OUTPUT
    rows = np.empty((len(tokens), shape.hidden_size), np.float32)
    for index, token in enumerate(tokens):
        cut = TensorCut((shape.vocab_size, shape.hidden_size), Span(token, token + 1))
        source.read_into(name, rows[index : index + 1], "float32", cut)
    return rows


def _class_rows(source: WeightSource, num_classes: int, hidden_size: int) -> Floats:
    rows: Floats = np.empty((num_classes, hidden_size), np.float32)
    source.read_into(CLASSES, rows, "float32")
    return rows


def _read_dense(layer: DenseLayer) -> DenseWeights:
    file = SafetensorsFile(Path(layer.folder) / "model.safetensors")
    try:
        weight = _read_tensor(file, "weight", (layer.out_features, layer.in_features))
        bias = _read_tensor(file, "bias", (layer.out_features,)) if layer.bias else None
    finally:
        file.close()
    return DenseWeights(weight, bias, layer.activation)


def _read_tensor(file: SafetensorsFile, end: str, shape: tuple[int, ...]) -> Floats:
    name = next((prefix + end for prefix in _PREFIXES if prefix + end in file.tensors), None)
    if name is None:
        raise CheckpointError(f"{file.path}: has no tensor linear.{end}")
    if file.tensors[name].shape != shape:
        found = list(file.tensors[name].shape)
        raise CheckpointError(f"{file.path}: tensor {name} has shape {found}; config.json requires {list(shape)}")
    return np.array(to_float32(*file.read(name)), np.float32)
