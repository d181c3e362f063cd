"""Access to libllm_kernels.so: its path for MindSpore, and the entries called through ctypes.

As op plugin (the native primitives on the CPU), before MindSpore is imported::

    os.environ["MS_OP_PLUGIN_PATH"] = str(library_path())

As custom ops of a static graph: `agent.backends.cpu.ops.custom_operator`. Caches and logits are written in place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llm_serving.errors import AgentError
from llm_serving.request import MAX_TOP_LOGITS

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]
UInt64Array = npt.NDArray[np.uint64]


class KernelsNotBuiltError(AgentError):
    """The shared library of the kernels is not there."""


class KernelError(AgentError):
    """A kernel refused its arguments; the reason is on standard error."""


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
    library.llmk_isa.restype = ctypes.c_char_p
    library.llmk_sample.argtypes = [ctypes.POINTER(_SampleArgs)]
    library.llmk_sample.restype = ctypes.c_int
    library.llmk_has_penalties.argtypes = [ctypes.POINTER(_SampleArgs)]
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
    library.llmk_spoil_memory.restype = None
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


@dataclass(frozen=True, slots=True)
class SampleInputs:
    """What to draw with, one entry a row; the arrays may be longer. The fields of a step slot fit as they are."""

    temperature: Float32Array
    top_k: Int32Array
    top_p: Float32Array
    min_p: Float32Array
    repetition_penalty: Float32Array
    presence_penalty: Float32Array
    frequency_penalty: Float32Array
    seed: UInt64Array
    sample_position: Int32Array
    num_top_logits: Int32Array
    do_sample: Int32Array | None = None
    """0: skip the row (its token becomes -1). None samples every row."""
    rows: Int32Array | None = None
    """Where in ``SampleOutputs.last_token`` each row's token goes; needed with that alone."""


@dataclass(frozen=True, slots=True)
class SampleOutputs:
    """Where the results go; the fields of a step slot fit as they are."""

    sampled_ids: Int32Array
    sampled_logit: Float32Array
    logsumexp: Float32Array
    top_ids: Int32Array
    """[S, MAX_TOP_LOGITS], best first, -1 past what was asked for."""
    top_logits: Float32Array
    last_token: Int32Array | None = None
    """[a table's rows] the token sampled last for each; rows that do not sample keep theirs. None: nobody remembers."""

    @classmethod
    def allocate(cls, num_rows: int) -> SampleOutputs:
        return cls(
            np.empty(num_rows, np.int32),
            np.empty(num_rows, np.float32),
            np.empty(num_rows, np.float32),
            np.empty((num_rows, MAX_TOP_LOGITS), np.int32),
            np.empty((num_rows, MAX_TOP_LOGITS), np.float32),
        )


_ARRAYS: dict[str, Any] = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "repetition_penalty": np.float32,
    "presence_penalty": np.float32,
    "frequency_penalty": np.float32,
    "seed": np.uint64,
    "sample_position": np.int32,
    "num_top_logits": np.int32,
    "do_sample": np.int32,
    "rows": np.int32,
    "sampled_ids": np.int32,
    "sampled_logit": np.float32,
    "logsumexp": np.float32,
    "top_ids": np.int32,
    "top_logits": np.float32,
}


class _SampleArgs(ctypes.Structure):
    """llmk::SampleArgs of ops/sampler.h, field for field."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("vocab_size", ctypes.c_int64),
        ("temperature", ctypes.c_void_p),
        ("top_k", ctypes.c_void_p),
        ("top_p", ctypes.c_void_p),
        ("min_p", ctypes.c_void_p),
        ("repetition_penalty", ctypes.c_void_p),
        ("presence_penalty", ctypes.c_void_p),
        ("frequency_penalty", ctypes.c_void_p),
        ("seed", ctypes.c_void_p),
        ("sample_position", ctypes.c_void_p),
        ("num_top_logits", ctypes.c_void_p),
        ("do_sample", ctypes.c_void_p),
        ("best_ids", ctypes.c_void_p),
        ("history", ctypes.c_void_p),
        ("history_lens", ctypes.c_void_p),
        ("history_prompt_lens", ctypes.c_void_p),
        ("sampled_ids", ctypes.c_void_p),
        ("sampled_logit", ctypes.c_void_p),
        ("logsumexp", ctypes.c_void_p),
        ("top_ids", ctypes.c_void_p),
        ("top_logits", ctypes.c_void_p),
        ("table_rows", ctypes.c_void_p),
        ("last_tokens", ctypes.c_void_p),
        ("last_tokens_size", ctypes.c_int64),
    )


def _address(name: str, array: npt.NDArray[Any] | None, wanted: Any, length: int) -> int | None:
    """The address of an array's data, after checking that a kernel may read or write ``length`` elements there."""
    if array is None:
        return None
    if array.dtype != wanted or not array.flags.c_contiguous or array.size < length:
        raise ValueError(
            f"{name} is {array.dtype}, {array.size} elements, contiguous {array.flags.c_contiguous}; "
            f"it must be contiguous {np.dtype(wanted)} with at least {length} elements"
        )
    return array.ctypes.data


