"""Tests reading parts of tensors. The values equal a slice of the whole tensor, and only the bytes of the part are
read.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.group.model_part import ModelPart
from agent.weights import WeightPart, load_weights, open_weights
from agent.weights.checkpoint import Checkpoint
from agent.weights.cuts import TensorCut
from agent.weights.seeded import CHUNK_ELEMENTS, SeededWeights, fill_seeded
from agent.weights.sharding import shard_specs
from agent.weights.source import CutSource
from agent.weights.storage import allocate, to_float32
from llm_serving.config import ParallelConfig
from llm_serving.errors import CheckpointError
from llm_serving.model.parallel import Span, place, shard_of
from llm_serving.model.shape import ModelShape
from performance.models.folders import write_safetensors
from support.quantised_folders import CASES, DEPTH, LINEARS, SPECS, write_case

COLUMNS = Span(DEPTH // 2, DEPTH)


BY_ROWS = [(name, None) for name in CASES]
BY_COLUMNS = [(name, COLUMNS) for name, case in CASES.items() if COLUMNS.start % (case.group or 1) == 0]


@pytest.mark.parametrize(("name", "columns"), [*BY_ROWS, *BY_COLUMNS])
def test_a_part_of_a_quantised_tensor_equals_the_slice_of_the_whole(
    tmp_path: Path, name: str, columns: Span | None
) -> None:
    source = open_weights(write_case(tmp_path, CASES[name]), SPECS, seed=None)
    for tensor in LINEARS:
        whole = source.read_quantised(WeightPart(tensor, LINEARS[tensor]))
        cut = TensorCut(LINEARS[tensor], Span(LINEARS[tensor][0] - 8, LINEARS[tensor][0]), columns)
        part, expected = source.read_quantised(WeightPart(tensor, LINEARS[tensor]), cut), cut.of_quantised(whole)
        np.testing.assert_array_equal(part.values, expected.values)
        np.testing.assert_array_equal(part.scales, expected.scales)
        rows = slice(0, 8)
        np.testing.assert_array_equal(
            part.dequantise_rows(rows.start, rows.stop), expected.dequantise_rows(rows.start, rows.stop)
        )
        values = np.empty(cut.shape, np.float32)
        source.read_into(tensor, values, "float32", cut)
        np.testing.assert_array_equal(values, expected.dequantise_rows(0, 8))
    source.close()


def test_a_cut_through_a_group_or_a_word_is_refused(tmp_path: Path) -> None:
    tensor = next(iter(LINEARS))
    part = WeightPart(tensor, LINEARS[tensor])
    source = open_weights(write_case(tmp_path, CASES["awq"]), SPECS, seed=None)
    with pytest.raises(CheckpointError, match="the part from input 0 to 56 begins or ends inside a group of 64 inputs"):
        source.read_quantised(part, TensorCut(part.shape, Span(0, 8), Span(0, 56)))
    with pytest.raises(CheckpointError, match="values 0 to 4 are not whole words of 8"):
        source.read_quantised(part, TensorCut(part.shape, Span(0, 4)))
    source.close()


SHAPES = {"wide": (3, CHUNK_ELEMENTS + 5), "tall": (2100, 1000), "flat": (CHUNK_ELEMENTS + 77,)}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_part_of_a_seeded_tensor_equals_the_slice_of_the_whole(name: str, dtype: str) -> None:
    shape = SHAPES[name]
    whole = allocate(shape, dtype)
    fill_seeded(name, whole, dtype, seed=3)
    middle = Span(shape[0] // 3, shape[0] - 1)
    for columns in (None, Span(7, 900)) if len(shape) == 2 else (None,):
        cut = TensorCut(shape, middle, columns)
        part = allocate(cut.shape, dtype)
        SeededWeights(3).read_into(name, part, dtype, cut)
        np.testing.assert_array_equal(part, cut.of(whole))


class Model:
    """A checkpoint of a small float32 model. ``part`` loads the part of an agent."""

    def __init__(self, folder: Path, shape: ModelShape, stored: str = "bfloat16") -> None:
        from agent.models.names import weight_specs

        self.shape = shape
        self.specs = weight_specs(shape)
        parts = {part.name: part for spec in self.specs for part in spec.tensors}
        arrays = {}
        for part in parts.values():
            arrays[part.name] = allocate(part.shape, stored)
            SeededWeights(5, std=1.0).read_into(f"{part.name} values", arrays[part.name], stored)
        write_safetensors(folder / "model.safetensors", arrays)
        self.folder = folder
        self.num_bytes = {name: array.nbytes for name, array in arrays.items()}
        self.whole = self.load(Checkpoint(folder))

    def load(self, source: Any) -> dict[str, Any]:
        source.check([part for spec in self.specs for part in spec.tensors])
        weights = load_weights(self.specs, source, "float32", lambda done, of: None)
        source.close()
        return weights

    def part(self, tp: int, pp: int, rank: int) -> tuple[ModelPart, dict[str, Any], int]:
        """Returns a rank's part of the model, the weights that it loads, and the number of bytes that it reads."""
        parallel = ParallelConfig(tp, pp, 1)
        where = place(rank, parallel)
        part = ModelPart(parallel, where, shard_of(self.shape, where, parallel), self.shape)
        own = shard_specs(self.specs, part, equal_vocabularies=True)
        source = Checkpoint(self.folder)
        source.check([each for spec in self.specs for each in spec.tensors])
        weights = load_weights(own.specs, CutSource(source, own.cuts), "float32", lambda done, of: None)
        source.close()
        return part, weights, source.bytes_read


