"""Loads libllm_kernels.so and calls its entries through ctypes.

MindSpore uses the library in two ways. As MindSpore's op plugin, the library runs the native primitives on the CPU. For
this, the environment variable ``MS_OP_PLUGIN_PATH`` must be ``library_path()`` before MindSpore is imported. The
library also contains the custom operators of the static graph (``agent.backends.cpu.ops.custom_operator``).
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llm_serving.errors import AgentError

Float32Array = npt.NDArray[np.float32]

_POINTER, _INT, _INT64, _TEXT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_char_p
_ENTRIES: dict[str, tuple[Any, ...]] = {
    "llmk_all_gather": (_INT, _POINTER, _POINTER, _INT64),
    "llmk_all_reduce": (_INT, _INT, _POINTER, _POINTER, _INT64),
    "llmk_begin_recording": (None,),
    "llmk_block_checksum": (None, _POINTER, _INT64, _INT64, _POINTER),
    "llmk_compiled_sets": (_TEXT,),
    "llmk_copy_blocks": (_INT, _POINTER),
    "llmk_copy_step": (_INT, _POINTER),
    "llmk_end_recording": (_POINTER, _POINTER, _POINTER, _INT64, _POINTER, _INT64, ctypes.POINTER(_TEXT)),
    "llmk_exchange_open": (_INT, _POINTER),
    "llmk_exchange_times": (None, _POINTER),
    "llmk_forget_laid_out": (None, _POINTER),
    "llmk_forget_primitive": (None, _POINTER),
    "llmk_forget_recording": (None, _POINTER),
    "llmk_gather_rows_to_first": (_INT, _POINTER),
    "llmk_generalise_recording": (_INT, _POINTER, _POINTER, _POINTER, _INT, ctypes.POINTER(_TEXT)),
    "llmk_hand_blocks": (_INT, _POINTER),
    "llmk_has_failed": (_INT,),
    "llmk_has_penalties": (_INT, _POINTER),
    "llmk_hold_failures": (None, _INT),
    "llmk_isa": (_TEXT,),
    "llmk_join_weight_parts": (_INT, _POINTER, _INT64, _INT),
    "llmk_keep_laid_out": (None, _POINTER),
    "llmk_keep_primitive": (_INT, _POINTER, _POINTER, _INT64),
    "llmk_line_publish": (None, _POINTER, ctypes.c_uint32, ctypes.c_uint32, _POINTER),
    "llmk_line_wait": (_INT, _TEXT, _POINTER, ctypes.c_uint32, _POINTER, _INT64),
    "llmk_num_threads": (_INT,),
    "llmk_pack_weight": (_INT, _POINTER, _POINTER, _INT64),
    "llmk_packed_weight_bytes": (_INT64, _INT, _INT64, _INT64, _INT64, _INT, _INT),
    "llmk_primitive_blob_bytes": (_INT64, _POINTER),
    "llmk_recorded_fusion": (_TEXT, _POINTER, _INT64),
    "llmk_recorded_launches": (_INT64, _POINTER),
    "llmk_recordings_bytes": (_INT64,),
    "llmk_replay": (_INT, _POINTER, _INT, _POINTER),
    "llmk_resize_recording": (None, _POINTER, _INT64, _INT64, _INT64, _POINTER),
    "llmk_sample": (_INT, _POINTER),
    "llmk_sample_candidates": (_INT, _POINTER, _POINTER, _POINTER),
    "llmk_scratch_bytes": (_INT64, _INT),
    "llmk_set_adapter": (None, _POINTER, _INT, _POINTER),
    "llmk_set_alone": (None, _INT),
    "llmk_set_attentive": (None, _INT),
    "llmk_set_spinning": (None, _INT),
    "llmk_set_threads": (None, _INT),
    "llmk_spoil_memory": (None, _POINTER),
    "llmk_take_failure": (_TEXT,),
    "llmk_uniform": (None, _POINTER, _POINTER, _INT64, _POINTER),
    "llmk_widen_bfloat16": (None, _POINTER, _POINTER, _INT64),
}
"""For each C function of the library: the type of the result, followed by the types of the arguments."""


class KernelsNotBuiltError(AgentError):
    """The shared library of the kernels does not exist."""


class KernelError(AgentError):
    """A kernel refused its arguments; the reason is on standard error."""


class OperatorRefusedError(RuntimeError):
    """An operator of a graph refused its inputs. The step failed, but the graph can run again."""


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
    for name, (result, *arguments) in _ENTRIES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def structure(name: str, layout: str) -> type[ctypes.Structure]:
    """Returns a ctypes class for a C struct. ``layout`` lists the members in order, as "type: names; type: names".

    The types are pointer, int64, int32, float and bool.
    """
    kinds = {"pointer": _POINTER, "int64": _INT64, "int32": _INT, "float": ctypes.c_float, "bool": ctypes.c_bool}
    fields = []
    for line in layout.split(";"):
        kind, names = line.strip().split(":")
        fields += [(field, kinds[kind]) for field in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def set_threads(num_threads: int) -> None:
    """Sets the number of threads that kernels use, including the caller. 0 means all processors of this process."""
    load_library().llmk_set_threads(num_threads)


def num_threads() -> int:
    """Returns the number of threads that kernels use.

    ``set_threads`` sets it. The default is the environment variable ``LLM_KERNELS_THREADS``, or else the number of
    processors.
    """
    return int(load_library().llmk_num_threads())


def set_attentive(attentive: bool) -> None:
    """Sets how long idle threads of the kernels stay awake before they sleep: longer if ``attentive``. The caller
    passes True while a graph of many operators runs.
    """
    load_library().llmk_set_attentive(attentive)


def set_spinning(allowed: bool) -> None:
    """Sets whether the kernels' threads may wait in a loop for a few microseconds before they sleep."""
    load_library().llmk_set_spinning(allowed)


