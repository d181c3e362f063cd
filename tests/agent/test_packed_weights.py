"""Tests packing linear layers for the kernels, from floats and from stored integers.

Unsupported formats are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.kernels.packing import pack_weight, packed_weight_bytes, weight_blob
from agent.weights import Packing, WeightPart, WeightSpec, load_weights, open_weights
from agent.weights.storage import Array
from llm_serving.errors import CheckpointError, ConfigError
from performance.kernels.linear_calls import linear
from support.quantised_folders import CASES, LINEARS, SPECS, write_case

NAMES = {"qkv": list(LINEARS)[:3], "gate_up": list(LINEARS)[3:]}
DUMMY_SPECS = (
    WeightSpec("embedding.weight", (WeightPart("embed", (80, 96)),)),
    WeightSpec("qkv", (WeightPart("q", (64, 96)), WeightPart("k", (32, 96)), WeightPart("v", (32, 96))), "linear"),
    WeightSpec("gate_up", (WeightPart("gate", (64, 96)), WeightPart("up", (64, 96))), "gated_linear"),
    WeightSpec("lm_head.weight", (WeightPart("embed", (80, 96)),), "linear", packed_only=True),
)


def blob_of(fmt: str, values: np.ndarray, *, group: int = 0, **options: Any) -> Array:
    blob = weight_blob(packed_weight_bytes(fmt, *values.shape, group))
    pack_weight(fmt, np.ascontiguousarray(values), blob, group=group, **options)
    return blob


def load(folder: Path | None, packing: Packing | None, dtype: str = "float32", specs: Any = SPECS) -> dict[str, Array]:
    source = open_weights(folder, specs, seed=3 if folder is None else None)
    try:
        return load_weights(specs, source, dtype, lambda done, of: None, packing)
    finally:
        source.close()


@pytest.mark.parametrize("asked", ["auto", "the same"])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.scheme != "W8A8"])
def test_stored_integers_are_packed_without_change(tmp_path: Path, name: str, asked: str) -> None:
    case, fmt = CASES[name], "int4" if CASES[name].bits == 4 else "int8"
    weights = load(write_case(tmp_path, case), Packing("auto" if asked == "auto" else fmt))
    for parameter, parts in NAMES.items():
        plain = [case.plain(part) for part in parts]
        values = np.concatenate([each.q for each in plain])
        zeros = np.concatenate([each.zeros for each in plain]).astype(np.uint8)
        expected = blob_of(
            fmt,
            values.astype(np.uint8) if fmt == "int4" else (values - 128).astype(np.int8),
            group=case.group,
            gated=parameter == "gate_up",
            scales=np.concatenate([each.scales for each in plain]),
            zeros=zeros if case.asymmetric else None,
        )
        np.testing.assert_array_equal(weights[parameter], expected)
    assert weights["norm"].dtype == np.float32
    assert weights["embed"].shape == (10, 128)


@pytest.mark.parametrize("name", ["gptq4 asymmetric", "w8a8"])
def test_a_float_format_dequantises_stored_integers(tmp_path: Path, name: str) -> None:
    folder = write_case(tmp_path, CASES[name])
    plain, packed = load(folder, None, "bfloat16"), load(folder, Packing("bf16"), "bfloat16")
    for parameter in NAMES:
        expected = blob_of("bfloat16", plain[parameter], gated=parameter == "gate_up", source_dtype="bfloat16")
        np.testing.assert_array_equal(packed[parameter], expected)


def test_int8_may_keep_activations_as_floats(tmp_path: Path) -> None:
    case = CASES["w8a8"]
    weights = load(write_case(tmp_path, case), Packing("int8_weight_only"))
    values = np.concatenate([case.plain(part).value() for part in NAMES["qkv"]])
    x = np.eye(128, dtype=np.float32)
    np.testing.assert_array_equal(linear(x, weights["qkv"], "float32"), values.T)


def test_int4_may_keep_activations_as_floats(tmp_path: Path) -> None:
    """If activations stay floats, the packed weight has exactly the integers, scales and zero points of the folder."""
    case = CASES["gptq4 asymmetric"]
    weights = load(write_case(tmp_path, case), Packing("int4_weight_only"))
    values = np.concatenate([case.plain(part).value() for part in NAMES["qkv"]])
    x = np.eye(128, dtype=np.float32)
    np.testing.assert_array_equal(linear(x, weights["qkv"], "float32"), values.T)


@pytest.mark.parametrize(
    "packing",
    [Packing(name) for name in ("auto", "int8", "int8_weight_only", "int4", "int4_weight_only")],
    ids=lambda packing: packing.weight_format,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_floats_are_packed_from_the_values_that_other_tables_get(packing: Packing, dtype: str) -> None:
    plain, packed = load(None, None, dtype, DUMMY_SPECS), load(None, packing, dtype, DUMMY_SPECS)
    assert list(plain) == ["embedding.weight", "qkv", "gate_up"]
    assert list(packed) == [*plain, "lm_head.weight"]
    fmt = dtype if packing.weight_format == "auto" else packing.weight_format
    for parameter in ("qkv", "gate_up", "lm_head.weight"):
        values = plain["embedding.weight" if parameter == "lm_head.weight" else parameter]
        group, gated = 64 if fmt.startswith("int4") else 0, parameter == "gate_up"
        np.testing.assert_array_equal(
            packed[parameter], blob_of(fmt, values, group=group, gated=gated, source_dtype=dtype)
        )
        assert packed[parameter].ctypes.data % 64 == 0


def test_the_output_layer_may_have_a_format_of_its_own() -> None:
    plain = load(None, None, "bfloat16", DUMMY_SPECS)
    packed = load(None, Packing("int4", output_format="int8"), "bfloat16", DUMMY_SPECS)
    expected = {"qkv": blob_of("int4", plain["qkv"], group=64, source_dtype="bfloat16")}
    expected["lm_head.weight"] = blob_of("int8", plain["embedding.weight"], source_dtype="bfloat16")
    for name, blob in expected.items():
        np.testing.assert_array_equal(packed[name], blob)


def test_floats_get_zero_points_if_asymmetric() -> None:
    plain = load(None, None, "float32", DUMMY_SPECS)["qkv"]
    packed = load(None, Packing("int4", 32, asymmetric=True), "float32", DUMMY_SPECS)["qkv"]
    np.testing.assert_array_equal(packed, blob_of("int4", plain, group=32, asymmetric=True))


def test_a_float_file_is_quantised_from_its_stored_type(tmp_path: Path) -> None:
    """A float16 weight becomes int8 directly. Rounding it to bfloat16, the model's type, first would lose bits."""
    from safetensors.numpy import save_file

    from support.quantised_folders import float_tensors

    spec = (WeightSpec("embed", (WeightPart("embed.weight", (10, 128)),), "linear"),)
    values = float_tensors()["embed.weight"]
    save_file({"embed.weight": values}, tmp_path / "model.safetensors")
    packed = load(tmp_path, Packing("int8"), "bfloat16", spec)["embed"]
    np.testing.assert_array_equal(packed, blob_of("int8", values, source_dtype="float16"))


