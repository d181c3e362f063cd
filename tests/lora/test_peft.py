"""Tests the reader of PEFT adapters: which layers and scales it finds, and that it refuses what is not supported."""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_serving.errors import AdapterError
from llm_serving.lora.peft import LoraAdapter, read_adapter
from llm_serving.lora.targets import lora_targets
from llm_serving.model.shape import ModelShape
from performance.models.qwen_vision import write_qwen_vision_model
from performance.models.variants import FAMILY_VARIANTS
from performance.models.vision import write_vision_model
from support.lora_folders import adapter_config, adapter_tensors, random_adapter, write_adapter
from support.small_configs import TINY_LLAMA

SHAPE = ModelShape.from_hf_folder(TINY_LLAMA)
FIRST = "model.layers.0.self_attn.q_proj"


def read(folder: Path, *, max_rank: int = 16, dtype: str = "float32") -> LoraAdapter:
    return read_adapter(folder, SHAPE, max_rank=max_rank, dtype=dtype)


def test_an_adapter_of_all_layers_is_read(tmp_path: Path) -> None:
    tensors = adapter_tensors(SHAPE, seed=3)
    adapter = read(write_adapter(tmp_path, adapter_config(), tensors))
    assert [module.name for module in adapter.modules] == list(lora_targets(SHAPE))
    for module in adapter.modules:
        np.testing.assert_array_equal(module.a, tensors[f"base_model.model.{module.name}.lora_A.weight"])
        np.testing.assert_array_equal(module.b, tensors[f"base_model.model.{module.name}.lora_B.weight"])
        assert module.scale == 2.0


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4.0),
        ({"lora_alpha": 3}, 0.75),
        ({"alpha_pattern": {"v_proj": 1}}, 2.0),
        ({"alpha_pattern": {"q_proj": 6, ".*layers.0.*": 1}}, 1.5),
        ({"alpha_pattern": {r"layers\.0\.self_attn\.q_proj": 10}}, 2.5),
        ({"alpha_pattern": {"proj": 10}}, 2.0),  # PEFT matches whole parts of the name
    ],
)
def test_the_scale_follows_peft(tmp_path: Path, values: dict[str, Any], scale: float) -> None:
    [first, *_] = read(random_adapter(tmp_path, SHAPE, **values)).modules
    assert first.name == FIRST
    assert math.isclose(first.scale, scale)


def test_a_rank_above_the_limit_is_named_although_the_file_is_too_large(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, adapter_config(rank=512), adapter_tensors(SHAPE, rank=512))
    with pytest.raises(AdapterError, match=r"rank of .* is 512; lora_config.max_rank of this server is 2\."):
        read(folder, max_rank=2)


def test_a_rank_pattern_changes_rank_and_scale(tmp_path: Path) -> None:
    tensors = adapter_tensors(SHAPE, rank=4, modules=["k_proj"]) | adapter_tensors(SHAPE, rank=8, modules=["q_proj"])
    config = adapter_config(rank=4, modules=["q_proj", "k_proj"], rank_pattern={"q_proj": 8})
    first, second, *_ = read(write_adapter(tmp_path, config, tensors)).modules
    assert (first.rank, first.scale, second.rank, second.scale) == (8, 1.0, 4, 2.0)


@pytest.mark.parametrize(
    "targets",
    [
        ["q_proj", "v_proj"],
        ["self_attn.q_proj", "self_attn.v_proj"],
        r".*\.self_attn\.(q_proj|v_proj)",
        r"model\.layers\.\d+\.self_attn\.[qv]_proj",
        "all-linear",
    ],
)
def test_target_modules_may_be_a_list_or_a_pattern(tmp_path: Path, targets: Any) -> None:
    folder = random_adapter(tmp_path, SHAPE, modules=["q_proj", "v_proj"], target_modules=targets)
    assert len(read(folder).modules) == 2 * SHAPE.num_layers


