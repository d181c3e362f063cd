"""Reads GGUF files that the tests write byte by byte: exact values, and errors that name the tensor."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.weights import WeightPart, WeightSpec, load_weights, open_weights
from agent.weights.storage import Array
from llm_serving.errors import CheckpointError
from support.gguf_files import (
    BF16,
    F16,
    F32,
    HIDDEN,
    METADATA,
    Q4_0,
    Q4_1,
    Q6_K,
    Q8_0,
    SPECS,
    Tensors,
    make,
    random_integers,
    write_gguf,
)


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
    """A block of 256 values has 128 bytes of low bits, 64 of high bits, 16 scales and a float16 factor."""
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
    "other type": (
        lambda t, m: t.update({"blk.0.ffn_down.weight": (Q4_1, (HIDDEN, HIDDEN), b"\0" * (HIDDEN * 2 * 20))}),
        "tensor blk.0.ffn_down.weight has type Q4_1; supported are F32, F16, BF16, Q8_0, Q4_0",
    ),
    "large type in a layer": (
        lambda t, m: t.update({"blk.0.ffn_down.weight": (Q6_K, (HIDDEN, 256), b"\0" * (HIDDEN * 210))}),
        "tensor blk.0.ffn_down.weight has type Q6_K; supported are",
    ),
    "missing": (
        lambda t, m: t.pop("blk.0.attn_k.weight"),
        "tensor is: blk.0.attn_k.weight (model.layers.0.self_attn.k_proj.weight) missing",
    ),
    "unexpected": (lambda t, m: t.update({"blk.1.x.weight": (F32, (1,), b"\0" * 4)}), "blk.1.x.weight in the weights"),
    "other shape": (
        lambda t, m: t.update({"output_norm.weight": (F32, (32,), b"\0" * 128)}),
        "tensor output_norm.weight has shape [32]; config.json requires [64]",
    ),
    "quantised vector": (
        lambda t, m: t.update({"output_norm.weight": (Q8_0, (HIDDEN,), b"\0" * 68)}),
        "tensor output_norm.weight has type Q8_0; a vector must have one of F32, F16, BF16",
    ),
    "other architecture": (
        lambda t, m: m.update({"general.architecture": "gemma"}),
        "general.architecture is 'gemma'; only llama is supported",
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
        with pytest.raises(CheckpointError, match=r"cut\.gguf: not a valid GGUF file, or truncated"):
            load(tmp_path)


@pytest.mark.parametrize(
    ("offset", "phrase"),
    [(8, "it claims 4294967295 tensors"), (16, "it claims 6 tensors and 4294967295 entries")],
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
    """Case 10102 of tests/long/fuzz_loader.py: the package gguf looped for minutes and took gigabytes."""
    write_gguf(tmp_path / "model.gguf", make(F32)[0], METADATA)
    content = (tmp_path / "model.gguf").read_bytes()
    array = struct.pack("<IIQ", 9, 4, 2**31)
    place = content.index(b"llama.attention.head_count") + len("llama.attention.head_count")
    (tmp_path / "model.gguf").write_bytes(content[:place] + array + content[place + len(array) :])
    with pytest.raises(CheckpointError, match="an array that is too large"):
        load(tmp_path)


def test_two_gguf_files_in_a_folder_are_refused(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name, make(F32)[0], METADATA)
    with pytest.raises(CheckpointError, match=r"a\.gguf, b\.gguf; there must be exactly one GGUF file"):
        load(tmp_path)
