"""Reads GGUF files that the tests write byte by byte: exact values, and errors that name the tensor."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.weights import WeightPart, WeightSpec, load_weights, open_weights
from agent.weights.storage import Array, from_float32, to_float32
from llm_serving.errors import CheckpointError

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB = 4, 2, 16, 64, 10
F32, F16, Q4_0, Q4_1, Q8_0, Q6_K, BF16 = 0, 1, 2, 3, 8, 14, 30
UINT32, STRING = 4, 8
ALIGNMENT = 32
SPECS = (
    WeightSpec("embed", (WeightPart("model.embed_tokens.weight", (VOCAB, HIDDEN)),)),
    WeightSpec(
        "qkv",
        (
            WeightPart("model.layers.0.self_attn.q_proj.weight", (HEADS * HEAD_DIM, HIDDEN)),
            WeightPart("model.layers.0.self_attn.k_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)),
            WeightPart("model.layers.0.self_attn.v_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)),
        ),
        "linear",
    ),
    WeightSpec("down", (WeightPart("model.layers.0.mlp.down_proj.weight", (HIDDEN, HIDDEN)),), "linear"),
    WeightSpec("norm", (WeightPart("model.norm.weight", (HIDDEN,)),)),
)
Tensors = dict[str, tuple[int, tuple[int, ...], bytes]]
"""Tensors by name: (type, shape, data)."""
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def write_gguf(path: Path, tensors: Tensors, metadata: dict[str, Any]) -> None:
    """Writes a GGUF file of tensors (type, shape, data). The file stores shapes in reverse."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        is_text = isinstance(value, str)
        head += text(key) + struct.pack("<I", STRING if is_text else UINT32)
        head += text(value) if is_text else struct.pack("<I", value)
    data = b""
    for name, (kind, shape, content) in tensors.items():
        dims = shape[::-1]
        head += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, len(data))
        data += content + b"\0" * (-len(content) % ALIGNMENT)
    path.write_bytes(head + b"\0" * (-len(head) % ALIGNMENT) + data)


def random_integers(name: str, shape: tuple[int, ...], low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns random integers [rows, depth] and float16 scales [rows, depth / 32]."""
    rng = np.random.default_rng(sum(name.encode()))
    scales = rng.uniform(0.001, 0.1, (shape[0], shape[1] // 32)).astype(np.float16)
    return rng.integers(low, high, shape), scales


def q8_0(name: str, shape: tuple[int, ...]) -> tuple[bytes, np.ndarray]:
    """Returns the bytes of a tensor and its values."""
    q, scales = random_integers(name, shape, -128, 128)
    content, value = b"", np.empty(shape, np.float32)
    for row in range(shape[0]):
        for block in range(shape[1] // 32):
            inputs = slice(block * 32, block * 32 + 32)
            content += scales[row, block].tobytes() + struct.pack("<32b", *q[row, inputs].tolist())
            value[row, inputs] = q[row, inputs].astype(np.float32) * np.float32(scales[row, block])
    return content, value


def q4_0(name: str, shape: tuple[int, ...]) -> tuple[bytes, np.ndarray]:
    q, scales = random_integers(name, shape, 0, 16)
    content, value = b"", np.empty(shape, np.float32)
    for row in range(shape[0]):
        for block in range(shape[1] // 32):
            inputs = slice(block * 32, block * 32 + 32)
            both = q[row, inputs]
            content += scales[row, block].tobytes() + bytes(int(both[i]) | int(both[i + 16]) << 4 for i in range(16))
            value[row, inputs] = (both - 8).astype(np.float32) * np.float32(scales[row, block])
    return content, value


def floats(name: str, shape: tuple[int, ...], dtype: str) -> tuple[bytes, np.ndarray]:
    rng = np.random.default_rng(sum(name.encode()))
    stored = from_float32(rng.standard_normal(shape).astype(np.float32), dtype)
    return stored.tobytes(), to_float32(stored, dtype)


ENCODERS: dict[int, Callable[[str, tuple[int, ...]], tuple[bytes, np.ndarray]]] = {
    F32: lambda name, shape: floats(name, shape, "float32"),
    F16: lambda name, shape: floats(name, shape, "float16"),
    BF16: lambda name, shape: floats(name, shape, "bfloat16"),
    Q8_0: q8_0,
    Q4_0: q4_0,
}


def llama_cpp_rows(heads: int) -> np.ndarray:
    """Returns the Hugging Face row of each row of the file: llama.cpp interleaves the two halves of a head."""
    half = HEAD_DIM // 2
    return np.array([h * HEAD_DIM + part * half + i for h in range(heads) for i in range(half) for part in range(2)])


def make(
    kind: int, embedding: int = F32
) -> tuple[dict[str, tuple[int, tuple[int, ...], bytes]], dict[str, np.ndarray]]:
    """Returns the tensors of the file and the values of our parameters."""
    shapes = {
        "token_embd.weight": (embedding, (VOCAB, HIDDEN)),
        "blk.0.attn_q.weight": (kind, (HEADS * HEAD_DIM, HIDDEN)),
        "blk.0.attn_k.weight": (kind, (KV_HEADS * HEAD_DIM, HIDDEN)),
        "blk.0.attn_v.weight": (kind, (KV_HEADS * HEAD_DIM, HIDDEN)),
        "blk.0.ffn_down.weight": (kind, (HIDDEN, HIDDEN)),
        "output_norm.weight": (F32, (HIDDEN,)),
    }
    tensors, values = {}, {}
    for name, (each, shape) in shapes.items():
        content, values[name] = ENCODERS[each](name, shape)
        tensors[name] = (each, shape, content)
    for name, heads in (("blk.0.attn_q.weight", HEADS), ("blk.0.attn_k.weight", KV_HEADS)):
        unpermuted = np.empty_like(values[name])
        unpermuted[llama_cpp_rows(heads)] = values[name]
        values[name] = unpermuted
    return tensors, values


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


def test_two_gguf_files_in_a_folder_are_refused(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name, make(F32)[0], METADATA)
    with pytest.raises(CheckpointError, match=r"a\.gguf, b\.gguf; there must be exactly one GGUF file"):
        load(tmp_path)
