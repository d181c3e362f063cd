"""Copies the inputs of a step out of its step slot and checks them, in one kernel call (ops/step_copy.h)."""

from __future__ import annotations

import ctypes
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from agent.kernels.library import load_library, structure

Int32Array = npt.NDArray[np.int32]

_VALID, _VALID_AND_WHOLE = 1, 2
ADAPTERS = 5
"""Index in ``StepBuffers.counts`` of the first token's adapter slot."""


@dataclass(frozen=True, slots=True)
class StepBounds:
    """The limits of the values in a step. A field ``lowest_...`` is the smallest valid value, which is a negative
    number with a special meaning. All other fields are upper limits.
    """

    lowest_token: int
    """LAST_TOKEN: the token id that stands for the last token of the batch row."""
    lowest_slot: int
    lowest_top_logits: int
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    num_rows: int
    max_top_logits: int
    max_adapters: int = 0
    """Number of adapter slots. 0: the steps have no adapters."""


@dataclass(frozen=True, slots=True)
class StepArrays:
    """The int32 arrays of a step, such as the fields of a step slot. They may be longer than the step."""

    token_ids: Int32Array
    positions: Int32Array
    slot_mapping: Int32Array
    query_lens: Int32Array
    context_lens: Int32Array
    block_tables: Int32Array
    rows: Int32Array
    do_sample: Int32Array
    num_top_logits: Int32Array
    adapters: Int32Array | None = None
    """[sequences]: the adapter slot of each sequence, or -1 for no adapter. None if the steps have no adapters."""


class StepBuffers:
    """Memory for the inputs of one step. The addresses do not change, so that a graph can read this memory directly."""

    def __init__(self, max_tokens: int, max_seqs: int, table_size: int, max_adapters: int = 0) -> None:
        """Allocates the memory. ``table_size`` is the number of entries of all block tables together.

        ``max_adapters`` is the number of adapter slots. 0 means that the steps have no adapters.
        """
        self.token_ids, self.positions, self.slot_mapping = (np.zeros(max_tokens, np.int32) for _ in range(3))
        self.query_lens, self.context_lens, self.rows = (np.zeros(max_seqs, np.int32) for _ in range(3))
        self.block_tables: Int32Array = np.zeros(table_size, np.int32)
        self.last_tokens: Int32Array = np.zeros(max_seqs, np.int32)
        """[sequences]: the index of each sequence's last token among the tokens of the step."""
        self.sampled_tokens: Int32Array = np.zeros(max_seqs, np.int32)
        """[sequences]: the index of the sequence's last token among the tokens of the step if the sequence samples,
        else -1."""
        self.counts: Int32Array = np.zeros(ADAPTERS + max_tokens if max_adapters else 4, np.int32)
        """[number of tokens, number of sequences, width of the block tables, number of the step]. ``StepCopy`` writes
        the first three elements. The runner of the graph writes the number of the step.

        If the steps have adapters, two more parts follow: the number of tokens with an adapter, and the adapter slot of
        each token, or -1.
        """
        self.loaded: Int32Array = np.zeros(max_adapters, np.int32)
        """Element i is 1 if adapter slot i has an adapter, otherwise 0. Steps may name only adapter slots with an
        adapter.
        """


_COPIED = ("token_ids", "positions", "slot_mapping", "query_lens", "context_lens", "block_tables", "rows")
_Args = structure(
    "StepCopyArgs",
    "int64: tokens seqs width; int32: decode lowest_token lowest_slot lowest_top_logits;"
    "int64: vocab_size max_model_len block_size num_blocks num_rows max_top_logits max_adapters;"
    f"pointer: {' '.join(field.name for field in fields(StepArrays))} row_last_tokens;"
    f"pointer: {' '.join(f'own_{name}' for name in _COPIED)} last_tokens sampled_tokens counts loaded",
)
"""A ctypes class with the members of llmk::StepCopyArgs in ops/step_copy.h."""


class StepCopy:
    """Copies steps out of arrays whose addresses do not change, such as the fields of a step slot, and checks the
    copies.
    """

    def __init__(
        self, arrays: StepArrays, buffers: StepBuffers, bounds: StepBounds, row_last_tokens: Int32Array | None = None
    ) -> None:
        """Checks the arrays and stores their addresses.

        ``row_last_tokens`` [num_rows] has the last token of each batch row, or a negative number if there is none. In
        the copied ``token_ids``, this token replaces each ``bounds.lowest_token``. If ``row_last_tokens`` is None,
        nothing is replaced.

        Raises ValueError if an array is not contiguous int32 or too short.
        """
        self._kept = (arrays, buffers, row_last_tokens)
        self._function = load_library().llmk_copy_step
        self._max_tokens = _smallest(arrays, buffers, "token_ids", "positions", "slot_mapping")
        self._max_seqs = min(
            _smallest(arrays, buffers, "query_lens", "context_lens", "rows"),
            *(array.size for array in (arrays.do_sample, arrays.num_top_logits)),
            *(array.size for array in (buffers.last_tokens, buffers.sampled_tokens)),
        )
        if arrays.adapters is not None:
            self._max_seqs = min(self._max_seqs, arrays.adapters.size)
        self._table_size = _smallest(arrays, buffers, "block_tables")
        self.whole_prompts = False
        """Whether every sequence of the copied step starts at position 0. False for a decode step."""
        self._args = args = _Args(**asdict(bounds))
        for field in fields(arrays):
            array = getattr(arrays, field.name)
            setattr(args, field.name, None if array is None else _address(field.name, array))
        for name in _COPIED:
            setattr(args, f"own_{name}", _address(name, getattr(buffers, name)))
        for name in ("last_tokens", "sampled_tokens", "counts", "loaded"):
            setattr(args, name, _address(name, getattr(buffers, name)))
        if row_last_tokens is not None:
            if row_last_tokens.size < bounds.num_rows:
                raise ValueError(f"row_last_tokens has {row_last_tokens.size} rows; it must have {bounds.num_rows}")
            args.row_last_tokens = _address("row_last_tokens", row_last_tokens)
        self._pointer = ctypes.byref(args)

    def run(self, tokens: int, seqs: int, width: int, *, decode: bool) -> bool:
        """Copies a step. ``decode`` means that each sequence has one token.

        Returns False if the arrays do not hold a valid step of these sizes; the copies are then undefined.
        """
        if not 0 <= tokens <= self._max_tokens or not 0 <= seqs <= self._max_seqs:
            return False
        if not 0 <= width * seqs <= self._table_size:
            return False
        args = self._args
        args.tokens, args.seqs, args.width, args.decode = tokens, seqs, width, decode
        result = self._function(self._pointer)
        self.whole_prompts = result == _VALID_AND_WHOLE
        return result in (_VALID, _VALID_AND_WHOLE)


def _smallest(arrays: StepArrays, buffers: StepBuffers, *names: str) -> int:
    sizes: list[int] = [getattr(owner, name).size for owner in (arrays, buffers) for name in names]
    return min(sizes)


def _address(name: str, array: npt.NDArray[Any]) -> int:
    if array.dtype != np.int32 or not array.flags.c_contiguous:
        raise ValueError(f"{name} is {array.dtype}, contiguous {array.flags.c_contiguous}; it must be contiguous int32")
    return array.ctypes.data
