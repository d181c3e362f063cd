"""Tests folders of msModelSlim.

An error about a damaged tensor names it. Layers with static quantisation follow the formula of the format.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from agent.models.names import weight_specs
from agent.weights import Packing, WeightPart, WeightSpec, load_weights, open_weights
from agent.weights.cuts import TensorCut
from agent.weights.forms import LinearForms, linear_forms
from agent.weights.storage import Array, to_float32
from llm_serving.config import load_config
from llm_serving.errors import CheckpointError, ConfigError
from llm_serving.model.parallel import Span
from performance.kernels.linear_calls import linear
from performance.models.folders import write_model
from performance.models.variants import VARIANTS
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
from support.static_model import StaticLlama

Change = Callable[[Tensors, dict[str, Any]], object]
Q = WeightPart("q_proj.weight", LINEARS["q_proj.weight"])


def put(name: str, place: tuple[int, ...], value: float) -> Change:
    """Returns a change that replaces one element of the tensor ``name``."""

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[name] = tensors[name].copy()
        tensors[name][place] = value

    return change


def as_bits(name: str, first: int | None = None) -> Change:
    """Returns a change that stores a float32 tensor as int64: each integer is the 32-bit pattern of one float.

    If ``first`` is given, this integer replaces the first element.
    """

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
        (lambda t, c: t.pop("q_proj.weight_scale"), r"q_proj\.weight_scale is missing from the weights"),
        (
            lambda t, c: t.update({"q_proj.clip_ratio": np.ones(1, np.float32)}),
            r"q_proj\.clip_ratio is in the weights but",
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
    """Returns x times the weights of scheme W8A8, by the formula in the format's description."""
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


def native_weights(
    folder: Path, specs: tuple[WeightSpec, ...] = SPECS, fmt: str = "int8"
) -> tuple[LinearForms, dict[str, Array]]:
    """Returns the layouts of the weights for native operators, and the loaded parameters. Floats become float32."""
    source = open_weights(folder, specs, seed=None)
    try:
        forms = linear_forms(specs, source, Packing(fmt))
        found = load_weights(specs, source, "bfloat16", lambda done, of: None, forms=forms)
    finally:
        source.close()
    return forms, {name: to_float32(a, "bfloat16") if a.dtype == np.uint16 else a for name, a in found.items()}


@pytest.mark.parametrize("golden_stick", [False, True])
def test_native_operators_get_the_numbers_of_static_layers(tmp_path: Path, golden_stick: bool) -> None:
    """QuantV2 and QuantBatchMatmul compute the formula of the format from the loaded parameters.

    The inverse of the input scale has few digits here, so bfloat16 holds it exactly. ``quant_bias`` of msModelSlim
    contains the bias of the layer, which then has no parameter.
    """
    biases = tuple(WeightPart(name.replace("weight", "bias"), LINEARS[name][:1]) for name in QKV)

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors |= {each.name: np.ones(each.shape, np.float32) for each in biases}

    folder = write_case(tmp_path, CASES["slim w8a8 static"], change)
    if golden_stick:
        (folder / "quant_model_description.json").rename(folder / "quantization_description.json")
    specs = (SPECS[0], replace(SPECS[1], parameter="qkv.weight", bias=biases), *SPECS[2:])
    forms, found = native_weights(folder, specs)
    assert forms.layers.is_static
    assert ("qkv.bias" in found) == golden_stick
    q = np.clip(np.rint(X * found["qkv.input_scale"] + found["qkv.input_offset"]), -128, 127)
    sums = q.astype(np.int64) @ found["qkv.weight"].T.astype(np.int64) + found["qkv.sum_offset"]
    np.testing.assert_array_equal(sums.astype(np.float32) * found["qkv.scale"], static_product(X, QKV))


def test_native_weights_alone_have_their_own_scale(tmp_path: Path) -> None:
    folder = write_case(tmp_path, CASES["slim w8a8 static"])
    forms, found = native_weights(folder, fmt="int8_weight_only")
    assert not forms.layers.is_static
    exact = np.concatenate([CASES["slim w8a8 static"].plain(name).value() for name in QKV])
    np.testing.assert_allclose(found["qkv.weight"] * found["qkv.scale"][:, None], exact, rtol=0.01)
    assert native_weights(folder, fmt="auto")[0].layers.is_float


def test_native_static_layers_need_bfloat16(tmp_path: Path) -> None:
    forms, _ = native_weights(write_case(tmp_path, CASES["slim w8a8 static"]))
    forms.check_type("bfloat16")
    with pytest.raises(ConfigError, match=r"model_dtype = float16 .* static inputs \(W8A8\) need bfloat16; use"):
        forms.check_type("float16")


def test_native_experts_refuse_static_inputs(tmp_path: Path) -> None:
    source = open_weights(write_case(tmp_path, CASES["slim w8a8 static"]), SPECS, seed=None)
    expert = WeightSpec("up", SPECS[1].parts[1:], "linear", experts=2)
    with pytest.raises(ConfigError, match=r"k_proj\.weight has static inputs \(W8A8\), which GroupedMatmulV4 does not"):
        linear_forms((expert,), source, Packing("int8"))
    source.close()


