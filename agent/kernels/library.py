"""Loads libllm_kernels.so and calls its entries through ctypes.

MindSpore uses the library in two ways. As op plugin, it runs the native primitives on the CPU; the environment variable
``MS_OP_PLUGIN_PATH`` must have ``library_path()`` before MindSpore is imported. As custom operators, it runs the static
graph (``agent.backends.cpu.ops.custom_operator``).
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llm_serving.errors import AgentError

Float32Array = npt.NDArray[np.float32]


class KernelsNotBuiltError(AgentError):
    """The shared library of the kernels does not exist."""


class KernelError(AgentError):
    """A kernel refused its arguments; the reason is on standard error."""


class OperatorRefusedError(RuntimeError):
    """An operator of a graph refused its inputs. The step failed; the graph can run again."""


def library_path() -> Path:
    """Returns the path of the shared library. Raises KernelsNotBuiltError with the command that builds it."""
    path = Path(__file__).resolve().parent / "libllm_kernels.so"
    if not path.is_file():
        raise KernelsNotBuiltError(f"{path} is not built; run `python setup.py build_ext --inplace` (or `make setup`)")
    return path


@cache
def load_library() -> ctypes.CDLL:
    """Loads the library once and declares the types of its entries."""
    library = ctypes.CDLL(str(library_path()))
    library.llmk_set_threads.argtypes = [ctypes.c_int]
    library.llmk_set_threads.restype = None
    library.llmk_set_attentive.argtypes = [ctypes.c_int]
    library.llmk_set_attentive.restype = None
    library.llmk_num_threads.restype = ctypes.c_int
    library.llmk_scratch_bytes.argtypes = [ctypes.c_int]
    library.llmk_scratch_bytes.restype = ctypes.c_int64
    library.llmk_isa.restype = ctypes.c_char_p
    library.llmk_sample.argtypes = [ctypes.c_void_p]
    library.llmk_sample.restype = ctypes.c_int
    library.llmk_has_penalties.argtypes = [ctypes.c_void_p]
    library.llmk_has_penalties.restype = ctypes.c_int
    library.llmk_copy_step.argtypes = [ctypes.c_void_p]
    library.llmk_copy_step.restype = ctypes.c_int
    library.llmk_hold_failures.argtypes = [ctypes.c_int]
    library.llmk_hold_failures.restype = None
    library.llmk_take_failure.restype = ctypes.c_char_p
    library.llmk_begin_recording.restype = None
    library.llmk_end_recording.argtypes = [
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p),
        ctypes.POINTER(ctypes.c_char_p),
    ]
    library.llmk_end_recording.restype = ctypes.c_void_p
    library.llmk_forget_recording.argtypes = [ctypes.c_void_p]
    library.llmk_forget_recording.restype = None
    library.llmk_replay.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.llmk_replay.restype = ctypes.c_void_p
    library.llmk_generalise_recording.argtypes = [*[ctypes.c_void_p] * 3, ctypes.POINTER(ctypes.c_char_p)]
    library.llmk_generalise_recording.restype = ctypes.c_int
    library.llmk_resize_recording.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    library.llmk_resize_recording.restype = ctypes.c_int64
    library.llmk_spoil_memory.argtypes = [ctypes.c_void_p]
    library.llmk_spoil_memory.restype = None
    library.llmk_recordings_bytes.restype = ctypes.c_int64
    library.llmk_widen_bfloat16.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    library.llmk_widen_bfloat16.restype = None
    library.llmk_copy_blocks.argtypes = [ctypes.c_void_p]
    library.llmk_copy_blocks.restype = ctypes.c_int
    return library


def set_threads(num_threads: int) -> None:
    """Sets the number of threads that kernels use, including the caller. 0 means all processors of this process."""
    load_library().llmk_set_threads(num_threads)


def num_threads() -> int:
    """Returns the number of threads that kernels use.

    The default is ``LLM_KERNELS_THREADS``, else the number of processors. ``set_threads`` changes it.
    """
    return int(load_library().llmk_num_threads())


def set_attentive(attentive: bool) -> None:
    """Sets whether the kernels' threads stay awake between kernels, while a graph of many operators runs."""
    load_library().llmk_set_attentive(attentive)


def scratch_bytes(*, between_operators: bool) -> int:
    """Returns the bytes of memory that the kernels' threads keep.

    With ``between_operators``, counts the values between the operators of a layer and the rows of experts, which the
    memory plan lists as activations. Otherwise counts the rest, which the memory plan lists as kernel scratch.
    """
    return int(load_library().llmk_scratch_bytes(between_operators))


def kernel_isa() -> str:
    """Returns the instruction set in use, from portable to avx512_amx; ``LLM_KERNELS_ISA`` selects another one."""
    name: bytes = load_library().llmk_isa()
    return name.decode()


def hold_failures(hold: bool) -> None:
    """Sets whether a primitive that refuses its inputs reports success to MindSpore.

    After an error, MindSpore would not run the graph again. With ``hold``, ``take_failure`` returns the failure, and
    until it is called all primitives do nothing.
    """
    load_library().llmk_hold_failures(hold)


def has_failed() -> bool:
    """Returns whether a primitive has refused its inputs since the last call of ``take_failure``."""
    return bool(load_library().llmk_has_failed())


def take_failure() -> str | None:
    """Returns the primitive that refused its inputs since the last call, or None. The reason is on standard error."""
    name: bytes | None = load_library().llmk_take_failure()
    return None if name is None else name.decode()


def widen_bfloat16(values: npt.NDArray[np.uint16], out: Float32Array) -> None:
    """Converts bfloat16 ``values`` to float32 in ``out``, with all threads.

    Raises ValueError unless both are contiguous and have the same size.
    """
    if values.size != out.size or not (values.flags.c_contiguous and out.flags.c_contiguous):
        raise ValueError(f"{values.size} values cannot be converted into {out.size}, or the arrays are not contiguous")
    load_library().llmk_widen_bfloat16(values.ctypes.data, out.ctypes.data, values.size)
