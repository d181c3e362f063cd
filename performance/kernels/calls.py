"""Runs single kernels: norm, SwiGLU, SiLU, rotary embedding, matrix product, and attention without rotary embedding.

A tensor is a NumPy array of float32, of float16, or of uint16 with the bits of bfloat16.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from agent.kernels.library import structure
from performance.kernels.library import load_testing_library

Array = npt.NDArray[Any]
DTYPES = ("float32", "float16", "bfloat16")

_NUMBER = {name: number for number, name in enumerate(DTYPES)}
_POINTER, _INT64 = ctypes.c_void_p, ctypes.c_int64


def store(values: Array, dtype: str) -> Array:
    """Converts floats to an array that stores ``dtype``. Rounds to nearest, ties to even."""
    values = np.ascontiguousarray(values, np.float32)
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.astype(np.float16)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def load(stored: Array, dtype: str) -> npt.NDArray[np.float64]:
    """Converts an array that stores ``dtype`` to float64, without rounding."""
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return stored.astype(np.float64)


# Each of the following ctypes classes has the members of the C struct of the same name in agent/kernels/ops.
RmsNormArgs = structure(
    "RmsNormArgs",
    "pointer: x residual gamma y rstd sum; int64: rows width; float: epsilon; int32: dtype gamma_dtype",
)
SwigluArgs = structure("SwigluArgs", "pointer: input out; int64: outer inner; int32: dtype")
SiluArgs = structure("SiluArgs", "pointer: input out; int64: count; int32: dtype")
RotaryArgs = structure(
    "RotaryArgs",
    "pointer: x out cos sin positions; int64: tokens heads dim x_stride out_stride; int32: dtype table_dtype;"
    "bool: interleaved",
)
MatMulArgs = structure("MatMulArgs", "pointer: x w out; int64: rows columns depth; int32: dtype")
AttentionArgs = structure(
    "RotaryAttentionArgs",
    "pointer: qkv out lse key_cache value_cache cos sin positions slots block_tables context_lens query_lens;"
    "pointer: query_starts query_gamma key_gamma sinks;"
    "int64: tokens num_seqs table_width table_rows num_blocks block_size heads kv_heads dim window;"
    "float: epsilon scale; int32: dtype gamma_dtype; bool: int8_cache write_first ready laid_out;"
    "pointer: key_starts first_keys",
)


def _fill(struct: type[ctypes.Structure], **values: Any) -> ctypes.Structure:
    """Fills a C struct. An array is stored as its address, and a dtype name as its number."""
    filled = {}
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            assert value.flags.c_contiguous
            filled[name] = value.ctypes.data
        else:
            filled[name] = _NUMBER[value] if isinstance(value, str) else value
    return struct(**filled)


def matmul(x: Array, w: Array, dtype: str) -> Array:
    out = np.full((x.shape[0], w.shape[0]), 77, x.dtype)
    args = _fill(MatMulArgs, x=x, w=w, out=out, rows=x.shape[0], columns=w.shape[0], depth=x.shape[1], dtype=dtype)
    load_testing_library().llmk_test_matmul(ctypes.byref(args))
    return out


@dataclass
class Normed:
    y: Array
    rstd: npt.NDArray[np.float32]
    sum: Array | None


def rms_norm(x: Array, gamma: Array, dtype: str, gamma_dtype: str, residual: Array | None = None) -> Normed:
    rows, width = x.shape
    result = Normed(np.empty_like(x), np.empty(rows, np.float32), None if residual is None else np.empty_like(x))
    args = _fill(
        RmsNormArgs, x=x, residual=residual, gamma=gamma, y=result.y, rstd=result.rstd, sum=result.sum,
        rows=rows, width=width, epsilon=1e-5, dtype=dtype, gamma_dtype=gamma_dtype,
    )  # fmt: skip
    load_testing_library().llmk_test_rms_norm(ctypes.byref(args))
    return result


def swiglu(x: Array, dtype: str) -> Array:
    rows, width = x.shape
    out = np.empty((rows, width // 2), x.dtype)
    args = _fill(SwigluArgs, input=x, out=out, outer=rows, inner=width // 2, dtype=dtype)
    load_testing_library().llmk_test_swiglu(ctypes.byref(args))
    return out


def silu(x: Array, dtype: str) -> Array:
    out = np.empty_like(x)
    args = _fill(SiluArgs, input=x, out=out, count=x.size, dtype=dtype)
    load_testing_library().llmk_test_silu(ctypes.byref(args))
    return out


def rotary(
    x: Array, cos: Array, sin: Array, positions: Array | None, dtypes: tuple[str, str], *, interleaved: bool = False
) -> Array:
    """Applies the rotary embedding with the tables ``cos`` and ``sin`` [positions, dim] to ``x`` [tokens, heads, dim].

    ``dtypes`` are the type of ``x`` and the type of the tables. Returns an array like ``x``.
    """
    tokens, heads, dim = x.shape
    out = np.empty_like(x)
    args = _fill(
        RotaryArgs, x=x, out=out, cos=cos, sin=sin, positions=positions, tokens=tokens, heads=heads, dim=dim,
        x_stride=heads * dim, out_stride=heads * dim, dtype=dtypes[0], table_dtype=dtypes[1], interleaved=interleaved,
    )  # fmt: skip
    load_testing_library().llmk_test_rotary(ctypes.byref(args))
    return out


def attention(
    query: Array, keys: Array, values: Array, query_lens: list[int], context_lens: list[int], dtype: str, *,
    block_tables: Array | None = None, first_keys: Array | None = None, reference: bool = False,
) -> tuple[int, Array]:  # fmt: skip
    """Runs attention without rotary embedding. As for the native primitives, the caller has already rotated queries and
    keys.

    ``query`` is [tokens, heads, dim]. If there are ``block_tables`` [sequences, blocks per sequence], keys and values
    are [blocks, block_size, kv_heads, dim], otherwise [rows, kv_heads, dim]. ``first_keys`` [tokens] (int64) is the
    first key that each token sees. Returns the error code (0: success) and an output like ``query``.
    """
    load_testing_library().llmk_test_attention.argtypes = [_POINTER, _INT64, ctypes.c_int]
    tokens, heads, dim = query.shape
    out = np.full_like(query, 77)
    lens = np.array(query_lens, np.int32), np.array(context_lens, np.int32)
    blocks = {} if block_tables is None else {"table_width": block_tables.shape[1], "num_blocks": keys.shape[0]}
    args = _fill(
        AttentionArgs, qkv=query, out=out, key_cache=keys, value_cache=values, block_tables=block_tables,
        query_lens=lens[0], context_lens=lens[1], first_keys=first_keys, tokens=tokens, num_seqs=len(query_lens),
        block_size=keys.shape[1], heads=heads, kv_heads=keys.shape[-2], dim=dim, scale=dim**-0.5, dtype=dtype,
        ready=True, **blocks,
    )  # fmt: skip
    code = load_testing_library().llmk_test_attention(ctypes.byref(args), keys.shape[0], int(reference))
    return int(code), out
