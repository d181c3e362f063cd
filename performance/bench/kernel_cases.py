"""Defines the kernels and shapes that are measured.

A case (a kernel with one shape) owns large arrays, so the program creates only one case at a time. A case has several
copies of the data that its kernel reads, together at least ``ROTATION_BYTES``. The calls use the copies one after the
other. With a single copy, the data would stay in the last-level cache, which does not happen in a model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agent.kernels import SAMPLE_INPUTS, SampleCall, SampleInputs, SampleOutputs
from agent.kernels.packing import Blob, weight_blob
from llm_serving.model.number_formats import INTEGER_FORMATS, weight_format
from llm_serving.model.shape import ModelShape
from llm_serving.sampling_params import SAMPLER_PARAMETERS
from performance.bench.roofline import Numbers, Operator, attention, layer_linears, linear
from performance.kernels.attention_calls import EntryCall, cache_array
from performance.kernels.calls import DTYPES, Array, rms_norm, store, swiglu
from performance.kernels.library import load_testing_library
from performance.kernels.linear_calls import LinearArgs, packed

SHAPES = Path(__file__).resolve().parents[2] / "models" / "shapes"
SHAPE_NAMES = ("llama_160m", "llama_1b", "llama_7b")
LINEAR_FORMATS = ("bfloat16", *(each.name for each in INTEGER_FORMATS))
LINEAR_ROWS = (1, 8, 64, 512)
ROTATION_BYTES = 160 << 20
"""Minimum size of all copies of a case's data together: five times a last-level cache of 32 MB."""
GROUP = 64
"""Number of weights with one scale in the formats with groups."""
BLOCK_SIZE = 16
"""Tokens of a KV block."""
DECODE_SEQS, DECODE_CONTEXT = 64, 512
"""Sequences of a measured decode step, and the tokens of their contexts. Shapes with large KV heads have a quarter of
the sequences."""
PREFILL_TOKENS = 2048
"""Tokens of the measured prompt, and of the context of the measured chunk."""
DTYPE = "bfloat16"
CACHE_LINE = 64
"""Arrays begin at multiples of this number of bytes."""


@dataclass(frozen=True)
class Case:
    """A kernel with one shape: calls that differ only in their data, and the minimum work of a call."""

    kernel: str
    shape: str
    format: str
    calls: Sequence[Callable[[], object]]
    operator: Operator
    others: Sequence[Callable[[], object]] = ()
    """The calls of another build of the kernels, with the same arrays, if two builds are compared."""


def load_shape(name: str) -> ModelShape:
    return ModelShape.from_hf_folder(SHAPES / name)


