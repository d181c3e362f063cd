"""Access to libllm_kernels.so: its path for MindSpore, and the entries called through ctypes.

As op plugin (the native primitives on the CPU), before MindSpore is imported::

    os.environ["MS_OP_PLUGIN_PATH"] = str(library_path())

As custom ops of a static graph: `agent.backends.cpu.ops.custom_operator`. Caches and logits are written in place.
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
    """The shared library of the kernels is not there."""


class KernelError(AgentError):
    """A kernel refused its arguments; the reason is on standard error."""


class OperatorRefusedError(RuntimeError):
    """An operator of a graph refused its inputs. The step failed; the graph can run again."""


def library_path() -> Path:
    """The built shared library. Raises KernelsNotBuiltError with the command that builds it."""
    path = Path(__file__).resolve().parent / "libllm_kernels.so"
    if not path.is_file():
        raise KernelsNotBuiltError(f"{path} is not built; run `python setup.py build_ext --inplace` (or `make setup`)")
    return path


@cache
def load_library() -> ctypes.CDLL:
    """The library, loaded once, with the types of its entries."""
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
    """Sets how many threads kernels use, the caller included; 0 means every processor this process may use."""
    load_library().llmk_set_threads(num_threads)


def num_threads() -> int:
    """The threads kernels use: from ``LLM_KERNELS_THREADS``, else every processor, until ``set_threads``."""
    return int(load_library().llmk_num_threads())


def set_attentive(attentive: bool) -> None:
    """Whether the kernels' threads stay awake between two kernels, as long as a graph of many operators runs."""
    load_library().llmk_set_attentive(attentive)


def scratch_bytes(*, between_operators: bool) -> int:
    """Memory that the kernels' threads keep for their work: what lies between the operators of a layer and the rows of
    experts, which are the memory plan's activations, or all the rest, which is its kernel scratch."""
    return int(load_library().llmk_scratch_bytes(between_operators))


def kernel_isa() -> str:
    """The instruction set in use, from portable to avx512_amx (the environment's ``LLM_KERNELS_ISA`` forces one)."""
    name: bytes = load_library().llmk_isa()
    return name.decode()


def hold_failures(hold: bool) -> None:
    """Whether primitives that refuse their inputs are kept from MindSpore, whose graph would not run again, and left to
    ``take_failure``; after one, none does anything."""
    load_library().llmk_hold_failures(hold)


def has_failed() -> bool:
    """Whether a primitive has refused since ``take_failure`` was last called."""
    return bool(load_library().llmk_has_failed())


def take_failure() -> str | None:
    """The primitive that refused since this was last called, or None; the reason is on standard error."""
    name: bytes | None = load_library().llmk_take_failure()
    return None if name is None else name.decode()


def widen_bfloat16(values: npt.NDArray[np.uint16], out: Float32Array) -> None:
    """Writes the float32 of bfloat16 ``values`` to ``out``, by all threads. Raises ValueError unless both are
    contiguous and as large."""
    if values.size != out.size or not (values.flags.c_contiguous and out.flags.c_contiguous):
        raise ValueError(f"{values.size} values cannot be widened into {out.size}, or they are not contiguous")
    load_library().llmk_widen_bfloat16(values.ctypes.data, out.ctypes.data, values.size)
