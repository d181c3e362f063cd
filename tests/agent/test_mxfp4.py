"""Tests reading experts of 4-bit floats (MXFP4) from gpt-oss folders and from blocks of GGUF files.

``test_families.py`` compares the tokens of a folder with those of transformers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from agent.models.names import ignorable_suffixes, weight_specs
from agent.weights import WeightPart, WeightSource, load_weights, open_weights
from agent.weights.cuts import TensorCut
from agent.weights.gguf.blocks import to_floats, to_integers
from agent.weights.quantized import Scheme
from agent.weights.storage import Array
from llm_serving.config import load_config
from llm_serving.errors import CheckpointError
from llm_serving.gguf.header import TENSOR_TYPES
from llm_serving.model.parallel import Span
from llm_serving.model.shape import ModelShape
from llm_serving.planning.rank_memory import WEIGHTS, device_items
from performance.models.folders import write_model, write_safetensors
from performance.models.variants import FAMILY_VARIANTS, Variant

STORED, FLOATS = FAMILY_VARIANTS["gpt_oss_mxfp4"], FAMILY_VARIANTS["gpt_oss"]
INNER, HIDDEN, EXPERTS = 96, 64, 5
GATE, UP, DOWN = (f"model.layers.1.mlp.experts.3.{name}_proj.weight" for name in ("gate", "up", "down"))
BLOCKS, SCALES = (f"model.layers.1.mlp.experts.gate_up_proj_{end}" for end in ("blocks", "scales"))
MXFP4 = next(kind for kind in TENSOR_TYPES.values() if kind.name == "MXFP4")


def e2m1(code: int) -> float:
    """Returns the value of a 4-bit float, by the definition in section 5.3.3 of the specification."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if sign else size


