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

FLOATS = {name: Variant(FAMILY_VARIANTS[name].config, seed=71) for name in ("qwen3_5", "qwen3_5_moe")}
IMAGE_TENSOR = "model.visual.blocks.0.attn.qkv.weight"
EXTRA = {IMAGE_TENSOR: np.zeros((6, 2), np.float32), "mtp.fc.weight": np.zeros(3, np.float32)}
EXPERT_EXTRA = {"mtp.layers.0.mlp.experts.gate_up_proj": np.zeros((8, 128, 64), np.float32)}


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
    architecture = own["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
    outer = {"architectures": [architecture], "text_config": config, "vision_config": {"depth": 1},
             "tie_word_embeddings": own["tie_word_embeddings"]}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(outer | changes))
    stored = load_file(text / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): values for name, values in stored.items()}
    extra = EXTRA | EXPERT_EXTRA if "num_experts" in config else EXTRA
    write_safetensors(folder / "model.safetensors", renamed | extra)
    return folder


@pytest.mark.parametrize("model", FLOATS)
def test_the_text_model_is_the_same_beside_an_encoder(tmp_path: Path, model: str) -> None:
    text = tmp_path / "text"
    write_model(FLOATS[model], text)
    both = write_beside_encoder(text, tmp_path / "both")
    alone, beside = weights(text), weights(both)
    assert alone.keys() == beside.keys()
    for name, values in alone.items():
        np.testing.assert_array_equal(beside[name], values, name)
    shape = ModelShape.from_hf_folder(both)
    (architecture,) = FLOATS[model].config["architectures"]
    tied = FLOATS[model].config["tie_word_embeddings"]
    assert (shape.architecture, shape.beside_encoder, shape.tie_word_embeddings) == (architecture, True, tied)
    with pytest.raises(CheckpointError, match=re.escape(IMAGE_TENSOR)):
        open_weights(both, weight_specs(shape), seed=None)


def test_experts_may_have_tensors_of_their_own(tmp_path: Path) -> None:
    """Quantized folders of Qwen3.5 name each expert's tensors. Folders of floats have one tensor of all experts."""
    write_model(FLOATS["qwen3_5_moe"], tmp_path)
    joined, stored = weights(tmp_path), {}
    for name, values in load_file(tmp_path / "model.safetensors").items():
        if ".experts." not in name:
            stored[name] = values
            continue
        place, _, matrix = name.rpartition(".")
        for index, matrices in enumerate(values):
            halves = np.split(matrices, 2) if matrix == "gate_up_proj" else [matrices]
            names = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else ("down_proj",)
            stored |= {f"{place}.{index}.{each}.weight": half for each, half in zip(names, halves, strict=True)}
    write_safetensors(tmp_path / "model.safetensors", stored)
    separate = weights(tmp_path)
    assert joined.keys() == separate.keys()
    for name, values in joined.items():
        np.testing.assert_array_equal(separate[name], values, name)
    lacking = {name: values for name, values in stored.items() if ".experts." not in name}
    write_safetensors(tmp_path / "model.safetensors", lacking)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts\.gate_up_proj.*are missing from the weights"):
        weights(tmp_path)


def test_a_folder_without_a_text_model_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text"
    write_model(FLOATS["qwen3_5"], text)
    folder = write_beside_encoder(text, tmp_path / "both", text_config=None)
    with pytest.raises(CheckpointError, match="text_config = null: is missing; it has the sizes of the text model"):
        ModelShape.from_hf_folder(folder)
