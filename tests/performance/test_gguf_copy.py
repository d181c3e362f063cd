"""Tests copies of GGUF models: with floats, with fewer layers, and with the tokenizer of the model."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from performance.models.gguf_copy import copy_model, main

NUM_LAYERS, HIDDEN = 3, 32
TOKENS = ["<s>", "a", "b"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Returns a GGUF file with a matrix in Q8_0 and a norm in each layer."""
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(NUM_LAYERS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 1, 1])
    rng = np.random.default_rng(1)
    writer.add_tensor("token_embd.weight", rng.standard_normal((len(TOKENS), HIDDEN)).astype(np.float32))
    for layer in range(NUM_LAYERS):
        matrix = rng.standard_normal((4, HIDDEN)).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(f"blk.{layer}.ffn_up.weight", gguf.quants.quantize(matrix, kind), raw_dtype=kind)
        writer.add_tensor(f"blk.{layer}.ffn_norm.weight", np.full(HIDDEN, layer, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def values(file: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a file as floats, by name."""
    return {each.name: gguf.quants.dequantize(each.data, each.tensor_type) for each in gguf.GGUFReader(file).tensors}


@pytest.mark.parametrize(("num_layers", "floats"), [(None, True), (2, False), (1, True)])
def test_a_copy_has_the_first_layers_and_all_metadata(
    model: Path, tmp_path: Path, num_layers: int | None, floats: bool
) -> None:
    out = tmp_path / "out.gguf"
    copy_model(model, out, num_layers=num_layers, floats=floats)
    before, after = gguf.GGUFReader(model), gguf.GGUFReader(out)
    kept = num_layers or NUM_LAYERS
    assert after.fields["llama.block_count"].contents() == kept
    for name, field in before.fields.items():
        if not name.startswith("GGUF.") and name != "llama.block_count":
            assert after.fields[name].contents() == field.contents(), name
            assert after.fields[name].types == field.types, name
    known, found = values(model), values(out)
    assert len(found) == 1 + 2 * kept
    for name, value in found.items():
        assert np.array_equal(value, known[name]), name
    types = {each.tensor_type.name for each in after.tensors}
    assert types == ({"F32"} if floats else {"F32", "Q8_0"})


def test_a_wrong_number_of_layers_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.gguf"
    for count in (0, NUM_LAYERS + 1):
        assert main([str(model), str(out), "--layers", str(count)]) == 2
        assert f"--layers: {count} is not between 1 and 3" in capsys.readouterr().err
    assert main([str(tmp_path / "absent.gguf"), str(out)]) == 2
    assert "there is no GGUF file" in capsys.readouterr().err
    assert not out.exists()
