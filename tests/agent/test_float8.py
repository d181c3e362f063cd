"""Tests reading model folders whose weights are 8-bit floats with a scale for each block.

The tests cover exact values, parts of weights, and folders that are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import TensorSpec, serialize_file

from agent.weights import Packing, WeightPart, load_weights, open_weights
from agent.weights.cuts import TensorCut
from agent.weights.storage import Array, from_float32
from llm_serving.config import load_config
from llm_serving.errors import CheckpointError
from llm_serving.model.parallel import Span
from performance.models.folders import write_model
from performance.models.variants import FAMILY_VARIANTS
from support.model_folders import write_model_folder
from support.quantised_folders import FLOATS, LINEARS, SPECS, float_tensors

BLOCK = [6, 48]  # each scale covers 6 rows and 48 columns; most weights have other sizes than multiples of these
Stored = dict[str, tuple[str, np.ndarray]]
"""The safetensors type and the bits of each tensor."""


def settings(**changes: Any) -> dict[str, Any]:
    """Returns the ``quantization_config`` of DeepSeek V3."""
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": BLOCK,
    } | changes


def e4m3(code: int) -> Fraction:
    """Returns the exact value of an 8-bit float, by the definition of E4M3 (Micikevicius et al. 2022, table 1)."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    size = Fraction(mantissa, 8) * Fraction(1, 64)
    if exponent:
        size = (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    return -size if sign else size


def codes_and_scales(shape: tuple[int, int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns random codes of 8-bit floats without NaN, and a positive float32 scale for each block of them.

    Every code occurs if the tensor is large enough.
    """
    rng = np.random.default_rng(seed)
    codes = rng.permutation(np.resize(np.arange(256), shape[0] * shape[1])).reshape(shape)
    codes[(codes & 127) == 127] = 0x7E
    blocks = (-(-shape[0] // BLOCK[0]), -(-shape[1] // BLOCK[1]))
    return codes.astype(np.uint8), rng.uniform(1e-5, 1e-2, blocks).astype(np.float32)


def exact(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns each code times its scale. The product is exact and then rounded once to float32."""
    out = np.empty(codes.shape, np.float32)
    for row, column in np.ndindex(*codes.shape):
        scale = Fraction(float(scales[row // BLOCK[0], column // BLOCK[1]]))
        code = int(codes[row, column])
        out[row, column] = np.copysign(np.float32(abs(e4m3(code)) * scale), -1 if code >> 7 else 1)  # -0 is a value
    return out


def stored_tensors() -> Stored:
    stored: Stored = {name: ("float16", array) for name, array in float_tensors().items()}
    for seed, name in enumerate(LINEARS):
        codes, scales = codes_and_scales(LINEARS[name], seed)
        stored[name] = ("float8_e4m3fn", codes)
        stored[f"{name}_scale_inv"] = ("float32", scales)
    return stored


def write_folder(folder: Path, stored: Stored, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {name: (dtype, np.ascontiguousarray(array)) for name, (dtype, array) in stored.items()}
    specs = {
        name: TensorSpec(dtype=dtype, shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes)
        for name, (dtype, array) in arrays.items()
    }
    serialize_file(specs, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


def load(folder: Path, dtype: str = "float32", packing: Packing | None = None) -> dict[str, Array]:
    source = open_weights(folder, SPECS, seed=None)
    try:
        return load_weights(SPECS, source, dtype, lambda done, of: None, packing)
    finally:
        source.close()


def expected() -> dict[str, np.ndarray]:
    return {name: exact(*codes_and_scales(LINEARS[name], seed)) for seed, name in enumerate(LINEARS)}


def test_values_are_exact_products_rounded_once(tmp_path: Path) -> None:
    weights, values = load(write_folder(tmp_path / "m", stored_tensors(), settings())), expected()
    for parameter, names in (("qkv", list(LINEARS)[:3]), ("gate_up", list(LINEARS)[3:])):
        np.testing.assert_array_equal(weights[parameter], np.concatenate([values[name] for name in names]))
    np.testing.assert_array_equal(weights["norm"], float_tensors()["norm.weight"].astype(np.float32))


@pytest.mark.parametrize("weight_format", ["auto", "bf16", "int8", "int4"])
def test_a_folder_is_served_as_the_floats_that_it_means(tmp_path: Path, weight_format: str) -> None:
    own = load(write_folder(tmp_path / "own", stored_tensors(), settings()), "bfloat16", Packing(weight_format))
    floats: Stored = {name: ("float32", array) for name, array in expected().items()}
    floats |= {name: ("float16", array) for name, array in float_tensors().items()}
    # This folder has no scales, so its tensors are ordinary floats.
    folder = write_folder(tmp_path / "floats", floats, settings())
    wanted = load(folder, "bfloat16", Packing(weight_format))
    for name in wanted:
        assert own[name].tobytes() == wanted[name].tobytes(), name


def test_a_half_type_is_rounded_from_float32(tmp_path: Path) -> None:
    weights = load(write_folder(tmp_path / "m", stored_tensors(), settings()), "bfloat16")
    values = np.concatenate([expected()[name] for name in list(LINEARS)[:3]])
    np.testing.assert_array_equal(weights["qkv"], from_float32(values, "bfloat16"))


@pytest.mark.parametrize("scale_type", ["bfloat16", "float16"])
def test_scales_may_have_another_float_type(tmp_path: Path, scale_type: str) -> None:
    stored = stored_tensors()
    for name in LINEARS:
        scales = from_float32(stored[f"{name}_scale_inv"][1], scale_type)
        stored[f"{name}_scale_inv"] = (scale_type, scales)
    codes, _ = codes_and_scales(LINEARS["q_proj.weight"], 0)
    raw = stored["q_proj.weight_scale_inv"][1]
    scales = (raw.astype(np.uint32) << 16).view(np.float32) if scale_type == "bfloat16" else raw.astype(np.float32)
    weights = load(write_folder(tmp_path / "m", stored, settings()))
    np.testing.assert_array_equal(weights["qkv"][:16], exact(codes, scales))


@pytest.mark.parametrize("columns", [None, Span(40, 100)], ids=["rows", "block"])
def test_a_part_equals_the_slice_of_the_whole(tmp_path: Path, columns: Span | None) -> None:
    source = open_weights(write_folder(tmp_path / "m", stored_tensors(), settings()), SPECS, seed=None)
    name = "gate_proj.weight"
    cut = TensorCut(LINEARS[name], Span(5, 20), columns)
    part = np.empty(cut.shape, np.float32)
    source.read_into(name, part, "float32", cut)
    source.close()
    np.testing.assert_array_equal(part, cut.of(expected()[name]))
    assert source.scheme(WeightPart(name, LINEARS[name])) is None


def change(name: str, dtype: str, array: Any) -> Callable[[Stored], object]:
    return lambda stored: stored.update({name: (dtype, np.asarray(array))})


def with_code(code: int) -> Callable[[Stored], object]:
    def damage(stored: Stored) -> None:
        stored["k_proj.weight"][1][3, 7] = code

    return damage


SCALES = "q_proj.weight_scale_inv"
BROKEN: dict[str, tuple[Callable[[Stored], object], str]] = {
    "no scales": (lambda stored: stored.pop(SCALES), f"tensor {SCALES} is missing"),
    "no weight": (lambda stored: stored.pop("q_proj.weight"), "tensor q_proj.weight is missing"),
    "too few scales": (change(SCALES, "float32", np.ones((3, 2), np.float32)), r"shape \[3, 2\].*requires \[3, 3\]"),
    "flat scales": (change(SCALES, "float32", np.ones(9, np.float32)), r"shape \[9\].*requires \[3, 3\]"),
    "integer scales": (change(SCALES, "int32", np.ones((3, 3), np.int32)), "has type I32; in this format"),
    "infinite scale": (change(SCALES, "float32", np.full((3, 3), np.inf, np.float32)), "value that is not finite"),
    "huge scale": (change(SCALES, "float32", np.full((3, 3), 3e38, np.float32)), "its scale exceeds float32"),
    "weight of another shape": (
        change("q_proj.weight", "float8_e4m3fn", np.zeros((16, 64), np.uint8)),
        r"shape \[16, 64\].*requires \[16, 128\]",
    ),
    "another float": (
        change("q_proj.weight", "float8_e5m2", np.zeros((16, 128), np.uint8)),
        "type F8_E5M2; in this format it must be one of F8_E4M3",
    ),
    "floats with scales": (
        change("q_proj.weight", "float32", np.zeros((16, 128), np.float32)),
        "type F32; in this format it must be one of F8_E4M3",
    ),
    "positive NaN": (with_code(0x7F), "k_proj.weight holds a value that is not a number"),
    "negative NaN": (with_code(0xFF), "k_proj.weight holds a value that is not a number"),
    "scales of no weight": (change("x.weight_scale_inv", "float32", np.ones((1, 1), np.float32)), "x.weight_scale_inv"),
    "norm of 8 bits": (change("norm.weight", "float8_e4m3fn", np.zeros(FLOATS["norm.weight"], np.uint8)), "F8_E4M3"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused(tmp_path: Path, case: str) -> None:
    damage, message = BROKEN[case]
    stored = stored_tensors()
    damage(stored)
    folder = write_folder(tmp_path / "m", stored, settings())
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_8_bit_floats_without_a_setting_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", stored_tensors(), settings())
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"q_proj\.weight_scale_inv"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fmt": "e5m2"}, r"fmt = 'e5m2': is not supported; only e4m3"),
        ({"activation_scheme": "static"}, r"activation_scheme = 'static': is not supported; only dynamic"),
        ({"weight_block_size": None}, r"weight_block_size = null: must be two integers"),
        ({"weight_block_size": [128]}, r"weight_block_size = \[128\]: must be two integers"),
        ({"weight_block_size": [128, 0]}, r"weight_block_size = \[128, 0\]: must be two integers"),
        ({"weight_block_size": [True, 128]}, r"weight_block_size = \[True, 128\]: must be two integers"),
        ({"weight_block_size": [128, 10**9]}, r"must be two integers from 1 to 65536"),
        ({"weight_block_size": "128"}, r"weight_block_size = '128': must be two integers"),
    ],
)
def test_other_settings_are_refused_with_the_config(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_model_folder(tmp_path / "m", quantization_config=settings(**changes))
    with pytest.raises(CheckpointError, match=message):
        load_config("llama_tiny_cpu.yaml", [f"model_config.model_path={folder}"])


@pytest.mark.parametrize(("wanted", "used"), [("auto", "bfloat16"), ("int8", "int8")])
def test_the_config_of_a_folder_is_that_of_floats(tmp_path: Path, wanted: str, used: str) -> None:
    folder = write_model_folder(tmp_path / "m", quantization_config=settings())
    overrides = [f"model_config.model_path={folder}", f"model_config.weight_format={wanted}"]
    config = load_config("llama_tiny_cpu.yaml", [*overrides, "model_config.model_dtype=bfloat16"])
    assert config.stored_weight_format is None
    assert config.weight_format == used


def test_a_deepseek_folder_loads_with_its_extra_layer(tmp_path: Path) -> None:
    """A model folder may have an extra layer that is not loaded. Its weights and their scales are ignored."""
    from agent.models.names import ignorable_suffixes, weight_specs
    from agent.weights.checkpoint import Checkpoint

    write_model(FAMILY_VARIANTS["deepseek_v3"], tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values |= {"num_nextn_predict_layers": 1, "quantization_config": settings()}
    (tmp_path / "config.json").write_text(json.dumps(values))
    shape = load_config("llama_tiny_cpu.yaml", [f"model_config.model_path={tmp_path}"]).shape
    specs = weight_specs(shape)
    floats = Checkpoint(tmp_path)
    stored: Stored = {}
    wanted = {}
    for seed, part in enumerate(part for spec in specs for part in spec.tensors):
        if part.name.endswith("_proj.weight"):
            codes, scales = codes_and_scales(part.shape, seed)
            stored |= {part.name: ("float8_e4m3fn", codes), f"{part.name}_scale_inv": ("float32", scales)}
            wanted[part.name] = exact(codes[:2], scales)
        else:
            out = np.empty(part.shape, np.float32)
            floats.read_into(part.name, out, "float32")
            stored[part.name] = ("float32", out)
    floats.close()
    extra = f"model.layers.{shape.num_layers}.self_attn.o_proj.weight"
    codes, scales = codes_and_scales((8, 128), 0)
    stored |= {extra: ("float8_e4m3fn", codes), f"{extra}_scale_inv": ("float32", scales)}
    write_folder(tmp_path / "fp8", stored, settings())
    source = open_weights(tmp_path / "fp8", specs, seed=None, ignorable=ignorable_suffixes(shape))
    assert len(wanted) > 20
    for name, rows in wanted.items():
        out = np.empty(stored[name][1].shape, np.float32)
        source.read_into(name, out, "float32")
        np.testing.assert_array_equal(out[:2], rows)
    source.close()