def shape_of(**changes: Any) -> ModelShape:
    from support.some_machine import SHAPE

    small = {
        "num_layers": 3,
        "hidden_size": 48,
        "intermediate_size": 160,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "vocab_size": 203,
        "attention_bias": True,
        "output_bias": True,
        "query_key_norm": True,
    }
    return replace(SHAPE, **{**small, **changes})


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (3, 1), (6, 1), (1, 2), (2, 3)])
def test_the_parts_of_all_agents_make_the_whole_model(tmp_path: Path, tp: int, pp: int, stored: str) -> None:
    model = Model(tmp_path, shape_of(), stored)
    seen: dict[str, list[Any]] = {}
    for rank in range(tp * pp):
        part, weights, _ = model.part(tp, pp, rank)
        for name, array in weights.items():
            pieces = name.split(".")
            if pieces[0] == "layers":
                pieces[1] = str(int(pieces[1]) + part.shard.layers.start)
            seen.setdefault(".".join(pieces), []).append((part, array))
    assert set(seen) == set(model.whole)
    for name, parts in seen.items():
        whole, joined = model.whole[name], join(name, parts, model.shape)
        np.testing.assert_array_equal(joined[: len(whole)], whole, err_msg=name)
        assert not joined[len(whole) :].any(), "padding of the vocabulary must be zero"


def join(name: str, parts: list[tuple[ModelPart, Any]], shape: ModelShape) -> Any:
    """Joins the parts of a weight that the agents of one stage have."""
    arrays = [array for _, array in parts]
    if name.endswith(("output.weight", "down.weight")):
        return np.concatenate(arrays, axis=1)
    if name.endswith(("qkv.weight", "qkv.bias")):
        width = shape.head_dim
        total = np.zeros(((shape.num_attention_heads + 2 * shape.num_key_value_heads) * width, *arrays[0].shape[1:]))
        for part, array in parts:
            queries, keys = part.shard.query_heads, part.shard.key_value_heads
            cuts = np.cumsum([len(queries) * width, len(keys) * width])
            starts = (0, shape.num_attention_heads, shape.num_attention_heads + shape.num_key_value_heads)
            for start, span, rows in zip(starts, (queries, keys, keys), np.split(array, cuts), strict=True):
                total[(start + span.start) * width : (start + span.stop) * width] = rows
        return total
    if name.endswith("gate_up.weight"):
        halves = [np.split(array, 2) for array in arrays]
        return np.concatenate([gate for gate, _ in halves] + [up for _, up in halves])
    if name in ("embedding.weight", "lm_head.weight"):
        return np.concatenate(arrays)
    return arrays[0]


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 3), (3, 2)])
def test_an_agent_reads_its_own_part_only(tmp_path: Path, tp: int, pp: int) -> None:
    """An agent reads the stored bytes of its own parameters. All agents together read the file once.

    There is an exception: several agents read the norms.
    """
    model = Model(tmp_path, shape_of(tie_word_embeddings=False))
    total = sum(model.num_bytes.values())
    read = []
    for rank in range(tp * pp):
        _, weights, num_bytes = model.part(tp, pp, rank)
        elements = sum(array.size for array in weights.values())
        assert num_bytes <= 2 * elements, "two bytes for each element, and none for padding of the vocabulary"
        read.append(num_bytes)
    shared = [size for name, size in model.num_bytes.items() if "norm" in name]
    common = (tp - 1) * sum(shared)
    assert sum(read) == total + common
    assert max(read) < 1.7 * total / (tp * pp)


def test_experts_are_split_by_their_columns(tmp_path: Path) -> None:
    from llm_serving.model.families import Experts

    experts = Experts(count=4, per_token=2, intermediate_size=96, normalised=True, dense_layers=(1,))
    model = Model(tmp_path, shape_of(experts=experts, attention_bias=False, output_bias=False))
    first, second = (model.part(2, 1, rank)[1] for rank in (0, 1))
    for name, whole in model.whole.items():
        if "gate_up" in name and whole.ndim == 3:  # the shape is [experts, hidden, gate and up]
            halves = [np.split(array, 2, axis=2) for array in (first[name], second[name])]
            joined = np.concatenate([half for place in (0, 1) for half in (halves[0][place], halves[1][place])], axis=2)
            np.testing.assert_array_equal(joined, whole)
        if "down" in name and whole.ndim == 3:
            np.testing.assert_array_equal(np.concatenate([first[name], second[name]], axis=1), whole)
        if "router" in name:
            np.testing.assert_array_equal(first[name], whole)
            np.testing.assert_array_equal(second[name], whole)
    assert to_float32(model.whole["norm.weight"], "float32").shape == (48,)
