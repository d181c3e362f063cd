"""Tests the description files of msModelSlim and golden-stick: the detected format, and schemes that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llm_serving.config import load_config
from llm_serving.errors import CheckpointError
from llm_serving.model.quantization import checkpoint_quantization, stored_weight_format, stored_weight_group
from support.model_folders import write_model_folder

Q, OUT = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj"


def described(tmp_path: Path, values: dict[str, object], name: str = "quant_model_description.json") -> Path:
    folder = write_model_folder(tmp_path / "model", files=("quant_model_weights.safetensors", "tokenizer.json"))
    (folder / name).write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("scheme", "stored", "group"),
    [("W8A8", "int8", 1), ("W8A8_DYNAMIC", "int8", 1), ("W8A16", "int8", 1), ("W4A16", "int4", 64)],
)
@pytest.mark.parametrize("file", ["quant_model_description.json", "quantization_description.json"])
def test_a_scheme_gives_the_weight_format(tmp_path: Path, scheme: str, stored: str, group: int, file: str) -> None:
    values = {"group_size": 64, f"{Q}.weight": scheme, f"{Q}.weight_scale": scheme, "lm_head.weight": "FLOAT"}
    folder = described(tmp_path, values, file)
    assert (stored_weight_format(folder), stored_weight_group(folder)) == (stored, group)
    assert (
        load_config("llama_tiny_cpu.yaml", [f"model_config.model_path={folder}"], ascend=False).weight_format == stored
    )
    found = checkpoint_quantization(folder)
    assert found is not None
    assert found.description is not None
    assert list(found.description.schemes) == [f"{Q}.weight"]


def test_a_description_of_floats_is_no_quantization(tmp_path: Path) -> None:
    assert stored_weight_format(described(tmp_path, {"model_quant_type": "FLOAT", f"{Q}.weight": "FLOAT"})) is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {f"{Q}.weight": "W4A4_DYNAMIC", f"{Q}.weight_scale": "W4A4_DYNAMIC", f"{OUT}.weight": "W8A8_DYNAMIC"},
            rf"'W4A4_DYNAMIC' for {Q}\.weight, {Q}\.weight_scale; supported are W8A8.*, W4A16 and FLOAT; quantize the",
        ),
        ({f"model.layers.{i}.mlp.up_proj.weight": "W8A8S" for i in range(9)}, "and 6 more tensors"),
        ({f"{Q}.weight": 8}, rf"not supported: 8 for {Q}\.weight"),
        ({f"{Q}.weight": None}, "not supported: null for"),
        ({f"{Q}.kv_cache_scale": "C8"}, r"'C8' for .*kv_cache_scale"),
        ({"kv_cache_type": "C8", f"{Q}.weight": "W8A16"}, "kv_cache_type = 'C8': a KV cache with stored scales is not"),
        ({"fa_quant_type": "FAQuant"}, "fa_quant_type = 'FAQuant': quantized attention is not supported"),
        ({"metadata": {"quarot": {"max_tp_size": 4}}}, "rotation of activations at run time"),
        ({"metadata": []}, "metadata = .*must be a mapping"),
        (
            {f"{Q}.weight": "W4A16", f"{OUT}.weight": "W8A16"},
            rf"weights of 4 and 8 bits .*{Q}.weight = W4A16, {OUT}.weight",
        ),
        ({f"{Q}.weight": "W4A16", "group_size": 12}, "group_size = 12: must be 0 .* or a multiple of 8"),
        ({f"{Q}.weight": "W4A16", "group_size": "64"}, "group_size = '64': must be an integer"),
    ],
)
def test_other_descriptions_are_refused_at_the_start(tmp_path: Path, values: dict[str, object], message: str) -> None:
    folder = described(tmp_path, values)
    with pytest.raises(CheckpointError, match=rf"quant_model_description\.json: .*{message}"):
        load_config("llama_tiny_cpu.yaml", [f"model_config.model_path={folder}"], ascend=False)


@pytest.mark.parametrize("text", ["[]", "{", '{"a.weight": "FLOAT", "a.weight": "W8A16"}'])
def test_a_damaged_description_is_refused(tmp_path: Path, text: str) -> None:
    folder = described(tmp_path, {})
    (folder / "quant_model_description.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"quant_model_description\.json: (must hold|not valid) "):
        checkpoint_quantization(folder)
