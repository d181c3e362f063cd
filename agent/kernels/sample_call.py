"""Calls the sampler kernel (ops/sampler.cc). A call is prepared once for the arrays of a step slot."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from agent.kernels.library import KernelError, load_library, structure
from llm_serving.sampling_params import MAX_TOP_LOGITS, SAMPLER_PARAMETERS

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]


SAMPLE_INPUTS: dict[str, Any] = {each.name: np.dtype(each.column) for each in SAMPLER_PARAMETERS} | {
    "sample_position": np.dtype(np.int32),
    "num_top_logits": np.dtype(np.int32),
    "do_sample": np.dtype(np.int32),
    "rows": np.dtype(np.int32),
}
"""The sampler's inputs, one entry for each row, with their types. The fields of a step slot have the same names.

``do_sample`` 0 skips the row, whose token becomes -1. ``rows`` are the places of the tokens in
``SampleOutputs.last_token``. Without ``do_sample`` every row is sampled. ``rows`` are needed only with ``last_token``.
"""
SampleInputs = Mapping[str, npt.NDArray[Any]]
"""Arrays by the names of ``SAMPLE_INPUTS``; they may be longer than the rows."""
_OPTIONAL = ("do_sample", "rows")


@dataclass(frozen=True, slots=True)
class SampleOutputs:
    """The arrays that the sampler writes, such as fields of a step slot."""

    sampled_ids: Int32Array
    sampled_logit: Float32Array
    logsumexp: Float32Array
    top_ids: Int32Array
    """[S, MAX_TOP_LOGITS], best first, -1 after the requested number."""
    top_logits: Float32Array
    last_token: Int32Array | None = None
    """The last token of each row of a row table. Rows that do not sample keep theirs. None: last tokens are not kept.
    """

    @classmethod
    def allocate(cls, num_rows: int) -> SampleOutputs:
        return cls(
            np.empty(num_rows, np.int32),
            np.empty(num_rows, np.float32),
            np.empty(num_rows, np.float32),
            np.empty((num_rows, MAX_TOP_LOGITS), np.int32),
            np.empty((num_rows, MAX_TOP_LOGITS), np.float32),
        )


_OUTPUTS: dict[str, Any] = {
    "sampled_ids": np.int32,
    "sampled_logit": np.float32,
    "logsumexp": np.float32,
    "top_ids": np.int32,
    "top_logits": np.float32,
}
_SampleArgs = structure(
    "SampleArgs",
    "pointer: logits; int64: rows vocab_size;"
    f"pointer: {' '.join(each.name for each in SAMPLER_PARAMETERS)} sample_position num_top_logits do_sample best_ids;"
    f"pointer: history history_lens history_prompt_lens {' '.join(_OUTPUTS)} table_rows last_tokens;"
    "int64: last_tokens_size",
)
"""A ctypes class with the members of llmk::SampleArgs in ops/sampler.h."""


def _address(name: str, array: npt.NDArray[Any] | None, wanted: Any, length: int) -> int | None:
    """Returns an array's address. Raises ValueError unless it has ``length`` contiguous elements of type ``wanted``."""
    if array is None:
        return None
    if array.dtype != wanted or not array.flags.c_contiguous or array.size < length:
        raise ValueError(
            f"{name} is {array.dtype}, {array.size} elements, contiguous {array.flags.c_contiguous}; "
            f"it must be contiguous {np.dtype(wanted)} with at least {length} elements"
        )
    return array.ctypes.data


class SampleCall:
    """Runs the sampler on arrays that stay in place, such as those of a step slot, and checks them only once."""

    def __init__(self, inputs: SampleInputs, outputs: SampleOutputs, max_rows: int) -> None:
        """Raises ValueError if an array has a wrong type, size or layout."""
        self._args = _SampleArgs()
        self._pointer = ctypes.byref(self._args)
        self._max_rows = max_rows
        self._logits: Float32Array | None = None
        self._best_ids: Int32Array | None = None
        self._keep_alive = (inputs, outputs)
        self._function = load_library().llmk_sample
        self._has_penalties = load_library().llmk_has_penalties
        for name, dtype in SAMPLE_INPUTS.items():
            array = inputs.get(name) if name in _OPTIONAL else inputs[name]
            setattr(self._args, "table_rows" if name == "rows" else name, _address(name, array, dtype, max_rows))
        for name, dtype in _OUTPUTS.items():
            length = max_rows * (MAX_TOP_LOGITS if name.startswith("top_") else 1)
            setattr(self._args, name, _address(name, getattr(outputs, name), dtype, length))
        if outputs.last_token is not None:
            if inputs.get("rows") is None:
                raise ValueError("last_token needs rows, which name the place of each token")
            self._args.last_tokens = _address("last_token", outputs.last_token, np.int32, 0)
            self._args.last_tokens_size = outputs.last_token.size

    def has_penalties(self, num_rows: int) -> bool:
        """Returns whether any of the first ``num_rows`` rows samples with penalties. ``run`` then needs histories."""
        self._args.rows = min(num_rows, self._max_rows)
        return bool(self._has_penalties(self._pointer))

    def run(
        self,
        logits: Float32Array,
        best_ids: Int32Array | None = None,
        histories: Sequence[Int32Array | None] | None = None,
        prompt_lens: Sequence[int] | Int32Array | None = None,
    ) -> None:
        """Chooses a token from each row of ``logits`` [S, V] float32. ops/sampler.cc describes the steps.

        A row's result depends only on its own logits, parameters and history. ``best_ids`` [S] are the ids of the
        largest logits if they are known, the smaller id on a tie. ``histories`` are the token ids of each row, with the
        prompt first. They are read only for rows with penalties. ``prompt_lens`` are the lengths of the prompts.

        Raises ValueError if an array has a wrong type, size or layout. If a value is out of range, writes nothing and
        raises KernelError.
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
        """Checks arrays that differ from those of the last call."""
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
    args: ctypes.Structure,
    histories: Sequence[Int32Array | None] | None,
    prompt_lens: Sequence[int] | Int32Array | None,
    num_rows: int,
) -> list[Any]:
    """Fills the history fields. Returns the objects that must stay alive during the call."""
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
