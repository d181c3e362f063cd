"""Writes GGUF files for tests, byte by byte from the description of the format."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from agent.weights import WeightPart, WeightSpec
from agent.weights.storage import from_float32, to_float32

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
    """Writes a GGUF file with these tensors (type, shape, data) and metadata. The file format reverses the shapes."""
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
    """Returns random integers [rows, depth] and float16 scales [rows, depth / 32] for the tensor ``name``."""
    rng = np.random.default_rng(sum(name.encode()))
    scales = rng.uniform(0.001, 0.1, (shape[0], shape[1] // 32)).astype(np.float16)
    return rng.integers(low, high, shape), scales


def q8_0(name: str, shape: tuple[int, ...]) -> tuple[bytes, np.ndarray]:
    """Returns a random Q8_0 tensor: its bytes in the file, and its values as floats."""
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
    """Returns an array that maps each row of a GGUF weight to its row in Hugging Face's weight.

    llama.cpp stores the rows of each head in another order: rows of the first and the second half alternate.
    """
    half = HEAD_DIM // 2
    return np.array([h * HEAD_DIM + part * half + i for h in range(heads) for i in range(half) for part in range(2)])


def make(
    kind: int, embedding: int = F32
) -> tuple[dict[str, tuple[int, tuple[int, ...], bytes]], dict[str, np.ndarray]]:
    """Returns the tensors of a GGUF file and their expected values, as two dictionaries by tensor name.

    ``kind`` is the GGUF type of the matrices, and ``embedding`` is that of the embedding. The expected values have the
    row order of Hugging Face.
    """
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