REFUSED: dict[str, tuple[str, Packing, str]] = {
    "int4 as int8": ("awq", Packing("int8"), "weight_format = int8: tensor q_proj.weight is stored as int4; use auto"),
    "int8 as int4": ("w8a8", Packing("int4"), "weight_format = int4: tensor q_proj.weight is stored as int8; use auto"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_conversions_are_config_errors(tmp_path: Path, case: str) -> None:
    name, packing, expected = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        load(write_case(tmp_path, CASES[name]), packing)
    assert expected in str(caught.value)


def test_desc_act_is_refused_naming_the_tensor(tmp_path: Path) -> None:
    groups = (np.arange(128)[::-1] // 32).astype(np.int32)
    folder = write_case(tmp_path, CASES["gptq4"], lambda t, c: t.update({"k_proj.g_idx": groups}))
    with pytest.raises(CheckpointError, match=r"tensor k_proj\.weight: its groups are not consecutive inputs"):
        load(folder, Packing("auto"))
    assert load(folder, Packing("bf16"), "bfloat16").keys() == {"embed", "qkv", "gate_up", "norm"}


def test_parts_of_one_parameter_must_agree(tmp_path: Path) -> None:
    def unquantise(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        for name in [each for each in tensors if each.startswith("up_proj")]:
            del tensors[name]
        tensors["up_proj.weight"] = np.ones((24, 128), np.float16)

    folder = write_case(tmp_path, CASES["awq"], unquantise)
    expected = (
        r"tensor up_proj\.weight is stored as floats, gate_proj\.weight as int4 with groups of 64; "
        r"the two are one parameter \(gate_up\) and must agree"
    )
    with pytest.raises(CheckpointError, match=expected):
        load(folder, Packing("auto"))


def test_a_quantised_folder_feeds_the_kernel(tmp_path: Path) -> None:
    case = CASES["gptq4 asymmetric"]
    weights = load(write_case(tmp_path, case), Packing("auto"))
    x = np.random.default_rng(0).standard_normal((5, 128)).astype(np.float32)
    expected = x @ np.concatenate([case.plain(part).value() for part in NAMES["qkv"]]).T
    difference = linear(x, weights["qkv"], "float32") - expected
    assert np.abs(difference).max() < 0.02 * np.abs(expected).max()
