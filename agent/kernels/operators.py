"""Calls a custom operator of the kernel library by its name, in the same way as MindSpore."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass

from agent.kernels.library import KernelError, load_library

_NAME = re.compile(r"[A-Z][A-Za-z]{1,40}")
"""Pattern of the names of custom operators. The names of all other entries of the library begin with a small letter."""


@dataclass(frozen=True, slots=True)
class Argument:
    """A tensor: its address, its shape, and the name of its type as MindSpore writes it."""

    address: int
    shape: tuple[int, ...]
    type: str


def call_operator(name: str, arguments: Sequence[Argument]) -> None:
    """Calls the operator ``name``. ``arguments`` are its inputs, then its outputs.

    Raises KernelError if the operator does not exist or if it refuses its arguments.
    """
    library, count = load_library(), len(arguments)
    if not _NAME.fullmatch(name) or not hasattr(library, name):
        raise KernelError(f"the kernels have no operator {name!r}")
    shapes = [(ctypes.c_int64 * len(each.shape))(*each.shape) for each in arguments]
    error = library[name](
        ctypes.c_int(count),
        (ctypes.c_void_p * count)(*[each.address for each in arguments]),
        (ctypes.c_int * count)(*[len(each.shape) for each in arguments]),
        (ctypes.c_void_p * count)(*[ctypes.addressof(shape) for shape in shapes]),
        (ctypes.c_char_p * count)(*[each.type.encode() for each in arguments]),
        None,
        None,
    )
    if error:
        raise KernelError(f"the operator {name} refused its arguments; the reason is on standard error")
