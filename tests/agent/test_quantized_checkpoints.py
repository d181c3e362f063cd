"""Tests reading folders of GPTQ, AWQ and compressed-tensors: exact values, and errors that name the tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.weights import Packing, WeightPart, load_weights, open_weights
from agent.weights.storage import Array, from_float32
from llm_serving.errors import CheckpointError, LLMServingError
from llm_serving.model.quantization import stored_weight_group
from performance.kernels.linear_calls import linear
from support.quantised_folders import CASES, INPUT_SCALE, LINEARS, SPECS, Case, Tensors, float_tensors, write_case


def load(folder: Path, dtype: str = "float32") -> dict[str, Array]:
    source = open_weights(folder, SPECS, seed=None)
    try:
        return load_weights(SPECS, source, dtype, lambda done, of: None)
    finally:
        source.close()


@pytest.mark.parametrize("name", CASES)
def test_values_follow_the_documented_formula(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    weights = load(write_case(tmp_path, case))
    for parameter, names in (("qkv", list(LINEARS)[:3]), ("gate_up", list(LINEARS)[3:])):
        np.testing.assert_array_equal(weights[parameter], np.concatenate([case.plain(each).value() for each in names]))
    np.testing.assert_array_equal(weights["norm"], float_tensors()["norm.weight"].astype(np.float32))


@pytest.mark.parametrize("name", CASES)
def test_integers_are_read_without_change(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    source = open_weights(write_case(tmp_path, case), SPECS, seed=None)
    for spec in SPECS[1:3]:
        for part in spec.parts:
            plain, tensor, scheme = case.plain(part.name), source.read_quantised(part), source.scheme(part)
            assert scheme is not None
            assert (scheme.format, scheme.group) == ("int4" if case.bits == 4 else "int8", case.group)
            assert tensor.scheme == scheme
            scales = plain.scales * np.float32(INPUT_SCALE) if scheme.static else plain.scales
            np.testing.assert_array_equal(tensor.scales, scales)
            if case.bits == 8:
                assert tensor.values.dtype == np.int8
                np.testing.assert_array_equal(tensor.values, plain.q - 128)
            else:
                assert tensor.values.dtype == np.uint8
                np.testing.assert_array_equal(tensor.values, plain.q)
            if case.asymmetric:
                np.testing.assert_array_equal(tensor.zeros, plain.zeros)
            else:
                assert tensor.zeros is None
    assert source.scheme(SPECS[0].parts[0]) is None
    source.close()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_round_the_float32_values_once(tmp_path: Path, dtype: str) -> None:
    folder = write_case(tmp_path, CASES["gptq4 asymmetric"])
    exact, rounded = load(folder), load(folder, dtype)
    for name in exact:
        np.testing.assert_array_equal(rounded[name], from_float32(exact[name], dtype))


def test_settings_of_older_folders_are_in_a_separate_file(tmp_path: Path) -> None:
    expected = load(write_case(tmp_path / "new", CASES["gptq4"]))
    old = write_case(tmp_path / "old", CASES["gptq4"], lambda t, c: c.clear())
    (old / "quantize_config.json").write_text('{"bits": 4, "group_size": 32, "desc_act": false, "sym": true}')
    np.testing.assert_array_equal(load(old)["qkv"], expected["qkv"])
    awq = write_case(tmp_path / "awq", CASES["awq"], lambda t, c: c.clear())
    (awq / "quant_config.json").write_text('{"zero_point": true, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}')
    assert load(awq)["qkv"].shape == (32, 128)


@pytest.mark.parametrize("name", ["gptq4", "gptq8"])
def test_desc_act_is_dequantised(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    groups = np.random.default_rng(1).permutation(np.arange(128) // 32).astype(np.int32)
    plain = case.plain("q_proj.weight")
    expected = (plain.q - plain.zeros[:, groups]).astype(np.float32) * plain.scales[:, groups]
    folder = write_case(tmp_path, case, lambda t, c: t.update({"q_proj.g_idx": groups}))
    np.testing.assert_array_equal(load(folder)["qkv"][:16], expected)


def test_a_checkpoint_may_keep_some_weights_as_floats(tmp_path: Path) -> None:
    floats = np.random.default_rng(0).standard_normal((24, 128)).astype(np.float16)

    def unquantise(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in [each for each in tensors if each.startswith("up_proj")]:
            del tensors[name]
        tensors["up_proj.weight"] = floats

    weights = load(write_case(tmp_path, CASES["awq"], unquantise))
    np.testing.assert_array_equal(weights["gate_up"][24:], floats.astype(np.float32))


@pytest.mark.parametrize(
    "name", ["slim w4a16", "slim w4a16 unpacked", "slim w4a16 asymmetric", "slim w4a16 whole rows"]
)
def test_without_a_group_size_the_scales_give_the_group(tmp_path: Path, name: str) -> None:
    one = write_case(tmp_path / "1", CASES[name])
    two = write_case(tmp_path / "2", CASES[name], lambda tensors, config: config.pop("group_size"))
    assert stored_weight_group(two) == stored_weight_group(one) == (CASES[name].group or 1)
    np.testing.assert_array_equal(load(one)["qkv"], load(two)["qkv"])


SCALE = "q_proj.weight_scale"


@pytest.mark.parametrize(
    "scales",
    [np.ones((16, 3), np.float32), np.ones((9, 2), np.float32), np.ones((16, 32), np.float32)],
    ids=["uneven", "rows", "small groups"],
)
def test_scales_that_give_no_group_are_refused(tmp_path: Path, scales: np.ndarray) -> None:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        del config["group_size"]
        tensors[SCALE] = scales

    folder = write_case(tmp_path / "m", CASES["slim w4a16"], change)
    assert stored_weight_group(folder) == 1
    with pytest.raises(CheckpointError, match=r"has shape .*; config\.json requires"):
        load(folder)


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"\x02" + bytes(7) + b"[]", b"\x04" + bytes(7) + b"nul"])
def test_damaged_headers_give_no_group(tmp_path: Path, content: bytes) -> None:
    folder = write_case(tmp_path / "m", CASES["slim w4a16"], lambda tensors, config: config.pop("group_size"))
    (folder / "quant_model_weights.safetensors").write_bytes(content)
    assert stored_weight_group(folder) == 1
    with pytest.raises(CheckpointError, match=r"quant_model_weights\.safetensors"):
        load(folder)


def test_optional_tensors_may_be_absent(tmp_path: Path) -> None:
    def strip(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in [each for each in tensors if each.endswith((".bias", ".g_idx"))]:
            del tensors[name]

    one, two = load(write_case(tmp_path / "1", CASES["gptq4"])), load(write_case(tmp_path / "2", CASES["gptq4"], strip))
    np.testing.assert_array_equal(one["qkv"], two["qkv"])


@pytest.mark.parametrize("name", ["gptq4", "awq", "w8a8"])
def test_a_bias_that_the_model_has_is_read(tmp_path: Path, name: str) -> None:
    sizes = {part.name.removesuffix(".weight"): part.shape[0] for part in SPECS[1].parts}
    bias = np.linspace(-1, 1, sum(sizes.values()), dtype=np.float16)
    ends = np.cumsum(list(sizes.values()))

    def add_biases(tensors: Tensors, config: dict[str, Any]) -> None:
        for stem, values in zip(sizes, np.split(bias, ends[:-1]), strict=True):
            tensors[f"{stem}.bias"] = values

    folder = write_case(tmp_path / "biased", CASES[name], add_biases)
    with pytest.raises(CheckpointError, match="bias"):
        load(folder)
    parts = tuple(WeightPart(f"{stem}.bias", (size,)) for stem, size in sizes.items())
    specs = [*SPECS[:1], replace(SPECS[1], parameter="qkv.weight", bias=parts), *SPECS[2:]]
    source = open_weights(folder, specs, seed=None)
    weights = load_weights(specs, source, "float32", lambda done, of: None)
    np.testing.assert_array_equal(weights["qkv.bias"], bias.astype(np.float32))
    packed = load_weights(specs, source, "float32", lambda done, of: None, Packing("auto"))
    source.close()
    x = np.ones((1, specs[1].shape[1]), np.float32)
    plain = load_weights(SPECS, open_weights(write_case(tmp_path / "plain", CASES[name]), SPECS, seed=None), "float32",
                         lambda done, of: None, Packing("auto"))  # fmt: skip
    without = linear(x, plain["qkv"], "float32")
    np.testing.assert_array_equal(linear(x, packed["qkv.weight"], "float32"), without + bias.astype(np.float32))


def tensor(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensors, dict[str, Any]], object]:
    return lambda tensors, config: tensors.update({name: change(tensors[name])})


def setting(key: str, value: object) -> Callable[[Tensors, dict[str, Any]], object]:
    """Returns a change of one value in ``quantization_config``. ``key`` may name a nested value, as in ``a.b``."""

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        *path, last = key.split(".")
        for step in path:
            config = config[step]
        config[last] = value

    return change


def set_value(index: int, value: object) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        copy = array.copy()
        copy.reshape(-1)[index] = value
        return copy

    return change


BROKEN: dict[str, tuple[str, Callable[[Tensors, dict[str, Any]], object], str]] = {
    "missing scales": ("gptq4", lambda t, c: t.pop("q_proj.scales"), "tensor q_proj.scales is missing"),
    "missing zeros": ("awq", lambda t, c: t.pop("k_proj.qzeros"), "tensor k_proj.qzeros is missing"),
    "missing scale": ("w4a16", lambda t, c: t.pop("v_proj.weight_scale"), "v_proj.weight_scale is missing"),
    "wrong group": (
        "gptq4",
        setting("group_size", 64),
        "tensor q_proj.qzeros has shape [4, 2]; config.json requires [2, 2]",
    ),
    "group not a divisor": ("gptq4", setting("group_size", 48), "q_proj.weight: its 128 inputs are not whole groups"),
    "wrong bits": ("gptq4", setting("bits", 8), "tensor q_proj.qweight has shape [16, 16]; config.json requires [32"),
    "wrong type": (
        "gptq4",
        tensor("q_proj.qweight", lambda a: a.astype(np.int64)),
        "tensor q_proj.qweight has type I64; in this format it must be one of I32",
    ),
    "integer scales": ("awq", tensor("q_proj.scales", lambda a: a.astype(np.int32)), "q_proj.scales has type I32"),
    "float weight": ("w8a8", tensor("q_proj.weight", lambda a: a.astype(np.float32)), "q_proj.weight has type F32"),
    "scale not finite": (
        "w8a8",
        tensor("v_proj.weight_scale", set_value(3, np.inf)),
        "tensor v_proj.weight_scale holds a value that is not finite",
    ),
    "scale too large": (
        "slim w8a8 dynamic",
        tensor("v_proj.weight_scale", set_value(3, 3e38)),
        "tensor v_proj.weight: a stored number times its scale exceeds float32; the file is damaged",
    ),
    "a bias": ("gptq4", tensor("k_proj.bias", set_value(3, 0.5)), "tensor k_proj.bias is not zero"),
    "g_idx out of range": ("gptq4", tensor("up_proj.g_idx", set_value(3, 4)), "up_proj.g_idx names a group that does"),
    "zero points of 8 bits": ("gptq8", tensor("q_proj.qzeros", set_value(0, 5)), "q_proj.qzeros has zero points"),
    "other shape": (
        "w4a16",
        tensor("q_proj.weight_shape", set_value(0, 17)),
        "tensor q_proj.weight_shape is [17, 128], not [16, 128]",
    ),
    "zero point of int8": (
        "w8a8",
        lambda t, c: t.update({"q_proj.weight_zero_point": np.ones((16, 1), np.int8)}),
        "q_proj.weight_zero_point is not zero",
    ),
    "unexpected": ("awq", lambda t, c: t.update({"q_proj.g_idx": np.zeros(128, np.int32)}), "q_proj.g_idx is in the"),
    "no quantization_config": ("awq", lambda t, c: c.clear(), "config.json has no quantization_config"),
    "unknown method": ("awq", setting("quant_method", "bitsandbytes"), "quant_method = 'bitsandbytes': is not supp"),
    "three bits": (
        "gptq4",
        setting("bits", 3),
        "quantization_config.bits = 3: is not supported in the format gptq; only 4 or 8",
    ),
    "marlin": ("gptq4", setting("checkpoint_format", "marlin"), "checkpoint_format = 'marlin': is not supported"),
    "module settings": ("gptq4", setting("dynamic", {"+:q": {"bits": 8}}), "settings of single modules"),
    "gemv": ("awq", setting("version", "gemv"), "version = 'gemv': is not supported; only gemm"),
    "static activations": (
        "w8a8",
        setting("config_groups.group_0.input_activations.dynamic", False),
        "config_groups.group_0.input_activations.dynamic = False: static scales of activations are not supported",
    ),
    "float weights": (
        "w8a8",
        setting("config_groups.group_0.weights.type", "float"),
        "config_groups.group_0.weights.type = 'float': is not supported; only int",
    ),
    "block scales": (
        "w8a8",
        setting("config_groups.group_0.weights.strategy", "block"),
        "weights.strategy = 'block': is not supported; only channel or group or tensor",
    ),
    "float8": ("w8a8", setting("format", "float-quantized"), "format = 'float-quantized': is not supported; only int-"),
    "two schemes": ("w8a8", setting("config_groups.group_1", {}), "must be exactly one group"),
    "some layers": (
        "w8a8",
        setting("config_groups.group_0.targets", ["re:.*q_proj"]),
        "config_groups.group_0.targets = ['re:.*q_proj']: is not supported",
    ),
    "quantised cache": ("w8a8", setting("kv_cache_scheme", {"num_bits": 8}), "kv_cache_scheme = {'num_bits': 8}: is"),
    "not compressed": ("w8a8", setting("quantization_status", "frozen"), "quantization_status = 'frozen'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused(tmp_path: Path, case: str) -> None:
    name, change, expected = BROKEN[case]
    folder = write_case(tmp_path, CASES[name], change)
    with pytest.raises(LLMServingError) as caught:
        load(folder)
    assert expected in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert isinstance(caught.value, CheckpointError)


def test_a_broken_json_is_named(tmp_path: Path) -> None:
    folder = write_case(tmp_path, Case("awq", 4, 64))
    (folder / "config.json").write_text(json.dumps({"quantization_config": "awq"}))
    with pytest.raises(CheckpointError, match=r"quantization_config = 'awq': must be a mapping"):
        load(folder)
