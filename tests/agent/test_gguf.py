"""Tests reading GGUF files, which the tests write byte by byte: exact values, and errors that name the tensor."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, dequantize

from agent.models.names import ignorable_suffixes, weight_specs
from agent.weights import WeightPart, WeightSpec, load_weights, open_weights
from agent.weights.quantized import Scheme
from agent.weights.storage import Array
from llm_serving.errors import CheckpointError
from llm_serving.gguf.header import TENSOR_TYPES
from llm_serving.model.shape import ModelShape
from performance.models.folders import write_model
from support.gguf_files import (
    BF16,
    F16,
    F32,
    HIDDEN,
    METADATA,
    Q4_0,
    Q6_K,
    Q8_0,
    SPECS,
    Tensors,
    make,
    q8_0,
    random_integers,
    write_gguf,
)
from support.gguf_models import GGUF_FAMILIES, write_gguf_model


def load(folder: Path) -> dict[str, Array]:
    source = open_weights(folder, SPECS, seed=None, ignorable=("lm_head.weight",))
    try:
        return load_weights(SPECS, source, "float32", lambda done, of: None)
    finally:
        source.close()


@pytest.mark.parametrize(("kind", "embedding"), [(F32, F16), (F16, F32), (BF16, BF16), (Q8_0, Q8_0), (Q4_0, Q4_0)])
def test_values_follow_the_documented_formula(tmp_path: Path, kind: int, embedding: int) -> None:
    tensors, values = make(kind, embedding)
    write_gguf(tmp_path / "model.gguf", tensors, METADATA)
    weights = load(tmp_path)
    np.testing.assert_array_equal(weights["embed"], values["token_embd.weight"])
    attention = [values[f"blk.0.attn_{kind}.weight"] for kind in "qkv"]
    np.testing.assert_array_equal(weights["qkv"], np.concatenate(attention))
    np.testing.assert_array_equal(weights["down"], values["blk.0.ffn_down.weight"])
    np.testing.assert_array_equal(weights["norm"], values["output_norm.weight"])


@pytest.mark.parametrize(("kind", "name"), [(Q8_0, "int8"), (Q4_0, "int4")])
def test_integers_are_read_without_change(tmp_path: Path, kind: int, name: str) -> None:
    write_gguf(tmp_path / "model.gguf", make(kind)[0], METADATA)
    source = open_weights(tmp_path, SPECS, seed=None)
    part = SPECS[2].parts[0]
    scheme, tensor = source.scheme(part), source.read_quantised(part)
    assert scheme is not None
    assert (scheme.format, scheme.group, tensor.zeros) == (name, 32, None)
    q, scales = random_integers("blk.0.ffn_down.weight", part.shape, *((-128, 128) if kind == Q8_0 else (0, 16)))
    np.testing.assert_array_equal(tensor.values, q)
    np.testing.assert_array_equal(tensor.scales, scales.astype(np.float32))
    assert source.scheme(SPECS[0].parts[0]) is None
    source.close()


def test_an_embedding_of_q6_k_is_dequantised(tmp_path: Path) -> None:
    """A Q6_K block of 256 values has 128 bytes of low bits, 64 bytes of high bits, 16 scales and a float16 factor."""
    tensors, _ = make(Q4_0)
    block = b"\x11" * 128 + b"\xaa" * 64 + struct.pack("<16b", *range(16)) + np.float16(0.5).tobytes()
    specs = (WeightSpec("embed", (WeightPart("model.embed_tokens.weight", (4, 256)),)),)
    write_gguf(tmp_path / "a.gguf", {"token_embd.weight": (Q6_K, (4, 256), block * 4)}, METADATA)
    source = open_weights(tmp_path, specs, seed=None)
    weights = load_weights(specs, source, "float32", lambda done, of: None)
    expected = np.repeat(np.arange(16, dtype=np.float32) * np.float32(0.5), 16)
    np.testing.assert_array_equal(weights["embed"], np.tile(expected, (4, 1)))
    assert "blk.0.ffn_down.weight" in tensors


BROKEN: dict[str, tuple[Callable[[Tensors, dict[str, Any]], object], str]] = {
    "missing": (
        lambda t, m: t.pop("blk.0.attn_k.weight"),
        "tensor blk.0.attn_k.weight (model.layers.0.self_attn.k_proj.weight) is missing",
    ),
    "unexpected": (
        lambda t, m: t.update({"blk.1.x.weight": (F32, (1,), b"\0" * 4)}),
        "tensor blk.1.x.weight is in the weights but not in a model of its sizes",
    ),
    "other shape": (
        lambda t, m: t.update({"output_norm.weight": (F32, (32,), b"\0" * 128)}),
        "tensor output_norm.weight has shape [32]; the model requires [64]",
    ),
    "quantised vector": (
        lambda t, m: t.update({"output_norm.weight": (Q8_0, (HIDDEN,), b"\0" * 68)}),
        "tensor output_norm.weight has type Q8_0; a vector must have one of F32, F16, BF16",
    ),
    "other architecture": (
        lambda t, m: m.update({"general.architecture": "gemma"}),
        "general.architecture = 'gemma': is not supported; only llama, qwen2, qwen3, qwen3moe, phi3, gemma3, gpt-oss",
    ),
    "no heads": (
        lambda t, m: [m.pop("llama.attention.head_count"), m.pop("llama.attention.head_count_kv")],
        "llama.attention.head_count = None does not fit 64 rows",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused(tmp_path: Path, case: str) -> None:
    change, expected = BROKEN[case]
    tensors, metadata = make(Q4_0)[0], dict(METADATA)
    change(tensors, metadata)
    write_gguf(tmp_path / "model.gguf", tensors, metadata)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert expected in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf", make(Q8_0)[0], METADATA)
    content = (tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "whole.gguf").unlink()
    for length in [0, 3, *range(8, len(content), 997), len(content) - 300]:
        (tmp_path / "cut.gguf").write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf: not a GGUF file that can be read, or truncated"):
            load(tmp_path)


@pytest.mark.parametrize(
    ("offset", "phrase"),
    [(8, "it claims 4294967295 tensors"), (16, "it claims 4294967295 entries")],
)
def test_a_count_beyond_the_file_is_refused_before_anything_is_allocated(
    tmp_path: Path, offset: int, phrase: str
) -> None:
    write_gguf(tmp_path / "model.gguf", make(F32)[0], METADATA)
    content = bytearray((tmp_path / "model.gguf").read_bytes())
    content[offset : offset + 8] = struct.pack("<Q", 2**32 - 1)
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=phrase):
        load(tmp_path)


def test_an_array_longer_than_the_file_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    """On this file, the package gguf once looped for minutes and took gigabytes of memory.

    The file is case 10102 of tests/long/fuzz_loader.py.
    """
    write_gguf(tmp_path / "model.gguf", make(F32)[0], METADATA)
    content = (tmp_path / "model.gguf").read_bytes()
    array = struct.pack("<IIQ", 9, 4, 2**31)
    place = content.index(b"llama.attention.head_count") + len("llama.attention.head_count")
    (tmp_path / "model.gguf").write_bytes(content[:place] + array + content[place + len(array) :])
    with pytest.raises(CheckpointError, match="it claims 2147483648 elements"):
        load(tmp_path)


def test_two_gguf_files_in_a_folder_are_refused(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name, make(F32)[0], METADATA)
    with pytest.raises(CheckpointError, match=r"a\.gguf, b\.gguf: there must be exactly one GGUF file"):
        load(tmp_path)


def test_the_file_itself_is_a_model(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name, make(F32)[0], METADATA)
    source = open_weights(tmp_path / "b.gguf", SPECS, seed=None)
    assert source.scheme(SPECS[2].parts[0]) is None
    source.close()


KEPT = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "MXFP4")  # test_mxfp4.py tests the last one
ROUNDED = tuple(number for number, kind in TENSOR_TYPES.items() if kind.name not in KEPT)


def random_blocks(number: int, rows: int, blocks: int) -> np.ndarray:
    """Returns random blocks of the GGUF type ``number``, as uint8 [rows, bytes].

    Their float16 scales are small and finite.
    """
    size = TENSOR_TYPES[number].block_bytes
    data = np.random.default_rng(number).integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for place in FLOAT16_PLACES[TENSOR_TYPES[number].name]:
        data[:, :, place : place + 2] = np.frombuffer(np.float16(0.003 + place / 10_000).tobytes(), np.uint8)
    return data.reshape(rows, -1)


FLOAT16_PLACES = {
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
"""Byte positions of the float16 factors in a block, by type."""


@pytest.mark.parametrize("number", ROUNDED, ids=lambda number: TENSOR_TYPES[number].name)
def test_other_types_become_int8_within_the_documented_bound(tmp_path: Path, number: int) -> None:
    """Tensors of other GGUF types are exact as floats, and within the documented bound as int8.

    The reference values come from the ``gguf`` library.
    """
    rows, depth, kind = 6, 512, TENSOR_TYPES[number]
    blocks = random_blocks(number, rows, depth // kind.block_size)
    exact = dequantize(blocks, GGMLQuantizationType[kind.name])
    part = WeightPart("model.layers.0.mlp.down_proj.weight", (rows, depth))
    write_gguf(tmp_path / "a.gguf", {"blk.0.ffn_down.weight": (number, (rows, depth), blocks.tobytes())}, METADATA)
    source = open_weights(tmp_path, (WeightSpec("down", (part,), "linear"),), seed=None)
    floats = np.empty((rows, depth), np.float32)
    source.read_into(part.name, floats, "float32")
    np.testing.assert_array_equal(floats, exact)
    assert source.scheme(part) == Scheme("int8", 32)
    tensor = source.read_quantised(part)
    groups = exact.reshape(rows, -1, 32)
    bound = np.abs(groups).max(axis=2, keepdims=True) / 254
    rounded = tensor.dequantise_rows(0, rows).reshape(groups.shape)
    assert (np.abs(rounded - groups) <= bound * (1 + 1e-5)).all()
    assert np.abs(rounded - groups).max() > 0 or kind.name == "IQ4_NL"
    source.close()


def test_parts_of_one_weight_have_one_scheme(tmp_path: Path) -> None:
    """Queries, keys and values of a layer get one quantisation format, although llama.cpp may store the values in a
    finer one.
    """
    tensors, values = make(Q4_0)
    finer, values["blk.0.attn_v.weight"] = q8_0("blk.0.attn_v.weight", tensors["blk.0.attn_v.weight"][1])
    tensors["blk.0.attn_v.weight"] = (Q8_0, tensors["blk.0.attn_v.weight"][1], finer)
    write_gguf(tmp_path / "a.gguf", tensors, METADATA)
    source = open_weights(tmp_path, SPECS, seed=None)
    assert {source.scheme(part) for part in SPECS[1].parts} == {Scheme("int8", 32)}
    for kind, part in zip("qkv", SPECS[1].parts, strict=True):
        exact = values[f"blk.0.attn_{kind}.weight"].reshape(part.shape[0], -1, 32)
        rounded = source.read_quantised(part).dequantise_rows(0, part.shape[0]).reshape(exact.shape)
        assert (np.abs(rounded - exact) <= np.abs(exact).max(axis=2, keepdims=True) / 254 * (1 + 1e-5)).all()
    source.close()


@pytest.mark.parametrize("name", GGUF_FAMILIES)
def test_a_model_of_every_family_equals_its_folder(tmp_path: Path, name: str) -> None:
    """A GGUF file of floats gives the same sizes and parameters as the Hugging Face folder from which it was made."""
    variant = GGUF_FAMILIES[name]
    write_model(variant, tmp_path / "folder")
    write_gguf_model(tmp_path / "folder", tmp_path / "model.gguf")
    shape = ModelShape.from_path(tmp_path / "model.gguf")
    assert shape == replace(
        ModelShape.from_path(tmp_path / "folder"), bos_token_id=None, eos_token_ids=(), pad_token_id=None
    )
    specs = [spec for spec in weight_specs(shape) if not spec.packed_only]
    found = []
    for path in (tmp_path / "folder", tmp_path / "model.gguf"):
        source = open_weights(path, specs, seed=None, ignorable=ignorable_suffixes(shape))
        found.append(load_weights(specs, source, "float32", lambda done, of: None))
        source.close()
    theirs, ours = found
    assert theirs.keys() == ours.keys()
    for parameter, value in theirs.items():
        # A file has the exponential of a rate of decay. Its logarithm is rounded.
        np.testing.assert_allclose(ours[parameter], value, 0, 2e-7 if "log_rate" in parameter else 0, err_msg=parameter)