NORM = "model.layers.0.input_layernorm.bias"
Stored = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a folder of scheme W8A8 whose norms have biases."""
    folder = tmp_path_factory.mktemp("biased")
    write_model(VARIANTS["mha"], folder / "floats")
    StaticLlama(folder / "floats", list(range(20, 40)), norm_biases=True).write(folder / "static", folder / "floats")
    return folder / "static"


def changed(
    biased: Path, folder: Path, change: Callable[[Stored], object], schemes: dict[str, str] | None = None
) -> tuple[Path, list[WeightSpec]]:
    """Copies the folder ``biased`` with changed tensors and schemes.

    Returns the copy and the specifications of its weights.
    """
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((biased / name).read_bytes())
    tensors = load_file(biased / "quant_model_weights.safetensors")
    change(tensors)
    save_file(tensors, folder / "quant_model_weights.safetensors")
    description = json.loads((biased / "quant_model_description.json").read_text()) | (schemes or {})
    (folder / "quant_model_description.json").write_text(json.dumps(description))
    shape = load_config("llama_tiny_cpu.yaml", [f"model_config.model_path={folder}"], ascend=False).shape
    return folder, weight_specs(shape)


def read(folder: Path, specs: list[WeightSpec], weight_format: str = "auto") -> dict[str, Array]:
    source = open_weights(folder, specs, seed=None)
    try:
        return load_weights(specs, source, "float32", lambda done, of: None, Packing(weight_format))
    finally:
        source.close()


def test_the_bias_of_a_norm_is_in_the_offsets_of_the_layers_behind_it(tmp_path: Path, biased: Path) -> None:
    """An offset plus a shift can be near 0. The bound is therefore relative to the terms, not to their sum.

    float32 rounds the inverse of the scale, the product and the sum, each by at most half of ``eps``.
    """
    folder, specs = changed(biased, tmp_path / "m", lambda tensors: None)
    tensors = load_file(folder / "quant_model_weights.safetensors")
    source = open_weights(folder, specs, seed=None)
    parts = {part.name: part for spec in specs for part in spec.tensors}
    for stem, norm in (("self_attn.v_proj", "input_layernorm"), ("mlp.up_proj", "post_attention_layernorm")):
        name = f"model.layers.1.{stem}"
        found = source.read_quantised(parts[f"{name}.weight"]).inputs
        assert found is not None
        bias, scale, offset = (
            tensors[each].astype(np.float64)
            for each in (f"model.layers.1.{norm}.bias", f"{name}.input_scale", f"{name}.input_offset")
        )
        bound = np.finfo(np.float32).eps * (2 * np.abs(bias / scale) + np.abs(offset))
        assert (np.abs(found.offsets - (offset + bias / scale)) <= bound).all()
        np.testing.assert_array_equal(found.sum_offsets, tensors[f"{name}.quant_bias"])
    down = source.read_quantised(parts["model.layers.1.mlp.down_proj.weight"]).inputs
    assert down is not None
    assert (down.offsets == tensors["model.layers.1.mlp.down_proj.input_offset"]).all()
    source.close()


@pytest.mark.parametrize("weight_format", ["bf16", "int8_weight_only"])
def test_a_norm_with_a_bias_is_refused_by_formats_without_static_inputs(
    tmp_path: Path, biased: Path, weight_format: str
) -> None:
    folder, specs = changed(biased, tmp_path / "m", lambda tensors: None)
    with pytest.raises(CheckpointError, match=r"_proj\.weight: the norm before it has a bias, which only static"):
        read(folder, specs, weight_format)


@pytest.mark.parametrize("weight_format", ["auto", "bf16"])
def test_biases_of_zero_change_nothing(tmp_path: Path, biased: Path, weight_format: str) -> None:
    def zero(tensors: Stored) -> None:
        tensors |= {name: np.zeros_like(array) for name, array in tensors.items() if name.endswith("norm.bias")}
        tensors["model.norm.bias"] = np.zeros_like(tensors["model.norm.weight"])

    def remove(tensors: Stored) -> None:
        for name in [name for name in tensors if name.endswith("norm.bias")]:
            del tensors[name]

    one, two = (read(*changed(biased, tmp_path / change.__name__, change), weight_format) for change in (zero, remove))
    assert {name: array.tobytes() for name, array in one.items()} == {
        name: array.tobytes() for name, array in two.items()
    }


@pytest.mark.parametrize(
    ("change", "schemes", "message"),
    [
        (lambda tensors: tensors.update({NORM: np.ones(7, np.float32)}), {}, r"input_layernorm\.bias has shape \[7\]"),
        (lambda tensors: tensors.update({NORM: np.ones(128, np.int32)}), {}, r"input_layernorm\.bias has type I32"),
        (
            lambda tensors: tensors[NORM].__setitem__(3, np.inf),
            {},
            r"input_layernorm\.bias holds a value that is not finite",
        ),
        (
            lambda tensors: tensors.update({"model.norm.bias": np.ones_like(tensors["model.norm.weight"])}),
            {"model.norm.bias": "FLOAT"},
            r"model\.norm\.bias is not zero; .* \(this norm has none\)",
        ),
        (
            lambda tensors: tensors.update({"other.norm.bias": np.ones(4, np.float32)}),
            {},
            r"tensor other\.norm\.bias is in the weights but not in a model",
        ),
    ],
)
def test_a_bias_that_cannot_be_used_is_refused(
    tmp_path: Path, biased: Path, change: Callable[[Stored], object], schemes: dict[str, str], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(*changed(biased, tmp_path / "m", change, schemes))


def test_a_bias_before_a_layer_of_another_scheme_is_refused(tmp_path: Path, biased: Path) -> None:
    schemes = {"model.layers.0.self_attn.k_proj.weight": "W8A8_DYNAMIC"}

    def to_dynamic(tensors: Stored) -> None:
        stem = "model.layers.0.self_attn.k_proj"
        for end in ("input_scale", "input_offset", "quant_bias"):
            del tensors[f"{stem}.{end}"]
        tensors[f"{stem}.weight_scale"] = tensors.pop(f"{stem}.deq_scale")

    with pytest.raises(CheckpointError, match=r"input_layernorm\.bias is not zero; the bias of a norm is supported"):
        read(*changed(biased, tmp_path / "m", to_dynamic, schemes))