class SampleCall:
    """A call of the sampler prepared for arrays that stay where they are, such as a step slot's: they are checked and
    their addresses taken once."""

    def __init__(self, inputs: SampleInputs, outputs: SampleOutputs, max_rows: int) -> None:
        """Raises ValueError for an array of the wrong type, size or layout."""
        self._args = _SampleArgs()
        self._pointer = ctypes.byref(self._args)
        self._max_rows = max_rows
        self._logits: Float32Array | None = None
        self._best_ids: Int32Array | None = None
        self._keep_alive = (inputs, outputs)
        self._function = load_library().llmk_sample
        self._has_penalties = load_library().llmk_has_penalties
        for part in (inputs, outputs):
            for field in fields(part):
                if field.name in _ARRAYS:
                    length = max_rows * (MAX_TOP_LOGITS if field.name.startswith("top_") and part is outputs else 1)
                    address = _address(field.name, getattr(part, field.name), _ARRAYS[field.name], length)
                    setattr(self._args, "table_rows" if field.name == "rows" else field.name, address)
        if outputs.last_token is not None:
            if inputs.rows is None:
                raise ValueError("last_token is given without the rows that say whose it is")
            self._args.last_tokens = _address("last_token", outputs.last_token, np.int32, 0)
            self._args.last_tokens_size = outputs.last_token.size

    def has_penalties(self, num_rows: int) -> bool:
        """Whether any of the first ``num_rows`` rows that sample has penalties, so that ``run`` needs histories."""
        self._args.rows = min(num_rows, self._max_rows)
        return bool(self._has_penalties(self._pointer))

    def run(
        self,
        logits: Float32Array,
        best_ids: Int32Array | None = None,
        histories: Sequence[Int32Array | None] | None = None,
        prompt_lens: Sequence[int] | Int32Array | None = None,
    ) -> None:
        """Choose a token from each row of ``logits`` [S, V] float32; the order of the steps is in ops/sampler.cc.

        A row's result depends on nothing but its own logits, parameters and history. ``best_ids`` [S] are the largest
        logits where they are known, the smaller id on a tie. ``histories`` are the token ids of each row, prompt
        first, read only where a row has penalties; ``prompt_lens`` says how many of each are the prompt.

        Raises ValueError for an array of the wrong type, size or layout and KernelError for values out of range
        (nothing is written then).
        """
        args = self._args
        if logits is not self._logits or best_ids is not self._best_ids:
            self._take(logits, best_ids)
        args.rows = len(logits)
        keep_alive = _set_histories(args, histories, prompt_lens, len(logits))
        code = self._function(self._pointer)
        del keep_alive
        if code != 0:
            raise KernelError(f"the sampler refused its arguments (code {code}); the reason is on standard error")

    def _take(self, logits: Float32Array, best_ids: Int32Array | None) -> None:
        """Check arrays that are not those of the last call."""
        if logits.ndim != 2:
            raise ValueError(f"logits has {logits.ndim} dimensions; it must be [rows, vocabulary]")
        num_rows, vocab_size = logits.shape
        if num_rows > self._max_rows:
            raise ValueError(f"logits has {num_rows} rows; the other arrays have {self._max_rows}")
        self._logits = self._best_ids = None
        self._args.vocab_size = vocab_size
        self._args.logits = _address("logits", logits, np.float32, num_rows * vocab_size)
        self._args.best_ids = _address("best_ids", best_ids, np.int32, num_rows)
        self._logits, self._best_ids = logits, best_ids


def _set_histories(
    args: _SampleArgs,
    histories: Sequence[Int32Array | None] | None,
    prompt_lens: Sequence[int] | Int32Array | None,
    num_rows: int,
) -> list[Any]:
    """Fills the history fields; returns what must stay alive during the call."""
    if histories is None:
        if args.history is not None:
            args.history = args.history_lens = args.history_prompt_lens = None
        return []
    if prompt_lens is None or len(histories) < num_rows or len(prompt_lens) < num_rows:
        raise ValueError(f"histories and prompt_lens need an entry for each of {num_rows} rows")
    rows = [np.empty(0, np.int32) if row is None else row for row in histories[:num_rows]]
    addresses = (ctypes.c_void_p * num_rows)(*[_address("history", row, np.int32, 0) for row in rows])
    lengths = np.array([row.size for row in rows], np.int32)
    known_prompt_lens = np.array(prompt_lens[:num_rows], np.int32)
    args.history = ctypes.addressof(addresses)
    args.history_lens, args.history_prompt_lens = lengths.ctypes.data, known_prompt_lens.ctypes.data
    return [rows, addresses, lengths, known_prompt_lens]