def values_of(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the values of blocks [..., groups, 16] with scales [..., groups], float32 [..., inputs]."""
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*scales.shape, 32)
    floats = np.vectorize(e2m1)(codes) * 2.0 ** (scales.astype(np.float64) - 127)[..., None]
    return floats.reshape(*scales.shape[:-1], -1).astype(np.float32)


def stored_tensors(folder: Path) -> dict[str, np.ndarray]:
    with safe_open(folder / "model.safetensors", "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys() if name.endswith(("_blocks", "_scales"))}  # noqa: SIM118


def opened(folder: Path) -> WeightSource:
    shape = ModelShape.from_path(folder)
    return open_weights(folder, weight_specs(shape), seed=None, ignorable=ignorable_suffixes(shape))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mxfp4") / "model"
    write_model(STORED, path)
    return path


def test_values_follow_the_specification(folder: Path) -> None:
    """Gate and up alternate in the outputs of the stored tensor."""
    source, stored = opened(folder), stored_tensors(folder)
    both = values_of(stored[BLOCKS], stored[SCALES])[3]
    down = values_of(*(stored[name.replace("gate_up", "down")] for name in (BLOCKS, SCALES)))[3]
    for name, expected in ((GATE, both[::2]), (UP, both[1::2]), (DOWN, down)):
        found = np.empty(expected.shape, np.float32)
        source.read_into(name, found, "float32")
        np.testing.assert_array_equal(found, expected)
        rounded = np.empty(expected.shape, np.uint16)
        source.read_into(name, rounded, "bfloat16")
        np.testing.assert_array_equal((rounded.astype(np.uint32) << 16).view(np.float32), expected)
    source.close()


def test_integers_have_the_same_values(folder: Path) -> None:
    source, part = opened(folder), WeightPart(UP, (INNER, HIDDEN))
    part = next(each for spec in weight_specs(ModelShape.from_path(folder)) for each in spec.parts if each.name == UP)
    assert source.scheme(part) == Scheme("int8", 32)
    tensor, floats = source.read_quantised(part), np.empty(part.shape, np.float32)
    source.read_into(UP, floats, "float32")
    assert tensor.values.dtype == np.int8
    assert np.abs(tensor.values).max() == 12
    np.testing.assert_array_equal(tensor.dequantise_rows(0, INNER), floats)
    cut = TensorCut(part.shape, Span(5, 20), Span(32, 64))
    np.testing.assert_array_equal(source.read_quantised(part, cut).dequantise_rows(0, 15), floats[5:20, 32:])
    source.close()


@pytest.mark.parametrize("variant", [FLOATS, STORED], ids=["floats", "mxfp4"])
@pytest.mark.parametrize("columns", [None, Span(32, 64)])
def test_a_part_of_an_expert_equals_the_slice_of_the_whole(
    tmp_path: Path, variant: Variant, columns: Span | None
) -> None:
    write_model(replace(variant, num_shards=1), tmp_path)
    source = opened(tmp_path)
    for name, shape in ((GATE, (INNER, HIDDEN)), (UP, (INNER, HIDDEN)), (DOWN, (HIDDEN, INNER))):
        whole, cut = np.empty(shape, np.float32), TensorCut(shape, Span(7, 30), columns)
        source.read_into(name, whole, "float32")
        part = np.empty(cut.shape, np.float32)
        source.read_into(name, part, "float32", cut)
        np.testing.assert_array_equal(part, cut.of(whole))
    bias, half = np.empty(INNER, np.float32), np.empty(10, np.float32)
    source.read_into(UP.replace("weight", "bias"), bias, "float32")
    source.read_into(UP.replace("weight", "bias"), half, "float32", TensorCut((INNER,), Span(50, 60)))
    np.testing.assert_array_equal(half, bias[50:60])
    source.close()


def test_floats_and_blocks_of_the_same_values_are_the_same_model(tmp_path: Path, folder: Path) -> None:
    """The folder of floats stores [experts, in, out], the folder of blocks [experts, out, in]."""
    config = {key: value for key, value in STORED.config.items() if key != "quantization_config"}
    write_model(replace(STORED, config=config, dtype="float32"), tmp_path)
    stored = stored_tensors(folder)
    with safe_open(folder / "model.safetensors", "numpy") as file:
        others = [name for name in file.keys() if not name.endswith(("_blocks", "_scales"))]  # noqa: SIM118
    tensors = _bfloat16(folder, others)
    for name in stored:
        if name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            tensors[stem] = values_of(stored[name], stored[f"{stem}_scales"]).swapaxes(1, 2)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    specs, loaded = weight_specs(ModelShape.from_path(folder)), []
    for path in (folder, tmp_path):
        source = opened(path)
        loaded.append(load_weights(specs, source, "float32", lambda done, of: None))
        source.close()
    assert loaded[0].keys() == loaded[1].keys()
    for name, values in loaded[0].items():
        np.testing.assert_array_equal(loaded[1][name], values, name)


def _bfloat16(folder: Path, names: list[str]) -> dict[str, Array]:
    from agent.weights.safetensors_file import SafetensorsFile

    file = SafetensorsFile(folder / "model.safetensors")
    return {name: np.array(file.read(name)[0]) for name in names}


def _changed(folder: Path, scratch: Path, name: str, change: Any) -> Path:
    """Copies ``folder`` to ``scratch``, with a change of one stored tensor."""
    write_model(STORED, scratch)
    with safe_open(folder / "model.safetensors", "numpy") as file:
        others = [each for each in file.keys() if not each.endswith(("_blocks", "_scales"))]  # noqa: SIM118
    tensors = {**_bfloat16(folder, others), **stored_tensors(folder)}
    tensors[name] = change(tensors[name])
    if tensors[name] is None:
        del tensors[name]
    write_safetensors(scratch / "model.safetensors", tensors)
    return scratch


def _with_nan(scales: np.ndarray) -> np.ndarray:
    scales[3, 1, 0] = 255
    return scales


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (SCALES, lambda _: None, "gate_up_proj_scales is missing from the weights"),
        (SCALES, lambda array: array[:, :, :1], "gate_up_proj_scales has shape [5, 192, 1]; config.json requires"),
        (BLOCKS, lambda array: array.view(np.int8), "gate_up_proj_blocks has type I8; in this format it must be one"),
        (SCALES, _with_nan, "gate_up_proj_scales: a scale of type MXFP4 is not a number"),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path: Path, folder: Path, name: str, change: Any, message: str) -> None:
    broken = _changed(folder, tmp_path, name, change)
    with pytest.raises(CheckpointError) as caught:
        opened(broken).read_into(GATE, np.empty((INNER, HIDDEN), np.float32), "float32")
    assert message in str(caught.value)


def test_blocks_of_a_gguf_file_have_the_same_values() -> None:
    """A block has a scale and 16 bytes. The low four bits of the bytes are the first 16 values."""
    random = np.random.default_rng(1)
    blocks = random.integers(0, 256, (3, 2, 17), np.uint8)
    blocks[:, :, 0] = random.integers(0, 255, (3, 2))
    codes = np.concatenate([blocks[:, :, 1:] & 15, blocks[:, :, 1:] >> 4], -1)
    expected = (np.vectorize(e2m1)(codes) * 2.0 ** (blocks[:, :, :1].astype(np.float64) - 127)).reshape(3, -1)
    tensor = to_integers(blocks.reshape(3, -1), MXFP4, Scheme("int8", 32))
    np.testing.assert_array_equal(tensor.dequantise_rows(0, 3), expected.astype(np.float32))
    np.testing.assert_array_equal(to_floats(blocks.reshape(3, -1), MXFP4), expected.astype(np.float32))
    blocks[2, 1, 0] = 255
    with pytest.raises(CheckpointError, match="MXFP4 is not a number"):
        to_integers(blocks.reshape(3, -1), MXFP4, Scheme("int8", 32))


def test_the_memory_plan_counts_the_experts_as_integers(folder: Path) -> None:
    """With ``auto``, a weight of an expert needs a byte and a part of a float32 scale. All other weights are floats."""

    def weight_bytes(weights: str) -> int:
        settings = {"model_path": folder, "weight_format": weights, "op_table": "fused"}
        config = load_config("llama_tiny_cpu.yaml", [f"model_config.{key}={value}" for key, value in settings.items()])
        return next(item.num_bytes for item in device_items(config, 0) if item.name == WEIGHTS)

    experts = 2 * EXPERTS * 3 * INNER * HIDDEN
    assert weight_bytes("float32") - weight_bytes("auto") == experts * (32 - 9) // 8
