"""Tests tensors that a GGUF file stores in another form: parts of them, their integers, and files with wrong sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from agent.models.names import ignorable_suffixes, weight_specs
from agent.weights import WeightPart, load_weights, open_weights
from agent.weights.cuts import TensorCut
from agent.weights.gguf.file import GGUFFile
from agent.weights.joined import stored_parts
from llm_serving.errors import CheckpointError
from llm_serving.model.parallel import Span
from llm_serving.model.shape import ModelShape
from performance.models.folders import write_model
from support.gguf_models import WIDE_FAMILIES, write_gguf_model
from support.gguf_oracle import write_pair


def parts_of(file: Path) -> list[WeightPart]:
    """Returns the tensors of the model in a file, with the names of Hugging Face's folders."""
    specs = weight_specs(ModelShape.from_path(file))
    return stored_parts(part for spec in specs for part in spec.tensors)


def floats_of(source: GGUFFile, part: WeightPart, cut: TensorCut | None = None) -> np.ndarray:
    out = np.empty(part.shape if cut is None else cut.shape, np.float32)
    source.read_into(part.name, out, "float32", cut)
    return out


@pytest.mark.parametrize("family", ["deepseek2", "qwen3next", "qwen35", "qwen35moe"])
def test_integers_and_parts_are_those_of_the_floats(tmp_path: Path, family: str) -> None:
    """Q8_0 is read without rounding, so integers times scales equal the floats. This also holds for tensors whose rows
    are stored in another order.
    """
    _, file = write_pair(family, "Q8_0", tmp_path)
    source = GGUFFile(file)
    moved = [part for part in parts_of(file) if source._place(part.name).recipe is not None]
    assert len(moved) >= 2
    quantised = 0
    for part in moved:
        whole = floats_of(source, part)
        if len(part.shape) == 2:
            rows, columns = Span(2, part.shape[0] // 2), Span(32, part.shape[1])
            cut = TensorCut(part.shape, rows, columns)
            np.testing.assert_array_equal(floats_of(source, part, cut), whole[rows.slice, columns.slice], part.name)
        if source.scheme(part) is not None:
            quantised += 1
            integers = source.read_quantised(part)
            np.testing.assert_array_equal(integers.dequantise_rows(0, part.shape[0]), whole, part.name)
    assert quantised == {"deepseek2": 0, "qwen3next": 2, "qwen35": 5, "qwen35moe": 5}[family]
    source.close()


def open_model(path: Path) -> None:
    """Opens the weights of a file as an agent does, and closes them."""
    shape = ModelShape.from_path(path)
    open_weights(path, weight_specs(shape), seed=None, ignorable=ignorable_suffixes(shape)).close()


def copy_without(
    file: Path, path: Path, *, entries: dict[str, int] | None = None, drop: str = "", joins_gates: bool = False
) -> Path:
    """Copies a GGUF file with other metadata ``entries``. ``drop`` is a part of the names of tensors to leave out.

    ``joins_gates``: the copy has the gates and ups of a layer's experts in one tensor, as the converter's option
    ``--fuse-gate-up-exps`` writes them.
    """
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(str(path), reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = (entries or {}).get(key, field.contents())
        writer.add_key_value(key, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    tensors = {tensor.name: tensor for tensor in reader.tensors if not drop or drop not in tensor.name}
    for name, tensor in tensors.items():
        data, kind = np.array(tensor.data), tensor.tensor_type
        if joins_gates and "_up_exps" in name:
            continue
        if joins_gates and "_gate_exps" in name:
            data = np.concatenate([data, tensors[name.replace("_gate_", "_up_")].data], axis=1)
            name = name.replace("_gate_", "_gate_up_")
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["F16", "Q4_K"])
def test_gates_and_ups_of_experts_may_be_one_tensor(tmp_path: Path, kind: str) -> None:
    _, file = write_pair("qwen35moe", kind, tmp_path)
    joined = copy_without(file, tmp_path / "joined.gguf", joins_gates=True)
    assert any(each.name.endswith("ffn_gate_up_exps.weight") for each in gguf.GGUFReader(joined).tensors)
    open_model(joined)
    expected, found = GGUFFile(file), GGUFFile(joined)
    experts = [part for part in parts_of(file) if ".experts." in part.name]
    assert len(experts) == 2 * 8 * 3
    for part in experts:
        rows = TensorCut(part.shape, Span(8, 40), Span(32, part.shape[1]))
        for cut in (None, rows):
            np.testing.assert_array_equal(floats_of(found, part, cut), floats_of(expected, part, cut), part.name)
        if kind == "Q4_K":
            values, others = found.read_quantised(part), expected.read_quantised(part)
            np.testing.assert_array_equal(values.values, others.values, part.name)
            np.testing.assert_array_equal(values.scales, others.scales, part.name)
    expected.close()
    found.close()


WRONG = {
    "other values": ("deepseek2", {"deepseek2.attention.value_length_mla": 24}, "", "attn_v_b.weight has shape"),
    "no values": ("deepseek2", {}, "attn_v_b", r"attn_v_b\.weight \(.*\) are missing from the weights"),
    "fewer key heads": ("qwen35", {"qwen35.ssm.group_count": 1}, "", "attn_qkv.weight has shape"),
    "no gate": ("qwen3next", {}, "attn_gate", r"attn_gate\.weight \(.*\) is missing from the weights"),
    "no sizes": ("qwen35", {"qwen35.ssm.inner_size": 0}, "", r"qwen35\.ssm\.inner_size = 0: must be from 1 to 2048"),
    "no gates": ("qwen35moe", {}, "gate_exps", r"tensors blk\.0\.ffn_gate_exps\.weight \(\S+\), blk\.1\.ffn_"),
    "odd values": ("qwen35", {"qwen35.ssm.inner_size": 250}, "", "must be a multiple of the 4 value heads"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_whose_sizes_do_not_agree_is_refused(tmp_path: Path, case: str) -> None:
    family, entries, drop, expected = WRONG[case]
    _, file = write_pair(family, "F32", tmp_path)
    path = copy_without(file, tmp_path / "wrong.gguf", entries=entries, drop=drop)
    with pytest.raises(CheckpointError, match=expected) as caught:
        open_model(path)
    assert str(path) in str(caught.value)


def test_a_rate_that_does_not_decay_is_refused(tmp_path: Path) -> None:
    _, file = write_pair("qwen35", "F32", tmp_path)
    tensor = next(each for each in gguf.GGUFReader(file).tensors if each.name == "blk.0.ssm_a")
    with file.open("r+b") as changed:
        changed.seek(tensor.data_offset)
        changed.write(np.zeros(tensor.n_elements, np.float32).tobytes())
    specs = weight_specs(ModelShape.from_path(file))
    source = open_weights(file, specs, seed=None, ignorable=("lm_head.weight",))
    with pytest.raises(
        CheckpointError, match=r"blk\.0\.ssm_a: the values must be negative, because they are decay rates"
    ):
        load_weights([spec for spec in specs if not spec.packed_only], source, "float32", lambda done, of: None)
    source.close()


def test_layers_that_predict_further_tokens_are_not_loaded(tmp_path: Path) -> None:
    """The key ``nextn_predict_layers`` of Qwen3.5 counts the layers after the last one that predict further tokens."""
    _, file = write_pair("qwen35", "F32", tmp_path)
    longer = tmp_path / "longer.gguf"
    data = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(str(longer), "qwen35")
    for key, field in data.fields.items():
        if key.startswith("qwen35."):
            value = field.contents() + (1 if key == "qwen35.block_count" else 0)
            writer.add_key_value(key, value, field.types[0])
    writer.add_uint32("qwen35.nextn_predict_layers", 1)
    for tensor in data.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.add_tensor("blk.2.nextn.eh_proj.weight", np.zeros((256, 512), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shape = ModelShape.from_path(longer)
    assert replace(shape, eos_token_ids=()) == replace(ModelShape.from_path(file), eos_token_ids=())
    open_model(longer)


def test_narrow_value_heads_are_read_as_floats_only(tmp_path: Path) -> None:
    """Groups of 32 inputs share a scale. If a value head has 16 inputs, the heads of a group cannot be moved apart."""
    wide = WIDE_FAMILIES["qwen35"]
    write_model(replace(wide, config={**wide.config, "linear_value_head_dim": 16}), tmp_path / "narrow")
    write_gguf_model(tmp_path / "narrow", tmp_path / "narrow.gguf", "Q8_0")
    source = GGUFFile(tmp_path / "narrow.gguf")
    (part,) = (each for each in parts_of(tmp_path / "narrow.gguf") if each.name.endswith("linear_attn.out_proj.weight"))
    assert floats_of(source, part).shape == (256, 64)
    with pytest.raises(CheckpointError, match="size of a value head is not a multiple of 32"):
        source.read_quantised(part)
    source.close()
