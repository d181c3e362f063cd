"""Calls the sampler kernels. A ``SampleCall`` is made once for a step slot and then used for every step in the slot.

ops/sampler.cc samples from whole rows of logits, ops/candidates.cc from the best tokens that a device found.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
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
    "mask_number": np.dtype(np.int32),
}
"""The sampler's inputs and their types. Each input is an array with one element for each row. A step slot has fields of
the same names.

``do_sample`` 0 means that the row is skipped and its token becomes -1. Without ``do_sample``, every row is sampled.
``rows`` are the indices in ``SampleOutputs.last_token`` at which the tokens are stored. Without ``last_token``,
``rows`` may be missing. ``mask_number`` is the number of the row's mask in ``masks``, counted from 1, or 0 if all
tokens are allowed.
"""
SampleInputs = Mapping[str, npt.NDArray[Any]]
"""Maps each name of ``SAMPLE_INPUTS`` to an array. An array may have more entries than there are rows."""
_OPTIONAL = ("do_sample", "rows", "mask_number")


@dataclass(frozen=True, slots=True)
class SampleOutputs:
    """The arrays that the sampler writes, for example fields of a step slot."""

    sampled_ids: Int32Array
    sampled_logit: Float32Array
    logsumexp: Float32Array
    top_ids: Int32Array
    """[rows, MAX_TOP_LOGITS]: the ids of the tokens with the largest logits, best first. Entries beyond the requested
    number are -1.
    """
    top_logits: Float32Array
    last_token: Int32Array | None = None
    """[batch rows]: the last token of each batch row, or None if last tokens are not stored. The element of a batch row
    that does not sample stays unchanged.
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


@dataclass(frozen=True, slots=True)
class Candidates:
    """The best tokens of each row, which a device found. The vocabulary is divided among P agents, and each agent found
    K tokens in its part.

    The arrays may have more rows than the step.
    """

    values: Float32Array
    """[P, rows, K]: the largest raw logits of each part of the vocabulary. Equal logits may be in any order."""
    ids: npt.NDArray[np.int64]
    """[P, rows, K]: the tokens of ``values``, counted from the first token of the part."""
    sums: Float32Array
    """[P, rows]: for each part of the vocabulary, the sum of e^(x - largest x of the part) over its logits x."""
    scaled_sums: Float32Array
    """[P, rows]: the same sums with all logits divided by the row's temperature. Read only for temperatures above 0."""
    part_size: int
    """Number of tokens of each part; the last part may have fewer."""


