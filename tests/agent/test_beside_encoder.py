"""Tests reading the text model of a folder that also has an encoder of images.

The published folders of Qwen3.5 and of the larger Gemma 3 have such an encoder.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import deserialize
from safetensors.numpy import load_file

from agent.models.head_names import mtp_specs
from agent.models.names import ignorable_suffixes, weight_specs
from agent.weights import load_weights, open_weights
from agent.weights.storage import Array
from llm_serving.config import load_config
from llm_serving.errors import CheckpointError
from llm_serving.model.shape import ModelShape
from performance.models.folders import write_model, write_safetensors
from performance.models.heads import mtp_variant, write_mtp_model
from performance.models.variants import FAMILY_VARIANTS, Variant
from support.forked_programs import run_forked
from support.golden_files import golden_of
from support.json_program import printed_json

WORKER = Path(__file__).with_name("beside_encoder_worker.py")
FLOATS = {name: Variant(FAMILY_VARIANTS[name].config, seed=71) for name in ("qwen3_5", "qwen3_5_moe", "gemma3")}
PREFIXES = {"gemma3": "language_model.model."}
IMAGE_TENSORS = {"gemma3": "vision_tower.vision_model.post_layernorm.weight"}
IMAGE_TENSOR = "model.visual.blocks.0.attn.qkv.weight"
EXTRA = {IMAGE_TENSOR: np.zeros((6, 2), np.float32), "mtp.fc.weight": np.zeros(3, np.float32)}
GEMMA_EXTRA = {IMAGE_TENSORS["gemma3"]: np.zeros(2, np.float32),
               "multi_modal_projector.mm_soft_emb_norm.weight": np.zeros(3, np.float32)}  # fmt: skip
EXPERT_EXTRA = {"mtp.layers.0.mlp.experts.gate_up_proj": np.zeros((8, 128, 64), np.float32)}
EXTRA_NAMES = {*EXTRA, *EXPERT_EXTRA}


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
    types = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
    stored = {
        name: np.frombuffer(info["data"], types[info["dtype"]]).reshape(info["shape"])
        for name, info in deserialize((text / "model.safetensors").read_bytes())
    }
    is_gemma = config["model_type"] == "gemma3_text"
    prefix = PREFIXES["gemma3"] if is_gemma else "model.language_model."
    renamed = {name.replace("model.", prefix, 1): values for name, values in stored.items()}
    extra = EXTRA | EXPERT_EXTRA if "num_experts" in config else GEMMA_EXTRA if is_gemma else EXTRA
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
    with pytest.raises(CheckpointError, match=re.escape(IMAGE_TENSORS.get(model, IMAGE_TENSOR))):
        open_weights(both, weight_specs(shape), seed=None)


@pytest.mark.parametrize("model", ["qwen3_5", "qwen3_5_moe"])
def test_the_mtp_layer_is_the_same_beside_an_encoder(tmp_path: Path, model: str) -> None:
    """Its tensors have no other names there, but the embedding has, which may also be the output layer.

    Some published folders have a tensor for each expert of the MTP layer, and one for all experts of other layers.
    """
    text, both = tmp_path / "text", tmp_path / "both"
    variant = replace(mtp_variant(model), dtype="float32")
    write_mtp_model(text, variant)
    stored = {name: each for file in text.glob("*.safetensors") for name, each in load_file(file).items()}
    own = {name: each for name, each in stored.items() if name.startswith("mtp.")}
    (text / "model.safetensors.index.json").unlink()
    for file in text.glob("*.safetensors"):
        file.unlink()
    write_safetensors(text / "model.safetensors", {name: each for name, each in stored.items() if name not in own})
    write_beside_encoder(text, both)
    shutil.copy(text / "tokenizer.json", both)
    write_safetensors(text / "model.safetensors", stored)
    beside = {name: each for name, each in load_file(both / "model.safetensors").items() if name not in EXTRA_NAMES}
    write_safetensors(both / "model.safetensors", beside | separate_experts(own))
    alone, found = head_weights(text), head_weights(both)
    assert alone.keys() == found.keys()
    for name, values in alone.items():
        np.testing.assert_array_equal(found[name], values, name)
    tied = variant.config["tie_word_embeddings"]
    output = stored["model.embed_tokens.weight" if tied else "lm_head.weight"]
    np.testing.assert_array_equal(found["lm_head.weight"], output)
    np.testing.assert_array_equal(found["norm.weight"], 1 + own["mtp.norm.weight"])


def head_weights(folder: Path) -> dict[str, Array]:
    """Returns the weights of the MTP layer in a folder."""
    given = [f"model_config.model_path={folder}", "speculative_config.method=mtp"]
    draft = load_config("llama_tiny_cpu.yaml", given, ascend=False).draft
    assert draft is not None
    assert draft.head is not None
    specs = mtp_specs(draft.shape, draft.head)
    source = open_weights(folder, specs, seed=None, ignorable=("",))
    try:
        return load_weights(specs, source, "float32", lambda done, of: None)
    finally:
        source.close()


def separate_experts(tensors: dict[str, Array]) -> dict[str, Array]:
    """Returns ``tensors`` with a tensor for each expert instead of one for all experts."""
    found = {}
    for name, values in tensors.items():
        if ".experts." not in name:
            found[name] = values
            continue
        place, _, matrix = name.rpartition(".")
        for index, matrices in enumerate(values):
            halves = np.split(matrices, 2) if matrix == "gate_up_proj" else [matrices]
            names = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else ("down_proj",)
            found |= {f"{place}.{index}.{each}.weight": half for each, half in zip(names, halves, strict=True)}
    return found


def test_experts_may_have_tensors_of_their_own(tmp_path: Path) -> None:
    """Quantized folders of Qwen3.5 name each expert's tensors. Folders of floats have one tensor of all experts."""
    write_model(FLOATS["qwen3_5_moe"], tmp_path)
    joined, stored = weights(tmp_path), separate_experts(load_file(tmp_path / "model.safetensors"))
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


def test_gemma_3_beside_an_encoder_generates_the_tokens_of_transformers(tmp_path: Path) -> None:
    text = tmp_path / "text"
    write_model(FAMILY_VARIANTS["gemma3"], text)
    folder = write_beside_encoder(text, tmp_path / "both")
    for file in text.glob("tokenizer*"):
        shutil.copy(file, folder)
    found = printed_json(run_forked(WORKER, "gemma3", str(folder), folder=tmp_path))
    assert found["tokens"] == [case["tokens"] for case in golden_of("gemma3")["cases"]]


def test_the_published_config_of_gemma_3_is_read(tmp_path: Path) -> None:
    """The published 4B states only some sizes. The others are the defaults of transformers."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}  # fmt: skip
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "model_type": "gemma3",
              "text_config": text, "vision_config": {"hidden_size": 1152}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = ModelShape.from_hf_folder(tmp_path)
    assert (shape.architecture, shape.beside_encoder, shape.tie_word_embeddings) == ("Gemma3ForCausalLM", True, True)
    assert (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim) == (8, 4, 256)
    assert (shape.vocab_size, shape.max_position_embeddings, shape.eos_token_ids) == (262_208, 131_072, (1, 106))
    assert [layer for layer in range(34) if shape.window_of(layer) == 0] == [5, 11, 17, 23, 29]
    assert shape.rope_scaling is not None
    names = {part.name for spec in weight_specs(shape) for part in spec.parts}
    assert all(name.startswith("language_model.model.") for name in names)
    assert "language_model.model.layers.33.post_feedforward_layernorm.weight" in names
