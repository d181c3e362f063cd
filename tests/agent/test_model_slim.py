"""Folders of msModelSlim: damaged tensors are refused by name, and static layers compute the formula of the format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.weights import Packing, WeightPart, WeightSpec, load_weights, open_weights
from agent.weights.cuts import TensorCut
from agent.weights.forms import linear_forms
from agent.weights.storage import Array
from llm_serving.errors import CheckpointError, ConfigError
from llm_serving.model.parallel import Span
from performance.kernels.linear_calls import linear
from support.quantised_folders import (
    CASES,
    DEPTH,
    INPUT_OFFSET,
    INPUT_SCALE,
    LINEARS,
    SPECS,
    Tensors,
    write_case,
)

Change = Callable[[Tensors, dict[str, Any]], object]
Q = WeightPart("q_proj.weight", LINEARS["q_proj.weight"])


def put(name: str, place: tuple[int, ...], value: float) -> Change:
    """Makes a change of one element of the tensor ``name``."""

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[name] = tensors[name].copy()
        tensors[name][place] = value

    return change


def as_bits(name: str, first: int | None = None) -> Change:
    """Makes a change of float32 to their bits as int64, and of the first of them to ``first``."""

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[name] = tensors[name].view(np.uint32).astype(np.int64)
        if first is not None:
            tensors[name][0] = first

    return change


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        (
            "slim w8a8 dynamic",
            put("q_proj.weight_offset", (3, 0), 1),
            r"q_proj\.weight_offset is not zero; 8-bit weights",
        ),
        ("slim w8a8 dynamic", put("q_proj.weight_scale", (3, 0), np.nan), r"q_proj\.weight_scale holds a value that"),
        ("slim w4a16 unpacked", put("q_proj.weight", (0, 0), 8), r"q_proj\.weight has integers outside of -8 to 7"),
        ("slim w4a16 unpacked", put("q_proj.weight", (0, 0), -9), r"q_proj\.weight has integers outside of -8 to 7"),
        ("slim w4a16", put("q_proj.weight_offset", (0, 1), 0.5), r"q_proj\.weight_offset must have whole numbers from"),
        ("slim w8a8 static", put("q_proj.input_scale", (0,), 0), r"q_proj\.input_scale must be above 0"),
        (
            "slim w8a8 static",
            put("q_proj.input_offset", (0,), np.inf),
            r"q_proj\.input_offset holds a value that is not",
        ),
        ("slim w8a8 static", put("q_proj.deq_scale", (3,), np.nan), r"q_proj\.deq_scale holds a value that is not"),
        (
            "slim w8a8 static",
            as_bits("q_proj.deq_scale", -1),
            r"q_proj\.deq_scale holds an integer that is not the bits",
        ),
        ("slim w4a16", put("q_proj.weight_offset", (0, 1), -9), r"q_proj\.weight_offset must have whole numbers from"),
    ],
)
def test_damaged_values_are_refused(tmp_path: Path, case: str, change: Change, message: str) -> None:
    source = open_weights(write_case(tmp_path, CASES[case], change), SPECS, seed=None)
    with pytest.raises(CheckpointError, match=message):
        source.read_quantised(Q)
    source.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, c: t.update({"q_proj.weight": t["q_proj.weight"][:, :8]}), r"q_proj\.weight has shape \[16, 8\]"),
        (lambda t, c: t.update({"q_proj.weight": t["q_proj.weight"].astype(np.int32)}), r"q_proj\.weight has type I32"),
        (lambda t, c: t.pop("q_proj.weight_scale"), r"q_proj\.weight_scale missing from the weights"),
        (
            lambda t, c: t.update({"q_proj.clip_ratio": np.ones(1, np.float32)}),
            r"q_proj\.clip_ratio in the weights but",
        ),
        (lambda t, c: c.update({"q_proj.weight": "FLOAT"}), r"q_proj\.weight"),
    ],
)
def test_tensors_that_do_not_fit_the_description_are_refused(tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_weights(write_case(tmp_path, CASES["slim w8a8 dynamic"], change), SPECS, seed=None)


@pytest.mark.parametrize("name", ["quant_model_weight_w8a8_dynamic", "quant-model-00001-00001"])
def test_names_of_other_versions_are_found(tmp_path: Path, name: str) -> None:
    folder = write_case(tmp_path, CASES["slim w8a8 dynamic"])
    (folder / "quant_model_weights.safetensors").rename(folder / f"{name}.safetensors")
    source = open_weights(folder, SPECS, seed=None)
    assert source.read_quantised(Q).values.shape == Q.shape
    source.close()


def packed_weights(folder: Path, specs: tuple[WeightSpec, ...] = SPECS, fmt: str = "auto") -> dict[str, Array]:
    source = open_weights(folder, specs, seed=None)
    try:
        return load_weights(specs, source, "float32", lambda done, of: None, Packing(fmt))
    finally:
        source.close()


def static_product(x: np.ndarray, names: list[str]) -> np.ndarray:
    """Returns the product with weights of scheme W8A8, by the formula of the format's description."""
    q = np.clip(np.rint(x / np.float32(INPUT_SCALE) + INPUT_OFFSET), -128, 127).astype(np.int64)
    parts = []
    for name in names:
        tensors = CASES["slim w8a8 static"].encode(name)
        stem = name.removesuffix(".weight")
        sums = q @ tensors[name].T.astype(np.int64) + tensors[f"{stem}.quant_bias"]
        parts.append(sums.astype(np.float32) * tensors[f"{stem}.deq_scale"])
    return np.concatenate(parts, axis=1)