_OUTPUTS: dict[str, Any] = {
    "sampled_ids": np.int32,
    "sampled_logit": np.float32,
    "logsumexp": np.float32,
    "top_ids": np.int32,
    "top_logits": np.float32,
}
_SampleArgs = structure(
    "SampleArgs",
    "pointer: logits logits_rows; int64: rows vocab_size;"
    f"pointer: {' '.join(each.name for each in SAMPLER_PARAMETERS)} sample_position num_top_logits do_sample best_ids;"
    "pointer: history history_lens history_prompt_lens mask_number masks; int64: num_masks mask_words;"
    f"pointer: {' '.join(_OUTPUTS)} table_rows last_tokens; int64: last_tokens_size",
)
"""A ctypes class with the members of llmk::SampleArgs in ops/sampler.h."""
_CandidateArgs = structure(
    "CandidateArgs", "pointer: values ids sums scaled_sums best_values; int64: count parts part_rows part_size"
)
"""A ctypes class with the members of llmk::CandidateArgs in ops/candidates.h."""


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
    """Runs the sampler on arrays whose addresses do not change, such as those of a step slot. Checks the arrays only
    once.
    """

    def __init__(
        self, inputs: SampleInputs, outputs: SampleOutputs, max_rows: int, masks: npt.NDArray[np.uint32] | None = None
    ) -> None:
        """Checks the arrays and stores their addresses.

        ``masks`` [masks, words] has a bit for each token of the vocabulary, which is 1 if the token is allowed. Without
        ``masks``, the input ``mask_number`` is not read.

        Raises ValueError if an array has a wrong type, size or layout.
        """
        self._args = _SampleArgs()
        self._pointer = ctypes.byref(self._args)
        self._max_rows = max_rows
        self._logits: Float32Array | None = None
        self._best_ids: Int32Array | None = None
        self._keep_alive = (inputs, outputs, masks)
        self._function = load_library().llmk_sample
        self._has_penalties = load_library().llmk_has_penalties
        for name, dtype in SAMPLE_INPUTS.items():
            array = inputs.get(name) if name in _OPTIONAL else inputs[name]
            setattr(self._args, "table_rows" if name == "rows" else name, _address(name, array, dtype, max_rows))
        for name, dtype in _OUTPUTS.items():
            length = max_rows * (MAX_TOP_LOGITS if name.startswith("top_") else 1)
            setattr(self._args, name, _address(name, getattr(outputs, name), dtype, length))
        if masks is None:
            self._args.mask_number = None
        else:
            self._args.masks = _address("masks", masks, np.uint32, 0)
            self._args.num_masks, self._args.mask_words = masks.shape
        if outputs.last_token is not None:
            if inputs.get("rows") is None:
                raise ValueError("last_token needs rows, which name the place of each token")
            self._args.last_tokens = _address("last_token", outputs.last_token, np.int32, 0)
            self._args.last_tokens_size = outputs.last_token.size

    def has_penalties(self, num_rows: int) -> bool:
        """Returns whether any of the first ``num_rows`` rows samples with penalties. If so, ``run`` needs histories."""
        self._args.rows = min(num_rows, self._max_rows)
        return bool(self._has_penalties(self._pointer))

    def run(
        self,
        logits: Float32Array,
        best_ids: Int32Array | None = None,
        histories: Sequence[Int32Array | None] | None = None,
        prompt_lens: Sequence[int] | Int32Array | None = None,
    ) -> None:
        """Chooses a token from each row of ``logits`` [S, V] float32: S rows, V tokens. ops/sampler.cc describes the
        steps.

        A row's result depends only on its own logits, parameters and history. ``best_ids`` [S] are the ids of the
        largest logits if they are known, the smaller id on a tie. ``histories`` are the token ids of each row, with the
        prompt first. They are read only for rows with penalties. ``prompt_lens`` are the lengths of the prompts.

        Raises ValueError if an array has a wrong type, size or layout. If a value is out of range, writes nothing and
        raises KernelError.
        """
        args = self._args
        if logits is not self._logits or best_ids is not self._best_ids:
            self._take(logits, best_ids)
        args.rows, args.logits_rows = len(logits), None
        self._call(lambda: self._function(self._pointer), histories, prompt_lens)

    def run_candidates(
        self,
        best_ids: Int32Array,
        best_values: Float32Array,
        vocab_size: int,
        candidates: Candidates | None,
        histories: Sequence[Int32Array | None] | None = None,
        prompt_lens: Sequence[int] | Int32Array | None = None,
    ) -> npt.NDArray[np.bool_]:
        """Chooses the tokens of the rows whose token the candidates determine. It is the token that ``run`` would
        choose. Returns a bool for each row [S]. True means that the row has no token yet: ``run_rows`` must sample it
        from its whole logits.

        ``best_ids`` [S] are the tokens with the largest logits, the smaller id on a tie, and ``best_values`` [S] are
        these logits. Without ``candidates``, only greedy rows that report no logits are sampled. The other arguments
        and the errors are those of ``run``.
        """
        rows, args = len(best_ids), self._args
        if rows > self._max_rows:
            raise ValueError(f"best_ids has {rows} rows; the other arrays have {self._max_rows}")
        self._logits = self._best_ids = None
        args.rows, args.vocab_size, args.logits, args.logits_rows = rows, vocab_size, None, None
        args.best_ids = _address("best_ids", best_ids, np.int32, rows)
        given = _CandidateArgs(best_values=_address("best_values", best_values, np.float32, rows))
        if candidates is not None:
            parts, part_rows, count = candidates.values.shape
            given.parts, given.part_rows, given.count, given.part_size = parts, part_rows, count, candidates.part_size
            for name, dtype, width in (
                *(("values", np.float32, count), ("ids", np.int64, count)),
                *(("sums", np.float32, 1), ("scaled_sums", np.float32, 1)),
            ):
                setattr(given, name, _address(name, getattr(candidates, name), dtype, parts * part_rows * width))
        undecided = np.zeros(rows, np.int32)
        function = load_library().llmk_sample_candidates
        self._call(lambda: function(self._pointer, ctypes.byref(given), undecided.ctypes.data), histories, prompt_lens)
        needs_whole: npt.NDArray[np.bool_] = undecided != 0
        return needs_whole

    def run_rows(
        self,
        logits: Float32Array,
        logits_rows: Int32Array,
        histories: Sequence[Int32Array | None] | None = None,
        prompt_lens: Sequence[int] | Int32Array | None = None,
    ) -> None:
        """Chooses tokens for some of the rows, from the R rows of ``logits`` [R, V]. The results of all other rows stay
        as they are.

        ``logits_rows`` [S] has the index in ``logits`` for each row that gets a token, and -1 for all other rows. The
        other arguments and the errors are those of ``run``.
        """
        num_rows, args = len(logits_rows), self._args
        if num_rows > self._max_rows or logits_rows.max(initial=-1) >= len(logits):
            raise ValueError(f"{num_rows} rows name logits up to row {logits_rows.max()}; there are {len(logits)}")
        self._take(logits, None)
        self._logits = None
        args.rows, args.logits_rows = num_rows, _address("logits_rows", logits_rows, np.int32, num_rows)
        self._call(lambda: self._function(self._pointer), histories, prompt_lens)

    def _call(
        self,
        function: Callable[[], int],
        histories: Sequence[Int32Array | None] | None,
        prompt_lens: Sequence[int] | Int32Array | None,
    ) -> None:
        keep_alive = _set_histories(self._args, histories, prompt_lens, self._args.rows)
        code = function()
        del keep_alive
        if code != 0:
            raise KernelError(f"the sampler refused its arguments (code {code}); the reason is on standard error")

    def _take(self, logits: Float32Array, best_ids: Int32Array | None) -> None:
        """Checks the arrays and stores their addresses. The arrays may differ from those of the previous call."""
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


def uniform_numbers(seeds: npt.NDArray[np.uint64], positions: Int32Array) -> npt.NDArray[np.float64]:
    """Returns the random number with which the sampler draws the token of each row, float64 [S].

    The numbers are at least 0 and below 1. ``seeds`` [S] and ``positions`` [S] are the rows' parameters ``seed`` and
    ``sample_position``. Raises ValueError if an array has a wrong type, size or layout.
    """
    count = len(seeds)
    numbers = np.empty(count, np.float64)
    addresses = (_address("seeds", seeds, np.uint64, count), _address("positions", positions, np.int32, count))
    load_library().llmk_uniform(*addresses, count, numbers.ctypes.data)
    return numbers


def _set_histories(
    args: ctypes.Structure,
    histories: Sequence[Int32Array | None] | None,
    prompt_lens: Sequence[int] | Int32Array | None,
    num_rows: int,
) -> list[Any]:
    """Writes the addresses of the token histories and their lengths to ``args``, the arguments of the C sampler.

    Returns the objects that own this memory. The caller must keep these objects alive during the call of the sampler.
    """
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
