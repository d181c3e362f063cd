"""Whether a step's inputs can be run, told by one call where NumPy takes twenty; ops/step_check.h."""

from __future__ import annotations

import ctypes
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from agent.kernels.library import load_library

Int32Array = npt.NDArray[np.int32]

_FINE, _FINE_AND_WHOLE = 1, 2


@dataclass(frozen=True, slots=True)
class StepBounds:
    """What the values of any step are below, and the numbers below 0 that mean something."""

    lowest_token: int
    lowest_slot: int
    lowest_top_logits: int
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    num_rows: int
    most_top_logits: int


@dataclass(frozen=True, slots=True)
class StepArrays:
    """int32 arrays of T tokens, S sequences, table width W, or longer. The fields of a step slot fit as they are."""

    token_ids: Int32Array
    positions: Int32Array
    slot_mapping: Int32Array
    query_lens: Int32Array
    context_lens: Int32Array
    block_tables: Int32Array
    rows: Int32Array
    do_sample: Int32Array
    num_top_logits: Int32Array


class _Args(ctypes.Structure):
    """llmk::StepCheckArgs of ops/step_check.h, field for field."""

    _fields_ = (
        ("tokens", ctypes.c_int64),
        ("seqs", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("decode", ctypes.c_int32),
        ("lowest_token", ctypes.c_int32),
        ("lowest_slot", ctypes.c_int32),
        ("lowest_top_logits", ctypes.c_int32),
        ("vocab_size", ctypes.c_int64),
        ("max_model_len", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("most_top_logits", ctypes.c_int64),
        *((field.name, ctypes.c_void_p) for field in fields(StepArrays)),
        ("last_tokens", ctypes.c_void_p),
        ("sampled_tokens", ctypes.c_void_p),
    )


class StepCheck:
    """A check prepared for arrays that stay where they are, such as a step slot's: looked at and found once."""

    def __init__(self, arrays: StepArrays, bounds: StepBounds) -> None:
        """Raises ValueError for an array that is not contiguous int32."""
        self._arrays = arrays
        self._function = load_library().llmk_check_step
        self._max_tokens = min(arrays.token_ids.size, arrays.positions.size, arrays.slot_mapping.size)
        self._table_size = arrays.block_tables.size
        self._max_seqs = arrays.query_lens.size
        for name in ("context_lens", "rows", "do_sample", "num_top_logits"):
            self._max_seqs = min(self._max_seqs, getattr(arrays, name).size)
        self.last_tokens: Int32Array = np.zeros(self._max_seqs, np.int32)
        """[S] index in T of each sequence's last token, after a step that is fine."""
        self.sampled_tokens: Int32Array = np.zeros(self._max_seqs, np.int32)
        """[S] the same where the sequence samples, else -1."""
        self.whole_prompts = False
        """Whether every sequence of that step begins at position 0, which no decode does."""
        self._args = _Args(**asdict(bounds))
        for field in fields(arrays):
            setattr(self._args, field.name, _address(field.name, getattr(arrays, field.name)))
        self._args.last_tokens = self.last_tokens.ctypes.data
        self._args.sampled_tokens = self.sampled_tokens.ctypes.data
        self._pointer = ctypes.byref(self._args)

    def is_fine(self, tokens: int, seqs: int, width: int, *, decode: bool) -> bool:
        """Whether the arrays hold a step of such sizes that can be run; ``decode``: of one token a sequence."""
        if not 0 <= tokens <= self._max_tokens or not 0 <= seqs <= self._max_seqs:
            return False
        if not 0 <= width * seqs <= self._table_size:
            return False
        args = self._args
        args.tokens, args.seqs, args.width, args.decode = tokens, seqs, width, decode
        verdict = self._function(self._pointer)
        self.whole_prompts = verdict == _FINE_AND_WHOLE
        return verdict in (_FINE, _FINE_AND_WHOLE)


def _address(name: str, array: npt.NDArray[Any]) -> int:
    if array.dtype != np.int32 or not array.flags.c_contiguous:
        raise ValueError(f"{name} is {array.dtype}, contiguous {array.flags.c_contiguous}; it must be contiguous int32")
    return array.ctypes.data
