"""Tests packed weights (blobs): their sizes, equal bits on every instruction set, and which blobs are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from agent.kernels.library import KernelError, load_library
from agent.kernels.packing import join_weight_parts, pack_weight, packed_weight_bytes, weight_blob
from performance.kernels.attention_calls import EntryCall
from performance.kernels.linear_calls import linear, packed
from support.time_limits import time_limit

ROOT = Path(__file__).resolve().parents[2]
DIGEST = """
import hashlib, numpy as np
from performance.kernels.calls import DTYPES, store
from performance.kernels.linear_calls import linear, packed
rng = np.random.default_rng(0)
w = rng.standard_normal((150, 208)).astype(np.float32)
for dtype in DTYPES:
    x = store(rng.standard_normal((23, 208)).astype(np.float32) * 3, dtype)
    for fmt in ("int8", "int4"):
        for group, asymmetric in ((0, False), (32, False), (32, True), (40, True)):
            blob = packed(fmt, w, group=group, gated=True, asymmetric=asymmetric)
            results = [linear(x, blob, dtype, epilogue=epilogue) for epilogue in ("store", "store_float", "swiglu")]
            digest = hashlib.sha256(b"".join(result.tobytes() for result in results))
            print(dtype, fmt, group, asymmetric, digest.hexdigest())
# Fills whole tiles of the matrix unit, in one and in two blocks of rows. The depth needs several pieces.
w = rng.standard_normal((150, 1024)).astype(np.float32)
blob = packed("int8", w)
for rows in (1, 5, 16, 17, 32, 45, 70):
    x = store(rng.standard_normal((rows, 1024)).astype(np.float32), "bfloat16")
    print(rows, hashlib.sha256(linear(x, blob, "bfloat16", epilogue="store_float").tobytes()).hexdigest())
    for fmt, group, asymmetric in (
        ("int4", 64, True), ("int4", 128, False), ("int4", 32, True), ("int8", 64, False), ("int8", 32, False)
    ):
        grouped = packed(fmt, w, group=group, asymmetric=asymmetric)
        print(rows, fmt, hashlib.sha256(linear(x, grouped, "bfloat16", epilogue="store_float").tobytes()).hexdigest())
