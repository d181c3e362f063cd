"""Divides the quantised weights of native primitives among agents.

An agent's integers, scales and zero points equal those of the whole weight, unless one scale covers the parts of two
agents. An agent reads only its own part of the file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from agent.group.model_part import ModelPart
from agent.models.names import weight_specs
from agent.weights import LinearForm, LinearForms, Packing, WeightSpec, load_weights, open_weights
from agent.weights.checkpoint import Checkpoint
from agent.weights.seeded import SeededWeights
from agent.weights.sharding import part_forms, shard_specs
from agent.weights.source import CutSource
from llm_serving.config import ParallelConfig
from llm_serving.errors import CheckpointError, ConfigError
from llm_serving.model.parallel import place, shard_of
from support.quantised_folders import CASES, Case, Plain, awq, gptq, int_quantized, pack_quantized
from support.some_machine import SHAPE

TYPE = "float16"
SMALL = replace(
    SHAPE,
    num_layers=1,
    hidden_size=128,
    intermediate_size=256,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=32,
    vocab_size=200,
    tie_word_embeddings=False,
)
"""The first of two agents has four query heads and 128 vocabulary rows, the second has two heads and 72 rows."""
FORMATS = {
    "int8": LinearForm("int8"),
    "int8_weight_only": LinearForm("int8_weight_only"),
    "int4": LinearForm("int4_weight_only", 32),
}
STORED = ("gptq4", "awq", "w8a8", "w4a16 asymmetric", "w8a16", "gptq8", "gptq4 whole rows")
SERVED_AS = {4: "int4", 8: "int8_weight_only"}

Weights = dict[str, Any]


@dataclass
class Loaded:
    """The weights that one agent has loaded."""

    part: ModelPart
    forms: LinearForms
    weights: Weights
    bytes_read: int


def part_of(agents: int, rank: int, group: int, shape: Any = SMALL) -> ModelPart:
    parallel = ParallelConfig(agents, 1, 1)
    where = place(rank, parallel)
    return ModelPart(parallel, where, shard_of(shape, where, parallel, group), shape)


def load(folder: Path, packing: Packing, agents: int, rank: int, group: int = 1) -> Loaded:
    specs, part = weight_specs(SMALL), part_of(agents, rank, group)
    source = open_weights(folder, specs, seed=None)
    assert isinstance(source, Checkpoint)
    forms = part_forms(specs, part, source, packing)
    own = shard_specs(specs, part, equal_vocabularies=True)
    before = source.bytes_read
    weights = load_weights(own.specs, CutSource(source, own.cuts), TYPE, lambda *_: None, forms=forms)
    read = source.bytes_read - before
    source.close()
    return Loaded(part, forms, weights, read)


def float_tensors(specs: list[WeightSpec]) -> dict[str, np.ndarray]:
    tensors = {}
    for each in {each.name: each for spec in specs for each in spec.tensors}.values():
        tensors[each.name] = np.empty(each.shape, np.float16)
        SeededWeights(9, std=0.5).read_into(f"{each.name} values", tensors[each.name], "float16")
    return tensors


def write_floats(folder: Path) -> Path:
    save_file(float_tensors(weight_specs(SMALL)), folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def write_stored(folder: Path, case: Case) -> Path:
    """Writes a folder whose linear layers are quantised. All other tensors are floats."""
    specs = weight_specs(SMALL)
    tensors = float_tensors(specs)
    for spec in specs:
        for part in () if spec.kind == "plain" else spec.parts:
            rows, depth = part.shape
            rng, group = np.random.default_rng(sum(part.name.encode())), case.group or depth
            shape, middle = (rows, depth // group), 1 << (case.bits - 1)
            zeros = rng.integers(0, 1 << case.bits, shape) if case.asymmetric else np.full(shape, middle)
            scales = rng.uniform(0.001, 0.1, shape).astype(np.float16).astype(np.float32)
            plain = Plain(rng.integers(0, 1 << case.bits, part.shape), zeros, scales, group)
            del tensors[part.name]
            tensors |= encode(case, part.name, plain)
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": case.config()}))
    return folder


def encode(case: Case, name: str, plain: Plain) -> dict[str, np.ndarray]:
    if case.layout == "gptq":
        return gptq(name, plain, bits=case.bits, minus_one=case.minus_one)
    if case.layout == "awq":
        return awq(name, plain)
    if case.layout == "int-quantized":
        return int_quantized(name, plain)
    return pack_quantized(name, plain, bits=case.bits, asymmetric=case.asymmetric)


def by_rows(array: np.ndarray, form: LinearForm, *, is_weight: bool) -> np.ndarray:
    """Converts a native primitive's weight to [outputs, inputs], or its scales and offsets to [outputs, groups]."""
    if form.is_float or form.weights.values_per_byte == 1:
        return array if array.ndim == 2 else array[:, None]
    if not is_weight:
        return (array if array.ndim == 2 else array[None]).T
    low, high = (array << 4).astype(np.int8) >> 4, array >> 4
    return np.stack([low, high], -1).reshape(len(array), -1).T


