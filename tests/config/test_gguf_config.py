"""Tests the sizes of a model that are read from the metadata of GGUF files.

Damaged metadata is refused before any tensor is read.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from llm_serving.config import load_config
from llm_serving.errors import CheckpointError
from llm_serving.gguf.header import read_header
from llm_serving.gguf.model_config import model_fields
from llm_serving.model.deepseek import LatentAttention, Routing
from llm_serving.model.gated_delta import GatedDelta
from llm_serving.model.rope import RopeScaling
from llm_serving.model.shape import ModelShape

SIZES: dict[str, int | float] = {
    "llama.block_count": 1,
    "llama.context_length": 4096,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 500_000.0,
}


DEEPSEEK: dict[str, int | float | bool] = {
    **{key.replace("llama.", "deepseek2."): value for key, value in SIZES.items()},
    "deepseek2.block_count": 3,
    "deepseek2.attention.q_lora_rank": 48,
    "deepseek2.attention.kv_lora_rank": 32,
    "deepseek2.rope.dimension_count": 8,
    "deepseek2.leading_dense_block_count": 1,
    "deepseek2.expert_count": 12,
    "deepseek2.expert_used_count": 3,
    "deepseek2.expert_shared_count": 2,
    "deepseek2.expert_feed_forward_length": 40,
    "deepseek2.expert_weights_scale": 2.5,
    "deepseek2.rope.scaling.factor": 40.0,
    "deepseek2.rope.scaling.original_context_length": 128,
}
V2 = {"deepseek2.attention.key_length": 24, "deepseek2.attention.value_length": 12}
"""Sizes of a head in a file of an older converter."""
V3 = {
    "deepseek2.attention.key_length": 40,
    "deepseek2.attention.value_length": 32,
    "deepseek2.attention.key_length_mla": 24,
    "deepseek2.attention.value_length_mla": 12,
    "deepseek2.attention.head_count_kv": 1,
    "deepseek2.expert_gating_func": 2,
    "deepseek2.expert_weights_norm": True,
    "deepseek2.expert_group_count": 4,
    "deepseek2.expert_group_used_count": 2,
    "deepseek2.rope.scaling.yarn_log_multiplier": 0.0707,
}


def write(
    path: Path,
    entries: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    architecture: str = "llama",
) -> Path:
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in {**(SIZES if architecture == "llama" else {}), **(entries or {})}.items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool}[
            type(value)
        ]
        add(key, value)
    for name, values in {"token_embd.weight": np.zeros((300, 64), np.float32), **(tensors or {})}.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_sizes_and_end_tokens_come_from_the_metadata(tmp_path: Path) -> None:
    entries = {"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.bos_token_id": 1}
    shape = ModelShape.from_path(write(tmp_path / "a.gguf", entries))
    assert (shape.hidden_size, shape.intermediate_size, shape.num_layers, shape.head_dim) == (64, 128, 1, 16)
    assert (shape.num_attention_heads, shape.num_key_value_heads, shape.vocab_size) == (4, 2, 300)
    assert (shape.rms_norm_eps, shape.rope_theta, shape.max_position_embeddings) == (1e-5, 500_000.0, 4096)
    assert (shape.bos_token_id, shape.eos_token_ids, shape.tie_word_embeddings) == (1, (7, 9), True)
    output = {"output.weight": np.zeros((300, 64), np.float32)}
    assert not ModelShape.from_path(write(tmp_path / "b.gguf", tensors=output)).tie_word_embeddings


def llama3_factors(factor: float) -> np.ndarray:
    """Returns the divisors of 8 rotary frequencies in Llama 3's scaling.

    The divisor is 1 for short wavelengths and ``factor`` for long ones, with interpolation between them.
    """
    divisors = []
    for index in range(8):
        length = 2 * math.pi * 500_000.0 ** (index / 8)
        smooth = min(max((8192 / length - 1) / 3, 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def test_the_factors_of_llama_3_become_its_scaling(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", tensors={"rope_freqs.weight": llama3_factors(32.0)})
    assert ModelShape.from_path(path).rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)
    wrong = llama3_factors(32.0)
    wrong[3] *= 1.5
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight does not have the factors of Llama 3\.1"):
        model_fields(write(tmp_path / "b.gguf", tensors={"rope_freqs.weight": wrong}))


def test_yarn_and_linear_scaling_are_read(tmp_path: Path) -> None:
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert ModelShape.from_path(write(tmp_path / "a.gguf", linear)).rope_scaling == RopeScaling("linear", 4.0)
    yarn = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 1024,
    }
    scaling = ModelShape.from_path(write(tmp_path / "b.gguf", yarn)).rope_scaling
    assert scaling is not None
    assert (scaling.type, scaling.factor, scaling.original_max_position_embeddings) == ("yarn", 4.0, 1024)
    with pytest.raises(CheckpointError, match=r"rope_scaling\.rope_type = 'ntk': is not supported"):
        ModelShape.from_path(write(tmp_path / "c.gguf", {"llama.rope.scaling.type": "ntk"}))


def test_deepseek_2_and_3_are_told_apart_by_their_routers(tmp_path: Path) -> None:
    yarn = {"deepseek2.rope.scaling.type": "yarn"}
    old = ModelShape.from_path(write(tmp_path / "v2.gguf", {**DEEPSEEK, **V2, **yarn}, architecture="deepseek2"))
    new = ModelShape.from_path(write(tmp_path / "v3.gguf", {**DEEPSEEK, **V3, **yarn}, architecture="deepseek2"))
    assert (old.architecture, new.architecture) == ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
    for shape, factor in ((old, 1.0), (new, (0.1 * 0.707 * math.log(40) + 1) ** 2)):
        assert shape.latent == LatentAttention(48, 32, 16, 8, 12, score_factor=factor)
        assert shape.rope_scaling == RopeScaling("yarn", 40.0, original_max_position_embeddings=128)
        assert shape.experts is not None
        assert (shape.experts.count, shape.experts.per_token, shape.experts.shared_size) == (12, 3, 80)
        assert shape.experts.dense_layers == (0,)
    assert old.experts is not None
    assert new.experts is not None
    assert (old.experts.normalised, new.experts.normalised) == (False, True)
    assert old.experts.routing == Routing(factor=2.5)
    assert new.experts.routing == Routing(True, 4, 2, True, 2.5)


def test_the_groups_of_deepseek_2_are_read_if_the_file_states_them(tmp_path: Path) -> None:
    groups = {"deepseek2.expert_group_count": 4, "deepseek2.expert_group_used_count": 2}
    shape = ModelShape.from_path(write(tmp_path / "a.gguf", {**DEEPSEEK, **V2, **groups}, architecture="deepseek2"))
    assert shape.experts is not None
    assert shape.experts.routing == Routing(groups=4, chosen_groups=2, factor=2.5)


REFUSED_DEEPSEEK = {
    "router": ({"deepseek2.expert_gating_func": 3}, "expert_gating_func = 3: must be 1 (softmax) or 2 (sigmoid)"),
    "temperature": ({"deepseek2.attention.temperature_scale": 0.1}, "attention scores have no temperature"),
    "head": ({"deepseek2.rope.dimension_count": 24}, "qk_nope_head_dim = 0: must be from 1"),
}


@pytest.mark.parametrize("case", REFUSED_DEEPSEEK)
def test_a_deepseek_file_of_another_kind_is_refused(tmp_path: Path, case: str) -> None:
    entries, expected = REFUSED_DEEPSEEK[case]
    with pytest.raises(CheckpointError) as caught:
        ModelShape.from_path(write(tmp_path / "a.gguf", {**DEEPSEEK, **V2, **entries}, architecture="deepseek2"))
    assert expected in str(caught.value)


def test_a_hybrid_may_state_the_kind_of_each_layer(tmp_path: Path) -> None:
    """Usually a GGUF file states an interval of layers with full attention. Another key of llama.cpp lists each layer's
    kind.
    """
    file = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(str(file), "qwen35")
    sizes = {key.replace("llama.", "qwen35."): value for key, value in SIZES.items()} | {"qwen35.block_count": 4}
    for key, value in sizes.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for key, value in (("inner_size", 64), ("time_step_rank", 2), ("group_count", 1), ("state_size", 16)):
        writer.add_uint32(f"qwen35.ssm.{key}", value)
    writer.add_uint32("qwen35.ssm.conv_kernel", 4)
    writer.add_uint32("qwen35.rope.dimension_count", 8)
    writer.add_key_length(16)
    writer.add_array("qwen35.attention.recurrent_layers", [True, False, True, True])
    writer.add_tensor("token_embd.weight", np.zeros((300, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shape = ModelShape.from_path(file)
    assert shape.delta == GatedDelta(1, 2, 16, 32, 4, full_layers=(1,))
    assert shape.rotary_dim == 8


BROKEN = {
    "missing size": ({"llama.embedding_length": 0}, "hidden_size = 0: must be from 1"),
    "large size": ({"llama.block_count": 5000}, "num_hidden_layers = 5000: must be from 1 to 1024"),
    "part of several": ({"split.count": 3}, "it is one of several parts; join the parts"),
    "alignment": ({"general.alignment": 48}, "its general.alignment is 48; it must be a power of two"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused(tmp_path: Path, case: str) -> None:
    entries, expected = BROKEN[case]
    with pytest.raises(CheckpointError) as caught:
        ModelShape.from_path(write(tmp_path / "a.gguf", entries))
    assert expected in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_tensors_of_unknown_types_and_shapes_are_refused(tmp_path: Path) -> None:
    def head(kind: int, *dimensions: int, at: int = 0) -> bytes:
        entry = struct.pack("<Q", 1) + b"t" + struct.pack("<I", len(dimensions))
        entry += struct.pack(f"<{len(dimensions)}QIQ", *dimensions, kind, at)
        return b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + entry

    for content, expected in (
        (head(40, 32), "tensor t has the type with number 40; supported are F32"),
        (head(8, 33), r"tensor t has shape \[33\]; Q8_0 needs blocks of 32"),
        (head(0, 2**62, 2**62), "tensor t ends at byte"),
        (head(0, 8, at=2**63), "tensor t ends at byte"),
        (head(0, 1, 1, 1, 1, 1), "tensor t has 5 dimensions"),
    ):
        path = tmp_path / "a.gguf"
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=expected):
            read_header(path)


def test_a_config_takes_model_and_tokenizer_from_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "my model.gguf")
    overrides = [f"model_config.model_path={path}", "model_config.model_name=null"]
    config = load_config("llama_tiny_cpu.yaml", overrides, ascend=False)
    assert (config.model_config.model_path, config.tokenizer_file) == (str(path), str(path))
    assert (config.model_name, config.stored_weight_format) == ("my-model", None)


def test_a_draft_model_may_be_a_gguf_file_or_its_folder(tmp_path: Path) -> None:
    path = write(tmp_path / "draft.gguf")
    for place in (path, tmp_path):
        overrides = [f"model_config.model_path={path}", "speculative_config.method=draft"]
        config = load_config("llama_tiny_cpu.yaml", [*overrides, f"speculative_config.model={place}"], ascend=False)
        assert config.draft is not None
        assert (config.draft.path, config.draft.shape) == (str(place), config.shape)