"""


@cache
def digests(isa: str) -> list[str]:
    """Returns the lines that ``DIGEST`` prints with an instruction set.

    Skips the test if the library refuses the set.
    """
    process = run_under(isa, DIGEST)
    if process.returncode == 2 and f'LLM_KERNELS_ISA is "{isa}"' in process.stderr:
        pytest.skip(f"this processor or compiler has no {isa}")
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


def run_under(isa: str, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=time_limit(60), check=False,
        env={**os.environ, "LLM_KERNELS_ISA": isa},
    )  # fmt: skip


@pytest.mark.parametrize("isa", ["avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "avx512_amx"])
def test_integer_formats_give_the_same_bits_on_every_instruction_set(isa: str) -> None:
    assert digests(isa) == digests("portable")
    assert len(digests(isa)) == 66


def test_sizes_of_blobs() -> None:
    assert packed_weight_bytes("bfloat16", 64, 10, 0) == 64 + 64 * 10 * 2
    assert packed_weight_bytes("int8", 128, 64, 0) == 64 + 2 * (64 * 64 + 64 * 4)
    for fmt in ("int4", "int4_weight_only"):
        assert packed_weight_bytes(fmt, 64, 128, 64) == 64 + 64 * 64 + 2 * (64 * 4 + 64)
    for fmt, columns, depth, group in (
        *(("int4", 64, 64, 12), ("bfloat16", 64, 64, 32), ("int8", 0, 64, 0), ("int8", 64, 0, 0)),
        *(("int8", 64, 70000, 0), ("int8", 64, 64, -8)),
    ):
        with pytest.raises(ValueError, match=rf"no packed {fmt} weight can have {columns} columns"):
            packed_weight_bytes(fmt, columns, depth, group)
    with pytest.raises(ValueError, match=r"weight format 'int3' is not known; there are float32, .*int4"):
        packed_weight_bytes("int3", 64, 64)


def test_blobs_are_aligned() -> None:
    for num_bytes in (64, 1000, 3 << 20):
        blob = weight_blob(num_bytes)
        assert (blob.size, blob.ctypes.data % 64, blob.any()) == (num_bytes, 0, False)


def test_packing_refuses_what_does_not_fit() -> None:
    values = np.ones((64, 64), np.float32)
    with pytest.raises(KernelError, match=r"packing a int8 weight of 64 x 64 failed"):
        pack_weight("int8", values, weight_blob(100))
    with pytest.raises(KernelError):
        pack_weight("int8", values[:63], weight_blob(1 << 20), gated=True)
    with pytest.raises(KernelError):
        pack_weight("int8", values, weight_blob(1 << 20)[1:])
    for fmt in ("int4", "int4_weight_only"):
        codes, scales = np.ones((64, 64), np.uint8), np.ones((64, 1), np.float32)
        pack_weight(fmt, codes, weight_blob(1 << 20), scales=scales, zeros=np.full((64, 1), 16, np.uint8))
        with pytest.raises(KernelError):
            pack_weight(fmt, codes, weight_blob(1 << 20), scales=scales, zeros=np.full((64, 1), 17, np.uint8))
    with pytest.raises(ValueError, match=r"values is float32 .* must be contiguous int8 \(64, 64\)"):
        pack_weight("int8", values, weight_blob(1 << 20), scales=np.ones((64, 1), np.float32))
    with pytest.raises(ValueError, match=r"scales is float32 \(64, 1\).* float32 \(64, 2\)"):
        pack_weight("int8", values.astype(np.int8), weight_blob(1 << 20), group=32, scales=np.ones((64, 1), np.float32))
    with pytest.raises(ValueError, match=r"a bfloat16 weight has no scales"):
        pack_weight("bfloat16", values, weight_blob(1 << 20), scales=np.ones((64, 1), np.float32))
    with pytest.raises(ValueError, match=r"\[columns, depth\]; this one has shape \(64,\)"):
        pack_weight("int8", values[0], weight_blob(1 << 20))
    with pytest.raises(ValueError, match=r"source_dtype 'int3' is not known"):
        pack_weight("int8", values, weight_blob(1 << 20), source_dtype="int3")


def is_accepted(blob: np.ndarray) -> bool:
    """Returns whether the operator PackedLinear accepts the packed weight ``blob`` for a step without rows."""
    columns, depth = blob[16:32].view(np.int64)
    x, out = np.zeros((1, depth), np.float32), np.zeros((1, columns), np.float32)
    tensors = [(x, None), (blob, None), (np.zeros(4, np.int32), None), (out, None)]
    return EntryCall(tensors).run(load_library().PackedLinear) == 0


def test_damaged_blobs_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    blob = packed("int8", np.ones((64, 64), np.float32))
    assert is_accepted(blob)
    for word, value, reason in (
        (0, 1, "the weight is not packed: it starts with 00000001"),
        (2, 9, "packed in layout 9; this build reads layout 3: pack it again"),
        (13, 7, "the weight was packed in tiles of 7 steps; "),
        (1, 99, "the header of the packed weight is damaged: the format is not known"),
        (4, 300, "the packed weight has 4416 bytes; its header asks for"),
    ):
        damaged = weight_blob(blob.size)
        damaged[:] = blob
        damaged.view(np.int32)[word] = value
        assert not is_accepted(damaged)
        assert reason in capfd.readouterr().err
    assert not is_accepted(blob[:32])


def test_the_kernel_refuses_what_does_not_go_together() -> None:
    x = np.ones((2, 64), np.float32)
    with pytest.raises(KernelError):
        linear(x, packed("float16", x.astype(np.float16), source_dtype="float16"), "float32")
    with pytest.raises(KernelError):
        linear(x, packed("int8", x), "float32", epilogue="swiglu")


def parts_of(*shapes: tuple[int, int]) -> np.ndarray:
    """Returns a packed weight of several parts.

    Memory for a header comes first, then the float32 weights of each part. ``shapes`` are the parts' (columns, depth).
    """
    sizes = [-(-packed_weight_bytes("float32", *shape) // 64) * 64 for shape in shapes]
    blob, begin = weight_blob(64 + sum(sizes)), 64
    for size, shape in zip(sizes, shapes, strict=True):
        pack_weight("float32", np.ones(shape, np.float32), blob[begin : begin + size])
        begin += size
    return blob


def test_parts_of_a_weight_are_joined() -> None:
    blob = parts_of((64, 24), (64, 40), (64, 8))
    join_weight_parts(blob, 3)
    assert is_accepted(blob)
    assert not is_accepted(blob[:-64]), "the last part is cut off"
    for place, value in ((24, 73), (48, 4)):  # byte offsets of the depth and of the number of parts in the header
        damaged = weight_blob(blob.size)
        damaged[:] = blob
        damaged[place] = value
        assert not is_accepted(damaged)


@pytest.mark.parametrize("shapes", [[(64, 24), (128, 24)], [(64, 24)]])
def test_parts_that_do_not_go_together(shapes: list[tuple[int, int]]) -> None:
    blob = parts_of(*shapes)
    with pytest.raises(KernelError, match="could not be joined"):
        join_weight_parts(blob, 2)


def test_a_weight_in_parts_is_not_multiplied_as_a_whole() -> None:
    blob = parts_of((64, 24), (64, 40))
    join_weight_parts(blob, 2)
    with pytest.raises(KernelError):
        linear(np.ones((1, 64), np.float32), blob, "float32")