def test_the_digest_depends_on_both_files(tmp_path: Path) -> None:
    folders = [
        random_adapter(tmp_path / "a", SHAPE, seed=1),
        random_adapter(tmp_path / "b", SHAPE, seed=1),
        random_adapter(tmp_path / "c", SHAPE, seed=2),
        random_adapter(tmp_path / "d", SHAPE, seed=1, lora_alpha=3),
    ]
    same, again, *others = [read(folder).digest for folder in folders]
    assert same == again
    assert len({same, *others}) == 3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_matrices_are_rounded_to_the_type_of_the_activations(tmp_path: Path, dtype: str) -> None:
    folder = random_adapter(tmp_path, SHAPE)
    exact, rounded = read(folder).modules[0].a, read(folder, dtype=dtype).modules[0].a
    assert rounded.dtype == (np.uint16 if dtype == "bfloat16" else np.float16)
    values = (rounded.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else rounded.astype(np.float32)
    np.testing.assert_allclose(values, exact, rtol=2.0**-8)
    assert (values != exact).any()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"alora_invocation_tokens": [1, 2]}, "alora"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"init_lora_weights": "olora"}, "init_lora_weights"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights"),
        ({"init_lora_weights": 1}, "init_lora_weights"),
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"some_new_method": True}, "some_new_method"),
        ({"r": 0}, "r = 0"),
        ({"r": 8}, "shape"),
        ({"lora_alpha": "x"}, "lora_alpha"),
        ({"rank_pattern": {"q_proj": 64}}, "max_rank"),
        ({"target_modules": ["q_proj"]}, "does not name"),
        ({"target_modules": r"(a+)+b"}, "repeats a group"),
        ({"target_modules": r"(q_proj"}, "not a regular expression"),
        ({"target_modules": []}, "target_modules"),
        ({"alpha_pattern": {"a*b*c*d*e*": 1}}, "repetitions"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, values: dict[str, Any], text: str) -> None:
    with pytest.raises(AdapterError, match=text):
        read(random_adapter(tmp_path, SHAPE, **values))


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        ("base_model.model.lm_head.lora_A.weight", (4, 8), "output layer"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", (4, 8), "embedding"),
        ("base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_A.weight", (4, 8), "experts"),
        ("base_model.model.model.layers.9.mlp.up_proj.lora_A.weight", (4, 8), "no such layer"),
        (f"base_model.model.{FIRST}.lora_magnitude_vector.weight", (8,), "DoRA"),
        (f"base_model.model.{FIRST}.lora_B.bias", (8,), "biases"),
        (f"base_model.model.{FIRST}.lora_C.weight", (8,), "names of a PEFT adapter"),
    ],
)
def test_a_tensor_of_another_kind_is_refused(tmp_path: Path, name: str, shape: tuple[int, ...], text: str) -> None:
    tensors = adapter_tensors(SHAPE) | {name: np.zeros(shape, np.float32)}
    with pytest.raises(AdapterError, match=text):
        read(write_adapter(tmp_path, adapter_config(), tensors))


def test_an_incomplete_adapter_is_refused(tmp_path: Path) -> None:
    tensors = adapter_tensors(SHAPE)
    one = f"base_model.model.{FIRST}.lora_B.weight"
    with pytest.raises(AdapterError, match="only lora_A"):
        read(write_adapter(tmp_path, adapter_config(), {name: each for name, each in tensors.items() if name != one}))
    some = {name: each for name, each in tensors.items() if FIRST not in name}
    with pytest.raises(AdapterError, match="has no adapter of it"):
        read(write_adapter(tmp_path, adapter_config(), some))
    read(write_adapter(tmp_path, adapter_config(layers_to_transform=[1]), some))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_refused(tmp_path: Path, value: float) -> None:
    tensors = adapter_tensors(SHAPE)
    tensors[f"base_model.model.{FIRST}.lora_A.weight"][0, 0] = value
    with pytest.raises(AdapterError, match="NaN or an infinity"):
        read(write_adapter(tmp_path, adapter_config(), tensors))


