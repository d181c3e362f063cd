"""Tests reading the text model of a folder that also has an encoder of images, as Qwen3.5's published folders do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from agent.models.names import ignorable_suffixes, weight_specs
from agent.weights import load_weights, open_weights
from agent.weights.storage import Array
from llm_serving.errors import CheckpointError
from llm_serving.model.shape import ModelShape
from performance.models.folders import write_model, write_safetensors
from performance.models.variants import FAMILY_VARIANTS, Variant

FLOATS = Variant(FAMILY_VARIANTS["qwen3_5"].config, seed=71)
IMAGE_TENSOR = "model.visual.blocks.0.attn.qkv.weight"
EXTRA = {IMAGE_TENSOR: np.zeros((6, 2), np.float32), "mtp.fc.weight": np.zeros(3, np.float32)}


def weights(folder: Path) -> dict[str, Array]:
    shape = ModelShape.from_hf_folder(folder)
    specs = weight_specs(shape)
    source = open_weights(folder, specs, seed=None, ignorable=ignorable_suffixes(shape))
    try:
        return load_weights(specs, source, "float32", lambda done, of: None)
    finally:
        source.close()


def write_beside_encoder(text: Path, folder: Path, **changes: Any) -> Path:
    """Writes the model of the folder ``text`` in the form of a folder with an encoder of images."""
    folder.mkdir()
    config = json.loads((text / "config.json").read_text())
    own = {key: config.pop(key) for key in ("architectures", "tie_word_embeddings")}
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": config,
             "vision_config": {"depth": 1}, "tie_word_embeddings": own["tie_word_embeddings"]}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(outer | changes))
    stored = load_file(text / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): values for name, values in stored.items()}
    write_safetensors(folder / "model.safetensors", renamed | EXTRA)
    return folder


def test_the_text_model_is_the_same_beside_an_encoder(tmp_path: Path) -> None:
    text = tmp_path / "text"
    write_model(FLOATS, text)
    both = write_beside_encoder(text, tmp_path / "both")
    alone, beside = weights(text), weights(both)
    assert alone.keys() == beside.keys()
    for name, values in alone.items():
        np.testing.assert_array_equal(beside[name], values, name)
    shape = ModelShape.from_hf_folder(both)
    assert (shape.architecture, shape.beside_encoder, shape.tie_word_embeddings) == ("Qwen3_5ForCausalLM", True, True)
    with pytest.raises(CheckpointError, match=re.escape(IMAGE_TENSOR)):
        open_weights(both, weight_specs(shape), seed=None)


def test_a_folder_without_a_text_model_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text"
    write_model(FLOATS, text)
    folder = write_beside_encoder(text, tmp_path / "both", text_config=None)
    with pytest.raises(CheckpointError, match="text_config = null: is missing; it has the sizes of the text model"):
        ModelShape.from_hf_folder(folder)
