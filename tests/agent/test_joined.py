"""Tests reading tensors that a checkpoint stores as rows of larger tensors, whole and in the parts of agents."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agent.models.names import ignorable_suffixes, weight_specs
from agent.weights import WeightPart, load_weights, open_weights
from agent.weights.cuts import TensorCut
from agent.weights.joined import JoinedSource
from agent.weights.layout import RowsOf, WeightSpec
from agent.weights.quantized import QuantizedTensor, Scheme
from agent.weights.source import WeightSource
from agent.weights.storage import Array
from llm_serving.errors import CheckpointError
from llm_serving.model.parallel import Span
from llm_serving.model.shape import ModelShape
from performance.models.folders import write_model, write_safetensors
from performance.models.variants import FAMILY_VARIANTS

WHOLE = np.arange(12 * 6, dtype=np.float32).reshape(12, 6)
ORDER = (0, 2, 1, 3)
PLACES = {"first": RowsOf("whole", (12, 6), 0), "second": RowsOf("whole", (12, 6), 4, head_order=ORDER)}
SCHEME = Scheme("int8", 3)


class OneTensor:
    """A WeightSource with the tensor ``whole``, as floats and quantised. Each value and each scale encodes its own
    place in the tensor.
    """

    def scheme(self, part: WeightPart) -> Scheme | None:
        assert (part.name, part.shape) == ("whole", (12, 6))
        return SCHEME

    def float_dtype(self, name: str) -> str | None:
        assert name == "whole"
        return "float32"

    def read_quantised(self, part: WeightPart, cut: TensorCut | None = None) -> QuantizedTensor:
        values = WHOLE.astype(np.int8)
        tensor = QuantizedTensor(SCHEME, values, scales=values[:, ::3].astype(np.float32), zeros=None)
        return tensor if cut is None else cut.of_quantised(tensor)

    def read_into(self, name: str, out: Array, dtype: str, cut: TensorCut | None = None) -> None:
        assert name == "whole"
        out[:] = WHOLE if cut is None else cut.of(WHOLE)

    def close(self) -> None:
        return None


@pytest.fixture
def source() -> WeightSource:
    return JoinedSource(OneTensor(), PLACES)


def read(source: WeightSource, name: str, shape: tuple[int, ...], cut: TensorCut | None = None) -> Array:
    out = np.zeros(shape, np.float32)
    source.read_into(name, out, "float32", cut)
    return out


IN_ORDER = WHOLE[[4, 6, 5, 7, 8, 10, 9, 11]]


def test_a_tensor_is_rows_of_the_larger_one(source: WeightSource) -> None:
    np.testing.assert_array_equal(read(source, "whole", (12, 6)), WHOLE)
    np.testing.assert_array_equal(read(source, "first", (4, 6)), WHOLE[:4])
    np.testing.assert_array_equal(read(source, "second", (8, 6)), IN_ORDER)
    assert source.float_dtype("second") == "float32"


def test_a_part_of_a_tensor_is_read_alone(source: WeightSource) -> None:
    cut = TensorCut((8, 6), Span(4, 8), Span(3, 6))
    np.testing.assert_array_equal(read(source, "second", (4, 3), cut), IN_ORDER[4:, 3:])


def test_quantised_values_and_scales_are_in_the_same_order(source: WeightSource) -> None:
    part = WeightPart("second", (8, 6))
    assert source.scheme(part) == SCHEME
    tensor = source.read_quantised(part)
    np.testing.assert_array_equal(tensor.values, IN_ORDER)
    np.testing.assert_array_equal(tensor.scales, IN_ORDER[:, ::3])
    half = source.read_quantised(part, TensorCut((8, 6), Span(0, 4)))
    np.testing.assert_array_equal(half.values, IN_ORDER[:4])


def test_a_tensor_may_have_some_rows_of_each_head() -> None:
    """Qwen3-Next stores the rows of a query head, then those of its gate, and so on."""
    places = {"some": RowsOf("whole", (12, 6), 0, head_order=(3, 1), stored_head=4)}
    source, wanted = JoinedSource(OneTensor(), places), WHOLE[[3, 1, 7, 5, 11, 9]]
    np.testing.assert_array_equal(read(source, "some", (6, 6)), wanted)
    tensor = source.read_quantised(WeightPart("some", (6, 6)))
    np.testing.assert_array_equal(tensor.values, wanted)
    np.testing.assert_array_equal(tensor.scales, wanted[:, ::3])


def test_weights_for_multi_token_prediction_are_not_loaded(tmp_path: Path) -> None:
    """Qwen3-Next's folders have one more layer, with full attention, whose tensors have other names."""
    write_model(FAMILY_VARIANTS["qwen3_next"], tmp_path)
    shape = ModelShape.from_hf_folder(tmp_path)
    specs, ignorable = weight_specs(shape), ignorable_suffixes(shape)
    extra = {
        "mtp.fc.weight": np.zeros((64, 128), np.float32),
        "mtp.pre_fc_norm_hidden.weight": np.zeros(64, np.float32),
        "mtp.layers.0.self_attn.q_proj.weight": np.zeros((256, 64), np.float32),
        "mtp.layers.0.mlp.experts.7.down_proj.weight": np.zeros((64, 64), np.float32),
        "mtp.layers.0.mlp.shared_expert_gate.weight": np.zeros((1, 64), np.float32),
    }
    files = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files["weight_map"] |= dict.fromkeys(extra, "extra.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(files))
    write_safetensors(tmp_path / "extra.safetensors", extra)
    open_weights(tmp_path, specs, seed=None, ignorable=ignorable).close()
    with pytest.raises(CheckpointError, match=r"mtp\.fc\.weight.*not in a model"):
        open_weights(tmp_path, specs, seed=None)


def load(folder: Path, specs: list[WeightSpec]) -> dict[str, Array]:
    source = open_weights(folder, specs, seed=None)
    try:
        return load_weights(specs, source, "float32", lambda done, of: None)
    finally:
        source.close()


def test_joined_and_separate_tensors_give_the_same_weights(tmp_path: Path) -> None:
    write_model(FAMILY_VARIANTS["phi3"], tmp_path)
    shape = ModelShape.from_hf_folder(tmp_path)
    specs = weight_specs(shape)
    joined = load(tmp_path, specs)
    separate = [replace(spec, parts=tuple(replace(part, rows_of=None) for part in spec.parts)) for spec in specs]
    parts = {part.name: part.shape for spec in separate for part in spec.parts}
    with pytest.raises(CheckpointError, match=r"self_attn\.q_proj\.weight.*missing from the weights"):
        load(tmp_path, separate)
    stored = {}
    for spec in separate:
        row = 0
        for part in spec.parts:
            stored[part.name] = np.ascontiguousarray(joined[spec.parameter][row : row + part.shape[0]])
            row += part.shape[0]
    assert stored.keys() == parts.keys()
    write_safetensors(tmp_path / "model.safetensors", stored)
    for name, values in load(tmp_path, separate).items():
        np.testing.assert_array_equal(values, joined[name], name)