def rows_of(name: str, loaded: Loaded) -> np.ndarray:
    """Returns the indexes of the agent's rows in the whole weight."""
    shard, width, shape = loaded.part.shard, SMALL.head_dim, SMALL
    if name.endswith("qkv"):
        starts = (0, shape.num_attention_heads, shape.num_attention_heads + shape.num_key_value_heads)
        spans = (shard.query_heads, shard.key_value_heads, shard.key_value_heads)
        ranges = [
            np.arange((start + span.start) * width, (start + span.stop) * width)
            for start, span in zip(starts, spans, strict=True)
        ]
        return np.concatenate(ranges)
    if name.endswith("gate_up"):
        half = np.arange(shard.intermediate.start, shard.intermediate.stop)
        return np.concatenate([half, half + shape.intermediate_size])
    if name.endswith("lm_head"):
        return np.arange(shard.vocab.start, shard.vocab.stop)
    return np.arange(shape.hidden_size)


def columns_of(name: str, loaded: Loaded) -> slice:
    """Returns the indexes of the agent's input columns in the whole weight."""
    shard = loaded.part.shard
    if name.endswith("attention.output"):
        return slice(shard.query_heads.start * SMALL.head_dim, shard.query_heads.stop * SMALL.head_dim)
    return shard.intermediate.slice if name.endswith("mlp.down") else slice(None)


def linear_layers(loaded: Loaded) -> list[tuple[str, LinearForm]]:
    stems = [name.removesuffix(".scale") for name in loaded.weights if name.endswith(".scale")]
    assert len(stems) == 5, "all linear layers must be quantised"
    return [(stem, loaded.forms.output if stem == "lm_head" else loaded.forms.layers) for stem in stems]