def ordinary(*shape: int, dtype: str) -> Array:
    """Returns an array of numbers from -1 to 1, aligned to a cache line as in a model. The values of the numbers do not
    affect the speed.
    """
    values = store(np.resize(np.linspace(-1, 1, 4099, dtype=np.float32), shape), dtype)
    memory = np.empty(values.nbytes + CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    aligned = memory[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    aligned[...] = values
    return aligned


def copies_of(num_bytes: int) -> int:
    return max(2, -(-ROTATION_BYTES // num_bytes))


def linear_shapes(names: Sequence[str]) -> dict[tuple[int, int], list[str]]:
    """Maps each size (columns, depth) to the names of the models' linear layers that have this size."""
    sizes: dict[tuple[int, int], list[str]] = {}
    for name in names:
        shape = load_shape(name)
        for layer, size in (layer_linears(shape) | {"lm_head": (shape.vocab_size, shape.hidden_size)}).items():
            sizes.setdefault(size, []).append(f"{name.removeprefix('llama_')}.{layer}")
    return sizes


def linear_cases(
    names: Sequence[str], rows: Sequence[int], formats: Sequence[str], other: ctypes.CDLL | None = None
) -> Iterator[Case]:
    for (columns, depth), layers in linear_shapes(names).items():
        values = ordinary(columns, depth, dtype="float32")
        for name in formats:
            blob = packed(name, values, group=GROUP if weight_format(name).has_groups else 0)
            blobs = [blob, *(copy_of(blob) for _ in range(copies_of(blob.size) - 1))]
            numbers = Numbers(DTYPE, name, group=GROUP)
            for count in rows:
                size = f"{count}x{columns}x{depth} {'/'.join(layers)}"
                operator = linear("linear", count, columns, depth, numbers)
                others = [] if other is None else linear_calls(blobs, count, columns, depth, library=other)
                yield Case("linear", size, name, linear_calls(blobs, count, columns, depth), operator, others)


def copy_of(blob: Blob) -> Blob:
    copy = weight_blob(blob.size)
    copy[:] = blob
    return copy


def linear_calls(
    blobs: Sequence[Blob], rows: int, columns: int, depth: int, dtype: str = DTYPE, library: ctypes.CDLL | None = None
) -> list[Callable[[], object]]:
    """Returns calls of the linear kernel, one for each copy of the weight.

    The arguments are prepared outside the calls, because their preparation takes as long as a call with one row.
    """
    entry = (library or load_testing_library()).llmk_test_linear
    entry.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    x, out = ordinary(rows, depth, dtype=dtype), ordinary(rows, columns, dtype=dtype)

    def prepared(blob: Blob) -> Callable[[], object]:
        args = LinearArgs(
            weight=blob.ctypes.data, x=x.ctypes.data, dtype=DTYPES.index(dtype), rows=rows, x_stride=depth,
            out_stride=columns, out=out.ctypes.data,
        )  # fmt: skip
        arrays = (blob, x, out)  # the closure keeps the arrays alive
        return lambda: _checked(entry(ctypes.byref(args), arrays[0].size, 0))

    return [prepared(blob) for blob in blobs]


def _checked(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"a kernel rejected its arguments with {code}; the reason is on standard error")


def attention_cases(names: Sequence[str], other: ctypes.CDLL | None = None) -> Iterator[Case]:
    """Yields cases of attention: decode, prefill of a prompt, and a chunk of a prompt after a long context."""
    for name in names:
        shape = load_shape(name)
        decode_seqs = DECODE_SEQS if shape.num_key_value_heads * shape.head_dim < 2048 else DECODE_SEQS // 4
        for kv_format in (DTYPE, "int8"):
            for kind, seqs, queries, context in (
                ("decode", decode_seqs, 1, DECODE_CONTEXT),
                ("decode", 1, 1, 2 * PREFILL_TOKENS),
                ("prefill", 1, PREFILL_TOKENS, PREFILL_TOKENS),
                ("chunk", 1, 256, PREFILL_TOKENS),
            ):
                yield _attention_case(shape, f"attention {kind}", seqs, queries, context, kv_format, other)


def _attention_case(
    shape: ModelShape, kernel: str, seqs: int, queries: int, context: int, kv_format: str, other: ctypes.CDLL | None
) -> Case:
    heads, kv_heads, dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    operator = attention(
        "attention", [(queries, context)] * seqs, heads, kv_heads, dim, Numbers(DTYPE, kv_format=kv_format)
    )
    tensors = [
        _attention_tensors((heads, kv_heads, dim), seqs, queries, context, kv_format, DTYPE)
        for _ in range(copies_of(int(operator.num_bytes)) if queries == 1 else 1)
    ]
    name = f"{seqs}x{queries}@{context} {heads}/{kv_heads}x{dim}"
    calls = [_attention_run(one, load_testing_library()) for one in tensors]
    others = [] if other is None else [_attention_run(one, other) for one in tensors]
    return Case(kernel, name, kv_format, calls, operator, others)


def attention_call(
    sizes: tuple[int, int, int], seqs: int, queries: int, context: int, kv_format: str, dtype: str = DTYPE
) -> Callable[[], object]:
    """Returns a function that calls RotaryAttention with its own key and value caches."""
    return _attention_run(_attention_tensors(sizes, seqs, queries, context, kv_format, dtype), load_testing_library())


def _attention_run(tensors: EntryCall, library: ctypes.CDLL) -> Callable[[], object]:
    entry = library.RotaryAttention
    return lambda: _checked(tensors.run(entry))


def _attention_tensors(
    sizes: tuple[int, int, int], seqs: int, queries: int, context: int, kv_format: str, dtype: str
) -> EntryCall:
    """Returns an attention call with its tensors. The blocks of a sequence are in random places, as in a server."""
    heads, kv_heads, dim = sizes
    width = -(-context // BLOCK_SIZE)
    tables = np.random.default_rng(0).permutation(seqs * width).astype(np.int32).reshape(seqs, width)
    caches = [cache_array(seqs * width, kv_heads, BLOCK_SIZE, dim, kv_format) for _ in range(2)]
    for cache in caches:
        # Without this write, Linux would map all pages to one page of zeros, which stays in the processor's cache.
        cache.fill(0)
    qkv = ordinary(seqs * queries, (heads + 2 * kv_heads) * dim, dtype=dtype)
    positions = np.tile(np.arange(context - queries, context, dtype=np.int32), seqs)
    slots = (tables[:, positions[:queries] // BLOCK_SIZE] * BLOCK_SIZE + positions[:queries] % BLOCK_SIZE).ravel()
    angles = np.arange(context)[:, None] * np.linspace(0, 1, dim)
    lens = [np.full(seqs, length, np.int32) for length in (context, queries)]
    counts = np.array([seqs * queries, seqs, width, 0], np.int32)
    out = ordinary(seqs * queries, heads * dim, dtype=dtype)
    return EntryCall(
        [
            (qkv, dtype), (positions, None), (np.cos(angles).astype(np.float32), None),
            (np.sin(angles).astype(np.float32), None), (caches[0], kv_format), (caches[1], kv_format),
            (slots.astype(np.int32), None), (tables, None), (lens[0], None), (lens[1], None), (counts, None),
            (out, dtype),
        ]
    )  # fmt: skip


def row_cases() -> Iterator[Case]:
    """Yields cases of norm and SwiGLU, which only read and write rows. The rows stay in the processor's caches."""
    for rows, width in ((1, 4096), (512, 4096)):
        x, gamma = ordinary(rows, width, dtype=DTYPE), ordinary(width, dtype=DTYPE)
        shape = f"{rows}x{width}"
        norm = Operator("rms_norm", 2.0 * x.nbytes, 4.0 * x.size, "fp32_gflops")
        gate = Operator("swiglu", 1.5 * x.nbytes, 15.0 * x.size, "fp32_gflops")
        yield Case("rms_norm", shape, DTYPE, [lambda x=x, gamma=gamma: rms_norm(x, gamma, DTYPE, DTYPE)], norm)
        yield Case("swiglu", shape, DTYPE, [lambda x=x: swiglu(x, DTYPE)], gate)


def sampler_cases() -> Iterator[Case]:
    for rows, vocab_size in ((1, 32000), (64, 32000)):
        logits = np.random.default_rng(0).standard_normal((rows, vocab_size)).astype(np.float32) * 3
        outputs = SampleOutputs.allocate(rows)
        operator = Operator("sample", float(logits.nbytes), 20.0 * logits.size, "fp32_gflops")
        for label, temperature, top_k, top_p in (("greedy", 0, 0, 1), ("top_k 50", 1, 50, 1), ("top_p 0.9", 1, 0, 0.9)):
            prepared = SampleCall(_sample_inputs(rows, temperature, top_k, top_p), outputs, rows)

            def call(logits: Array = logits, prepared: SampleCall = prepared) -> None:
                prepared.run(logits)

            yield Case(f"sample {label}", f"{rows}x{vocab_size}", "float32", [call], operator)


def _sample_inputs(rows: int, temperature: float, top_k: int, top_p: float) -> SampleInputs:
    values = {each.name: each.default for each in SAMPLER_PARAMETERS}
    values |= {"temperature": temperature, "top_k": top_k, "top_p": top_p, "do_sample": 1}
    inputs = {name: np.full(rows, values.get(name, 0), dtype) for name, dtype in SAMPLE_INPUTS.items()}
    return inputs | {"seed": np.arange(rows, dtype=np.uint64)}
