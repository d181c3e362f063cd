"""A step's inputs, copied out of its slot and checked by one call where NumPy takes forty; ops/step_copy.h."""

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
    """The row's last token."""
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


class StepBuffers:
    """Memory for the inputs of one step at a time, which stays where it is: a graph may be bound to it."""

    def __init__(self, max_tokens: int, max_seqs: int, table_size: int) -> None:
        """``table_size``: entries of all block tables together."""
        self.token_ids, self.positions, self.slot_mapping = (np.zeros(max_tokens, np.int32) for _ in range(3))
        self.query_lens, self.context_lens, self.rows = (np.zeros(max_seqs, np.int32) for _ in range(3))
        self.block_tables: Int32Array = np.zeros(table_size, np.int32)
        self.last_tokens: Int32Array = np.zeros(max_seqs, np.int32)
        """[S] index in T of each sequence's last token."""
        self.sampled_tokens: Int32Array = np.zeros(max_seqs, np.int32)
        """[S] the same where the sequence samples, else -1."""
        self.counts: Int32Array = np.zeros(4, np.int32)
        """T, S, W of the step, and a number that is whoever's who runs it."""


_COPIED = ("token_ids", "positions", "slot_mapping", "query_lens", "context_lens", "block_tables", "rows")


class _Args(ctypes.Structure):
    """llmk::StepCopyArgs of ops/step_copy.h, field for field."""

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
        ("row_last_tokens", ctypes.c_void_p),
        *((f"own_{name}", ctypes.c_void_p) for name in _COPIED),
        ("last_tokens", ctypes.c_void_p),
        ("sampled_tokens", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
    )


class StepCopy:
    """A copy prepared for arrays that stay where they are, such as a step slot's: looked at and found once."""

    def __init__(
        self, arrays: StepArrays, buffers: StepBuffers, bounds: StepBounds, row_last_tokens: Int32Array | None = None
    ) -> None:
        """``row_last_tokens`` [num_rows], below 0 where a row has none: what becomes of ``bounds.lowest_token`` in
        ``token_ids``. None: it stays.

        Raises ValueError for an array that is not contiguous int32, or shorter than it must be.
        """
        self._kept = (arrays, buffers, row_last_tokens)
        self._function = load_library().llmk_copy_step
        self._max_tokens = _least(arrays, buffers, "token_ids", "positions", "slot_mapping")
        self._max_seqs = min(
            _least(arrays, buffers, "query_lens", "context_lens", "rows"),
            *(array.size for array in (arrays.do_sample, arrays.num_top_logits)),
            *(array.size for array in (buffers.last_tokens, buffers.sampled_tokens)),
        )
        self._table_size = _least(arrays, buffers, "block_tables")
        self.whole_prompts = False
        """Whether every sequence of the last step begins at position 0, which no decode does."""
        self._args = args = _Args(**asdict(bounds))
        for field in fields(arrays):
            setattr(args, field.name, _address(field.name, getattr(arrays, field.name)))
        for name in _COPIED:
            setattr(args, f"own_{name}", _address(name, getattr(buffers, name)))
        for name in ("last_tokens", "sampled_tokens", "counts"):
            setattr(args, name, _address(name, getattr(buffers, name)))
        if row_last_tokens is not None:
            if row_last_tokens.size < bounds.num_rows:
                raise ValueError(f"row_last_tokens has {row_last_tokens.size} rows; it must have {bounds.num_rows}")
            args.row_last_tokens = _address("row_last_tokens", row_last_tokens)
        self._pointer = ctypes.byref(args)

    def run(self, tokens: int, seqs: int, width: int, *, decode: bool) -> bool:
        """Copy a step of such sizes; ``decode``: of one token a sequence. False, and the copies mean nothing, where the
        arrays hold none that can be run."""
        if not 0 <= tokens <= self._max_tokens or not 0 <= seqs <= self._max_seqs:
            return False
        if not 0 <= width * seqs <= self._table_size:
            return False
        args = self._args
        args.tokens, args.seqs, args.width, args.decode = tokens, seqs, width, decode
        verdict = self._function(self._pointer)
        self.whole_prompts = verdict == _FINE_AND_WHOLE
        return verdict in (_FINE, _FINE_AND_WHOLE)


def _least(arrays: StepArrays, buffers: StepBuffers, *names: str) -> int:
    sizes: list[int] = [getattr(owner, name).size for owner in (arrays, buffers) for name in names]
    return min(sizes)


def _address(name: str, array: npt.NDArray[Any]) -> int:
    if array.dtype != np.int32 or not array.flags.c_contiguous:
        raise ValueError(f"{name} is {array.dtype}, contiguous {array.flags.c_contiguous}; it must be contiguous int32")
    return array.ctypes.data