@pytest.mark.parametrize("agents", [2, 3])
@pytest.mark.parametrize("name", STORED)
def test_stored_integers_equal_those_of_the_whole_weight(tmp_path: Path, name: str, agents: int) -> None:
    case = CASES[name]
    case = replace(case, group=32) if case.group else case
    folder, packing = write_stored(tmp_path, case), Packing(SERVED_AS[case.bits])
    whole = load(folder, packing, 1, 0)
    kinds = {"weight": True, "scale": False, "offset": False}
    for rank in range(agents):
        own = load(folder, packing, agents, rank, case.group or 1)
        assert own.forms == whole.forms
        for stem, form in linear_layers(own):
            rows, columns = rows_of(stem, own), columns_of(stem, own)
            for kind, is_weight in kinds.items():
                if f"{stem}.{kind}" not in whole.weights:
                    assert f"{stem}.{kind}" not in own.weights
                    continue
                pair = (loaded.weights[f"{stem}.{kind}"] for loaded in (own, whole))
                found, wanted = (by_rows(array, form, is_weight=is_weight) for array in pair)
                groups = slice(*(None if edge is None else edge // 32 for edge in (columns.start, columns.stop)))
                inputs = columns if is_weight else groups if case.group else slice(None)
                np.testing.assert_array_equal(found[: len(rows)], wanted[rows][:, inputs], err_msg=f"{stem}.{kind}")
                assert not found[len(rows) :].any(), "padding of the vocabulary must be zero"


@pytest.mark.parametrize("agents", [2, 3])
@pytest.mark.parametrize("name", FORMATS)
def test_each_agent_quantises_its_own_part_of_floats(tmp_path: Path, name: str, agents: int) -> None:
    """If a folder has float weights, each agent quantises its own part of a weight.

    A scale covers the agent's part of a weight row, or one group of weights in this part. Fused operators do the same.
    """
    folder, form = write_floats(tmp_path), FORMATS[name]
    floats = load(folder, Packing("auto"), 1, 0).weights
    largest = 7 if name == "int4" else 127
    for rank in range(agents):
        own = load(folder, Packing(name, 32), agents, rank, form.group or 1)
        assert own.forms == LinearForms(form, form)
        for stem, _ in linear_layers(own):
            values = floats[f"{stem}.weight"][rows_of(stem, own)][:, columns_of(stem, own)].astype(np.float32)
            groups = values.reshape(len(values), -1, form.group or values.shape[1])
            wanted = np.abs(groups).max(2) / np.float32(largest)
            wanted = wanted if name == "int8" else wanted.astype(np.float16).astype(np.float32)
            scales = by_rows(own.weights[f"{stem}.scale"], form, is_weight=False)
            np.testing.assert_array_equal(scales[: len(values)], wanted)
            integers = by_rows(own.weights[f"{stem}.weight"], form, is_weight=True)
            found = integers[: len(values)].reshape(groups.shape) * wanted[:, :, None]
            step = wanted[:, :, None] * (0.5 if name == "int8" else 0.5 + largest * 2**-11)
            assert (np.abs(found - groups) <= step * 1.0001).all(), stem
            assert not integers[len(values) :].any()
            assert not scales[len(values) :].any()


@pytest.mark.parametrize("agents", [2, 3])
@pytest.mark.parametrize("name", ["floats", *STORED])
def test_an_agent_reads_its_own_part_only(tmp_path: Path, name: str, agents: int) -> None:
    """An agent reads only its own part of a weight file: as many bytes as if it converted this part to floats.

    All agents together read the file once. There are exceptions, which several agents read: norms, scales of whole
    rows, and orders of groups.
    """
    if name == "floats":
        folder, packing, group = write_floats(tmp_path), Packing("int8"), 1
    else:
        case = CASES[name]
        case = replace(case, group=32) if case.group else case
        folder, packing, group = write_stored(tmp_path, case), Packing(SERVED_AS[case.bits]), case.group or 1
    total = sum(array.nbytes for array in load_file(folder / "model.safetensors").values())
    ranks = [load(folder, packing, agents, rank, group) for rank in range(agents)]
    assert [own.bytes_read for own in ranks] == [
        load(folder, Packing("auto"), agents, rank, group).bytes_read for rank in range(agents)
    ]
    assert total * 0.99 < sum(own.bytes_read for own in ranks) < total * (1 + 0.04 * (agents - 1))
    assert max(own.bytes_read for own in ranks) < total * 1.4 / agents


def test_an_output_layer_is_quantised_if_an_agents_part_is_narrow_enough() -> None:
    """The primitive WeightQuantBatchMatmul accepts at most 65535 outputs.

    One agent with all 100000 outputs keeps floats. Each of two agents has at most 50016 outputs and quantises them.
    """
    wide = replace(SMALL, vocab_size=100_000)
    found = {
        agents: part_forms(
            weight_specs(wide), part_of(agents, 0, 1, wide), SeededWeights(0), Packing("int8_weight_only")
        )
        for agents in (1, 2)
    }
    assert found[1].output == LinearForm()
    assert found[2].output == LinearForm("int8_weight_only")


def test_a_tied_output_layer_stays_floats_in_every_stage() -> None:
    tied = replace(SMALL, tie_word_embeddings=True, num_layers=2)
    for rank in range(4):
        parallel = ParallelConfig(2, 2, 1)
        where = place(rank, parallel)
        part = ModelPart(parallel, where, shard_of(tied, where, parallel), tied)
        forms = part_forms(weight_specs(tied), part, SeededWeights(0), Packing("int8"))
        assert forms == LinearForms(LinearForm("int8"), LinearForm())


def test_a_group_as_large_as_an_agents_inputs_is_refused() -> None:
    """Each of three agents has two heads of 32 inputs. A group of 64 weights is refused, because it must be smaller."""
    with pytest.raises(ConfigError, match=r"attention.output.weight has groups of 64 of its 64 inputs"):
        part_forms(weight_specs(SMALL), part_of(3, 0, 64), SeededWeights(0), Packing("int4", 64))


def test_desc_act_cannot_be_divided_by_inputs(tmp_path: Path) -> None:
    case = replace(CASES["gptq4"], group=32)
    folder = write_stored(tmp_path, case)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("down_proj.g_idx"))
    tensors[name] = np.ascontiguousarray(tensors[name][::-1])
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"desc_act\), so agents cannot divide the inputs; set parallel_config.tensor_p"
    ):
        load(folder, Packing("int4"), 2, 0, 32)
