"""Adds and gathers arrays over the agents of a pipeline stage, through shared memory.

The agents wait for each other with flag lines, which are counters in the shared memory.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from agent.kernels.library import KernelError, load_library, structure
from llm_serving.errors import GroupDownError

_DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
"""The number of each type in llmk::DType (common/types.h)."""
_GROUP_DOWN = 3
"""Code that a kernel returns if the group is down (``kGroupDown`` of agent/kernels/exchange/lines.h)."""
# ctypes classes with the members of the C structs of the same names in exchange/collectives.h.
_ExchangeArgs = structure(
    "ExchangeArgs", "pointer: base; int64: down lines buffers piece_bytes timeout_ms bell; int32: size index"
)
_GatherRowsArgs = structure("GatherRowsArgs", "pointer: input output; int64: rows in_width stride whole out_stride")
_Times = structure("ExchangeTimes", "int64: total_ns waiting_ns pieces")


@dataclass(frozen=True, slots=True)
class ExchangeTimes:
    """The time that this process spent in sums and gathers."""

    total_ns: int
    waiting_ns: int
    """The part of ``total_ns`` that was spent waiting for other agents."""
    pieces: int


def open_exchange(
    base: int,
    *,
    down: int,
    lines: int,
    buffers: int,
    piece_bytes: int,
    timeout_s: float,
    size: int,
    index: int,
    bell: int = 0,
) -> None:
    """Opens the shared memory through which the agents of a pipeline stage exchange arrays. This process is agent
    ``index`` of ``size`` agents.

    ``base`` is the address of the shared memory. ``down``, ``lines``, ``buffers`` and ``bell`` are byte offsets in this
    memory. ``ExchangeArgs`` in exchange/collectives.h describes them.

    Raises KernelError if the arguments are not valid.
    """
    args = _ExchangeArgs(base, down, lines, buffers, piece_bytes, int(timeout_s * 1000), bell, size, index)
    if load_library().llmk_exchange_open(ctypes.byref(args)) != 0:
        raise KernelError("the exchange was refused; the reason is on standard error")


def publish(line: int, value: int, num_bytes: int, bell: int) -> None:
    """Sets the counter of the flag line at address ``line``, and wakes the agents that wait for it.

    ``num_bytes`` is the size of the data that the counter announces. ``bell`` is the address of the flag line that
    announces changes to other machines, or 0 if all agents are on one machine.
    """
    load_library().llmk_line_publish(line, value & 0xFFFFFFFF, num_bytes, bell or None)


def wait_for(reason: str, line: int, target: int, down: int, timeout_s: float) -> None:
    """Waits, without the GIL, until the counter of the flag line at address ``line`` reaches ``target``.

    ``down`` is the address of a 32-bit word that is nonzero if the group is down. Raises GroupDownError if the group is
    down, or after ``timeout_s`` seconds. A timeout sets this word, so that the other agents also stop.
    """
    if load_library().llmk_line_wait(reason.encode(), line, target & 0xFFFFFFFF, down, int(timeout_s * 1000)) != 0:
        raise GroupDownError(f"{reason}: another agent of this group ended or did not arrive within {timeout_s:g} s")


def all_reduce(array: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Returns the sum of ``array`` over the agents of the stage.

    ``dtype`` is the element type: float32, float16 or bfloat16. bfloat16 elements are passed as uint16. Raises
    GroupDownError if the group is down.
    """
    array = np.ascontiguousarray(array)
    out = np.empty_like(array)
    _check(load_library().llmk_all_reduce(_DTYPES[dtype], array.ctypes.data, out.ctypes.data, array.size))
    return out


def all_gather(array: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """Returns the arrays of all ``size`` agents of the stage, as one array [size, ...]. Raises GroupDownError if the
    group is down.
    """
    array = np.ascontiguousarray(array)
    out = np.empty((size, *array.shape), array.dtype)
    _check(load_library().llmk_all_gather(array.ctypes.data, out.ctypes.data, array.nbytes))
    return out


def gather_rows_to_first(own: npt.NDArray[Any], out: npt.NDArray[Any] | None, stride: int, whole: int) -> None:
    """Collects the matrices of all agents in the first agent.

    Each agent passes its matrix ``own`` [rows, own width], whose elements have 4 bytes. The first agent also passes the
    matrix ``out`` [rows, whole], which receives all columns. For ``out``, the other agents pass None. The columns of
    agent ``i`` begin at ``i * stride``. The first agent must write its own columns to ``out`` before the call.
    """
    own_width = own.shape[1]
    args = _GatherRowsArgs(
        own.ctypes.data, None if out is None else out.ctypes.data, len(own), own_width, stride, whole, whole
    )
    _check(load_library().llmk_gather_rows_to_first(ctypes.byref(args)))


def exchange_times() -> ExchangeTimes:
    """Returns the time that this process has spent in sums and gathers since its start."""
    times = _Times()
    load_library().llmk_exchange_times(ctypes.byref(times))
    return ExchangeTimes(times.total_ns, times.waiting_ns, times.pieces)


def _check(code: int) -> None:
    if code == _GROUP_DOWN:
        raise GroupDownError("another agent of this group ended or did not arrive in time")
    if code != 0:
        raise KernelError(f"the exchange refused its arguments (code {code}); the reason is on standard error")