X = np.random.default_rng(8).standard_normal((5, DEPTH)).astype(np.float32) * 3
QKV = list(LINEARS)[:3]


@pytest.mark.parametrize("fmt", ["auto", "int8"])
def test_static_layers_compute_the_formula_of_the_format(tmp_path: Path, fmt: str) -> None:
    weights = packed_weights(write_case(tmp_path, CASES["slim w8a8 static"]), fmt=fmt)
    np.testing.assert_array_equal(linear(X, weights["qkv"], "float32"), static_product(X, QKV))


def test_scales_for_float16_models_are_bits(tmp_path: Path) -> None:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in LINEARS:
            as_bits(name.removesuffix("weight") + "deq_scale")(tensors, config)

    weights = packed_weights(write_case(tmp_path, CASES["slim w8a8 static"], change))
    np.testing.assert_array_equal(linear(X, weights["qkv"], "float32"), static_product(X, QKV))


def test_a_scale_for_each_input_is_used_by_input(tmp_path: Path) -> None:
    factors = np.exp2(np.random.default_rng(2).integers(-1, 2, DEPTH)).astype(np.float32)

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        for stem in (name.removesuffix(".weight") for name in LINEARS):
            tensors[f"{stem}.input_scale"] = factors * np.float32(INPUT_SCALE)
            tensors[f"{stem}.input_offset"] = np.full(DEPTH, INPUT_OFFSET, np.int8)

    folder = write_case(tmp_path, CASES["slim w8a8 static"], change)
    np.testing.assert_array_equal(linear(X * factors, packed_weights(folder)["qkv"], "float32"), static_product(X, QKV))
    with pytest.raises(CheckpointError, match="its inputs have different scales; use"):
        packed_weights(folder, fmt="int8_weight_only")


@pytest.mark.parametrize("golden_stick", [False, True])
def test_the_bias_of_a_static_layer_is_added_once(tmp_path: Path, golden_stick: bool) -> None:
    bias = {name: np.linspace(1, 2, LINEARS[name][0], dtype=np.float32) for name in QKV}

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in QKV:
            tensors[name.replace("weight", "bias")] = bias[name]

    folder = write_case(tmp_path, CASES["slim w8a8 static"], change)
    if golden_stick:
        (folder / "quant_model_description.json").rename(folder / "quantization_description.json")
    parts = tuple(WeightPart(name.replace("weight", "bias"), bias[name].shape) for name in QKV)
    specs = (SPECS[0], replace(SPECS[1], parameter="qkv.weight", bias=parts), *SPECS[2:])
    found = linear(X, packed_weights(folder, specs)["qkv.weight"], "float32")
    separate = np.concatenate(list(bias.values())) if golden_stick else np.float32(0)
    np.testing.assert_array_equal(found, static_product(X, QKV) + separate)


def test_layers_with_the_same_inputs_need_the_same_numbers(tmp_path: Path) -> None:
    folder = write_case(tmp_path, CASES["slim w8a8 static"], put("k_proj.input_scale", (0,), 1))
    with pytest.raises(CheckpointError, match=r"k_proj\.weight: its input_scale or .* not that of q_proj\.weight"):
        packed_weights(folder)
    mixed = write_case(tmp_path, CASES["slim w8a8 static"], dynamic_key)
    with pytest.raises(CheckpointError, match=r"k_proj\.weight is stored as int8 .*, q_proj\.weight as .* and static"):
        packed_weights(mixed)


def dynamic_key(tensors: Tensors, config: dict[str, Any]) -> None:
    for end in ("deq_scale", "quant_bias", "input_scale", "input_offset"):
        tensors.pop(f"k_proj.{end}")
    tensors |= CASES["slim w8a8 dynamic"].encode("k_proj.weight")
    config["k_proj.weight"] = "W8A8_DYNAMIC"


def test_weights_alone_have_their_own_scale(tmp_path: Path) -> None:
    folder = write_case(tmp_path, CASES["slim w8a8 static"])
    found = packed_weights(folder, fmt="int8_weight_only")["qkv"]
    exact = np.concatenate([CASES["slim w8a8 static"].plain(name).value() for name in QKV])
    np.testing.assert_allclose(linear(X, found, "float32"), X @ exact.T, rtol=1e-5, atol=1e-4)


def test_agents_that_share_the_inputs_add_the_offsets_once(tmp_path: Path) -> None:
    source = open_weights(write_case(tmp_path, CASES["slim w8a8 static"]), SPECS, seed=None)
    whole = source.read_quantised(Q).inputs
    halves = [
        source.read_quantised(Q, TensorCut(Q.shape, Span(0, Q.shape[0]), Span(at, at + DEPTH // 2))).inputs
        for at in (0, DEPTH // 2)
    ]
    source.close()
    assert whole is not None
    assert halves[0] is not None
    assert halves[1] is not None
    np.testing.assert_array_equal(halves[0].sum_offsets, whole.sum_offsets)
    assert not halves[1].sum_offsets.any()
    np.testing.assert_array_equal(np.concatenate([each.inverses for each in halves if each]), whole.inverses)


def test_native_operators_refuse_static_inputs(tmp_path: Path) -> None:
    source = open_weights(write_case(tmp_path, CASES["slim w8a8 static"]), SPECS, seed=None)
    with pytest.raises(ConfigError, match=r"tensor q_proj\.weight has static inputs \(W8A8\), which the native graph"):
        linear_forms(SPECS, source, Packing("int8"))
    assert linear_forms(SPECS, source, Packing("auto")).layers.is_float
    source.close()
