"""Speed of each kernel against what this machine can do: the ceilings are measured in the same run.

    python performance/bench_kernels.py [--json FILE] [--threads N] [--seconds S] [--only NAME]

Each line is the best of the calls that fit into ``--seconds``. The share is of the ceiling that binds: time at full
read bandwidth or time at full multiply-add rate (bfloat16 pairs where the machine has them), whichever is longer.
Weights and caches are larger than the last-level cache where the shape says so; small shapes stay in cache and can
pass 100 % of the memory ceiling.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from agent.kernels import SampleInputs, SampleOutputs, kernel_isa, num_threads, sample, set_threads
from agent.kernels.direct import DTYPES, Array, attention, matmul, rms_norm, store, swiglu
from agent.kernels.library import load_library


@dataclass(frozen=True)
class Ceilings:
    """Of all threads together."""

    fma_gflops: float
    bf16_gflops: float
    read_gbs: float


@dataclass(frozen=True)
class Case:
    """One kernel at one shape: a call, and the bytes and operations it cannot do without."""

    kernel: str
    shape: str
    dtype: str
    call: Callable[[], object]
    num_bytes: float
    operations: float


@dataclass(frozen=True)
class Result:
    kernel: str
    shape: str
    dtype: str
    microseconds: float
    gbs: float
    gflops: float
    share: float


def measure_ceilings() -> Ceilings:
    library = load_library()
    for name in ("llmk_measure_fma", "llmk_measure_dot_bf16"):
        getattr(library, name).argtypes, getattr(library, name).restype = [ctypes.c_double], ctypes.c_double
    library.llmk_measure_read.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.llmk_measure_read.restype = ctypes.c_double
    data = np.ones(64 << 20, np.float32)
    return Ceilings(
        max(library.llmk_measure_fma(0.1) for _ in range(3)),
        max(library.llmk_measure_dot_bf16(0.1) for _ in range(3)),
        max(library.llmk_measure_read(data.ctypes.data, data.nbytes) for _ in range(5)),
    )


def tensor(*shape: int, dtype: str) -> Array:
    """Cheap numbers of ordinary size: what they are does not matter for speed."""
    values = np.resize(np.linspace(-1, 1, 4099, dtype=np.float32), shape)
    return store(values, dtype)


MATMUL_SHAPES = (
    *((1, 11008, 4096), (4, 11008, 4096), (16, 11008, 4096)),
    *((64, 2048, 2048), (512, 2048, 2048)),
    *((1, 768, 256), (64, 768, 256)),
)
"""Rows, columns and depth: decode batches over weights larger than the caches, prefills, and the tiny model."""


def matmul_cases() -> Iterator[Case]:
    for rows, columns, depth in MATMUL_SHAPES:
        for dtype in DTYPES:
            x, w = tensor(rows, depth, dtype=dtype), tensor(columns, depth, dtype=dtype)
            num_bytes = w.nbytes + x.nbytes + rows * columns * w.itemsize

            def call(x: Array = x, w: Array = w, dtype: str = dtype) -> object:
                return matmul(x, w, dtype)

            yield Case("matmul", f"{rows}x{columns}x{depth}", dtype, call, num_bytes, 2.0 * rows * columns * depth)


def attention_cases() -> Iterator[Case]:
    for kind, seqs, queries, context, heads, kv_heads, dim in (
        ("decode", 8, 1, 2048, 32, 8, 128),
        ("decode", 32, 1, 256, 8, 2, 32),
        ("prefill", 1, 512, 512, 32, 8, 128),
        ("prefill", 1, 512, 512, 8, 2, 32),
        ("chunk", 1, 64, 2048, 32, 8, 128),
    ):
        for dtype in DTYPES:
            blocks = seqs * (context // 16)
            keys, values = (tensor(blocks, 16, kv_heads, dim, dtype=dtype) for _ in range(2))
            tables = np.random.default_rng(0).permutation(blocks).astype(np.int32).reshape(seqs, -1)
            query = tensor(seqs * queries, heads, dim, dtype=dtype)

            def call(q: Array = query, k: Array = keys, v: Array = values, t: Array = tables, d: str = dtype,
                     n: int = seqs, lens: tuple[int, int] = (queries, context)) -> object:  # fmt: skip
                return attention(q, k, v, [lens[0]] * n, [lens[1]] * n, d, block_tables=t)

            pairs = seqs * (queries * context - queries * (queries - 1) / 2)
            yield Case(f"attention {kind}", f"{seqs}x{queries}@{context} {heads}/{kv_heads}x{dim}", dtype, call,
                       2.0 * keys.nbytes + 2.0 * query.nbytes, 4 * pairs * heads * dim)  # fmt: skip


def row_cases() -> Iterator[Case]:
    for rows, width in ((1, 4096), (512, 4096)):
        for dtype in DTYPES:
            x, gamma = tensor(rows, width, dtype=dtype), tensor(width, dtype=dtype)
            yield Case("rms_norm", f"{rows}x{width}", dtype,
                       lambda x=x, g=gamma, d=dtype: rms_norm(x, g, d, d), 2.0 * x.nbytes, 4.0 * x.size)  # fmt: skip
            yield Case("swiglu", f"{rows}x{width}", dtype, lambda x=x, d=dtype: swiglu(x, d), 1.5 * x.nbytes,
                       15.0 * x.size)  # fmt: skip


def sampler_cases() -> Iterator[Case]:
    for rows, vocab_size in ((1, 32000), (64, 32000), (64, 128256)):
        logits = np.random.default_rng(0).standard_normal((rows, vocab_size)).astype(np.float32) * 3
        off, on = np.zeros(rows, np.float32), np.ones(rows, np.float32)
        none, seeds = np.zeros(rows, np.int32), np.arange(rows, dtype=np.uint64)
        for label, temperature, top_k, top_p in (("greedy", 0, 0, 1), ("top_k 50", 1, 50, 1), ("top_p 0.9", 1, 0, 0.9)):
            given = SampleInputs(
                on * temperature, none + top_k, on * np.float32(top_p), off, on, off, off, seeds, none, none
            )

            def call(logits: Array = logits, given: SampleInputs = given, outputs: SampleOutputs | None = None) -> None:
                sample(logits, given, outputs or SampleOutputs.allocate(len(logits)))

            yield Case(f"sample {label}", f"{rows}x{vocab_size}", "float32", call, logits.nbytes, 20.0 * logits.size)


def measure(case: Case, ceilings: Ceilings, seconds: float) -> Result:
    best, end = float("inf"), time.perf_counter() + seconds
    case.call()
    while time.perf_counter() < end:
        start = time.perf_counter()
        case.call()
        best = min(best, time.perf_counter() - start)
    peak = ceilings.bf16_gflops if case.dtype == "bfloat16" else ceilings.fma_gflops
    least = max(case.num_bytes / ceilings.read_gbs, case.operations / peak) * 1e-9
    return Result(case.kernel, case.shape, case.dtype, best * 1e6, case.num_bytes / best * 1e-9,
                  case.operations / best * 1e-9, least / best)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write ceilings and results to this file")
    parser.add_argument("--threads", type=int, default=0, help="threads of the kernels, 0 (default) for all processors")
    parser.add_argument("--seconds", type=float, default=0.2, help="time spent on each line (default 0.2)")
    parser.add_argument("--only", default="", help="only kernels whose name contains this")
    arguments = parser.parse_args()
    set_threads(arguments.threads)
    ceilings = measure_ceilings()
    print(f"{kernel_isa()}, {num_threads()} threads; ceilings: {ceilings.fma_gflops:.0f} GFLOP/s float32, "
          f"{ceilings.bf16_gflops:.0f} GFLOP/s bfloat16 pairs, {ceilings.read_gbs:.1f} GB/s read")  # fmt: skip
    print(f"{'kernel':<18} {'shape':<24} {'dtype':<9} {'us':>10} {'GB/s':>8} {'GFLOP/s':>9} {'share':>6}")
    results = []
    for cases in (matmul_cases, attention_cases, row_cases, sampler_cases):
        for case in cases():
            if arguments.only in case.kernel:
                result = measure(case, ceilings, arguments.seconds)
                results.append(result)
                print(f"{result.kernel:<18} {result.shape:<24} {result.dtype:<9} {result.microseconds:>10.1f} "
                      f"{result.gbs:>8.2f} {result.gflops:>9.1f} {result.share:>6.0%}", flush=True)  # fmt: skip
    if arguments.json is not None:
        report = {"isa": kernel_isa(), "threads": num_threads(), "ceilings": asdict(ceilings),
                  "results": [asdict(result) for result in results]}  # fmt: skip
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