def set_alone(is_alone: bool) -> None:
    """If ``is_alone``, the calling thread computes each kernel alone, and the other threads sleep. Otherwise all
    threads share the work. The results have the same bits.
    """
    load_library().llmk_set_alone(is_alone)


def scratch_bytes(*, between_operators: bool) -> int:
    """Returns the size in bytes of the memory that the kernels' threads keep between calls.

    With ``between_operators``, counts only the intermediate results of a layer and of its experts, which the memory
    plan lists as activations. Otherwise counts all other memory, which the memory plan lists as kernel scratch.
    """
    return int(load_library().llmk_scratch_bytes(between_operators))


def kernel_isa() -> str:
    """Returns the name of the instruction set in use, for example avx2. The environment variable ``LLM_KERNELS_ISA``
    selects another one.
    """
    name: bytes = load_library().llmk_isa()
    return name.decode()


def compiled_sets() -> list[str]:
    """Returns the names of the compiled instruction sets, the fastest first. The build compiles the sets that the
    environment variable ``LLM_KERNELS_BUILD`` selects.
    """
    names: bytes = load_library().llmk_compiled_sets()
    return names.decode().split()


def hold_failures(hold: bool) -> None:
    """Sets what a primitive does if it refuses its inputs. Without ``hold``, it reports an error to MindSpore, which
    then never runs the graph again.

    With ``hold``, the primitive reports success, and its name is stored until ``take_failure`` is called. Until then
    all primitives do nothing and report success.
    """
    load_library().llmk_hold_failures(hold)


def has_failed() -> bool:
    """Returns whether a primitive has refused its inputs since the last call of ``take_failure``."""
    return bool(load_library().llmk_has_failed())


def take_failure() -> str | None:
    """Returns the name of a primitive that has refused its inputs, or None if there is none. Clears this failure. The
    reason of the failure is on standard error.
    """
    name: bytes | None = load_library().llmk_take_failure()
    return None if name is None else name.decode()


def widen_bfloat16(values: npt.NDArray[np.uint16], out: Float32Array) -> None:
    """Converts bfloat16 ``values`` to float32 in ``out``, with all threads.

    Raises ValueError unless both are contiguous and have the same size.
    """
    if values.size != out.size or not (values.flags.c_contiguous and out.flags.c_contiguous):
        raise ValueError(f"{values.size} values cannot be converted into {out.size}, or the arrays are not contiguous")
    load_library().llmk_widen_bfloat16(values.ctypes.data, out.ctypes.data, values.size)