def test_wrong_types_and_sizes_are_refused(tmp_path: Path) -> None:
    tensors = adapter_tensors(SHAPE)
    name = f"base_model.model.{FIRST}.lora_A.weight"
    with pytest.raises(AdapterError, match="F64"):
        read(write_adapter(tmp_path, adapter_config(), tensors | {name: tensors[name].astype(np.float64)}))
    with pytest.raises(AdapterError, match="shape"):
        read(write_adapter(tmp_path, adapter_config(), tensors | {name: tensors[name].T.copy()}))
    with pytest.raises(AdapterError, match="too large for float16"):
        read(write_adapter(tmp_path, adapter_config(), tensors | {name: tensors[name] * 1e8}), dtype="float16")


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="not a folder"):
        read(tmp_path / "missing")
    with pytest.raises(AdapterError, match=r"no adapter_config\.json"):
        read(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter_config()))
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(AdapterError, match="a pickle"):
        read(tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    with pytest.raises(AdapterError, match="truncated"):
        read(tmp_path)
    with weights.open("wb") as file:
        file.truncate(1 << 33)
    with pytest.raises(AdapterError, match="at most"):
        read(tmp_path)


def test_layers_of_latent_attention_and_experts() -> None:
    names = list(lora_targets(replace(SHAPE, num_layers=1)))
    assert names[0] == FIRST
    assert len(names) == 7


VISION_NAMES = {
    "smolvlm": (write_vision_model, "model.text_model.", "model.vision_model.encoder.layers.0.self_attn.q_proj"),
    "qwen": (write_qwen_vision_model, "model.language_model.", "model.visual.blocks.0.mlp.gate_proj"),
    "older qwen": (write_qwen_vision_model, "model.", "visual.blocks.0.mlp.gate_proj"),
}


@pytest.mark.parametrize("kind", VISION_NAMES)
def test_an_adapter_of_a_model_that_reads_images_has_the_names_of_transformers(tmp_path: Path, kind: str) -> None:
    write, prefix, of_encoder = VISION_NAMES[kind]
    write(tmp_path / "model")
    shape = ModelShape.from_hf_folder(tmp_path / "model")
    assert shape.vision is not None
    tensors = {
        f"base_model.model.{prefix}layers.1.self_attn.q_proj.lora_{matrix}.weight": np.zeros(size, np.float32)
        for matrix, size in (("A", (4, 96)), ("B", (96, 4)))
    }
    pattern = rf"{re.escape(prefix)}layers\.1\.self_attn\.q_proj"
    config = adapter_config(target_modules=pattern, alpha_pattern={pattern: 20})
    folder = write_adapter(tmp_path / "adapter", config, tensors)
    [module] = read_adapter(folder, shape, max_rank=8, dtype="float32").modules
    assert (module.name, module.scale) == (f"{shape.vision.text_prefix}layers.1.self_attn.q_proj", 5.0)
    tensors[f"base_model.model.{of_encoder}.lora_A.weight"] = np.zeros((4, 64), np.float32)
    with pytest.raises(AdapterError, match="adapters of the vision encoder are not supported"):
        read_adapter(write_adapter(folder, config, tensors), shape, max_rank=8, dtype="float32")


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_an_adapter_of_qwen3_5_may_name_the_text_model_or_the_whole_model(tmp_path: Path, prefix: str) -> None:
    """The adapter is for layers of linear attention. Its settings and its tensors use the same layer names."""
    (tmp_path / "config.json").write_text(json.dumps(FAMILY_VARIANTS["qwen3_5"].config_json()), encoding="utf-8")
    shape = replace(ModelShape.from_hf_folder(tmp_path), beside_encoder=True)
    assert shape.delta is not None
    layer = f"{prefix}layers.0.linear_attn.in_proj_qkv"
    sizes = {"A": (4, shape.hidden_size), "B": (shape.delta.channels, 4)}
    tensors = {f"base_model.model.{layer}.lora_{each}.weight": np.ones(sizes[each], np.float32) for each in sizes}
    config = adapter_config(target_modules=re.escape(layer), alpha_pattern={re.escape(layer): 20})
    folder = write_adapter(tmp_path / "adapter", config, tensors)
    [module] = read_adapter(folder, shape, max_rank=8, dtype="float32").modules
    assert (module.name, module.scale) == ("model.language_model.layers.0.linear_attn.in_proj_qkv", 5.0)


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
def test_an_adapter_of_gemma_may_name_the_text_model_or_the_whole_model(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILY_VARIANTS["gemma3"].config_json()), encoding="utf-8")
    shape = replace(ModelShape.from_hf_folder(tmp_path), beside_encoder=True)
    name = f"{prefix}layers.0.self_attn.q_proj"
    sizes = {"A": (4, shape.hidden_size), "B": (shape.num_attention_heads * shape.head_dim, 4)}
    tensors = {f"base_model.model.{name}.lora_{each}.weight": np.ones(sizes[each], np.float32) for each in sizes}
    folder = write_adapter(tmp_path / "adapter", adapter_config(target_modules=re.escape(name)), tensors)
    [module] = read_adapter(folder, shape, max_rank=8, dtype="float32").modules
    assert module.name == "language_model.model.layers.0.self_attn.q_proj"


def test_an_adapter_of_a_shared_expert_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILY_VARIANTS["qwen3_next"].config_json()), encoding="utf-8")
    shape, name = ModelShape.from_hf_folder(tmp_path), "model.layers.0.mlp.shared_expert.up_proj"
    tensors = {f"base_model.model.{name}.lora_A.weight": np.ones((4, 64), np.float32)}
    folder = write_adapter(tmp_path / "adapter", adapter_config(target_modules="all-linear"), tensors)
    with pytest.raises(AdapterError, match="adapters of experts and their routers are not supported"):
        read_adapter(folder, shape, max_rank=8, dtype="float32")
