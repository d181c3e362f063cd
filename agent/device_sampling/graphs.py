"""Compiles and runs the graphs that find candidates and gather rows of logits. Keeps the logits of a step on the device
until the sampler needs them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from mindspore import Tensor

from agent.backends.base import DeviceHooks
from agent.compiled_graph import CompiledGraph
from agent.device_sampling.cells import candidates_cell, rows_cell
from agent.group.model_part import ModelPart
from agent.kernels import Candidates, widen_bfloat16
from agent.layers.parameter import as_storage, as_tensor
from agent.scores import DeviceScores, Float32Array, Int32Array
from agent.weights.storage import Array, to_float32

OnDevice = Any
"""A tensor of MindSpore, or an array where the device is a CPU and the step was replayed without MindSpore."""


class SamplingGraphs:
    """Owns the graphs. Only the device thread may use them."""

    def __init__(self, vocab_size: int, part: ModelPart | None, hooks: DeviceHooks) -> None:
        self.vocab_size = vocab_size
        self.num_parts = 1 if part is None or not part.is_split else part.parallel.tensor_parallel
        self.part_size = vocab_size if part is None else part.vocab_stride
        self._part, self._hooks = part, hooks
        self._candidates: CompiledGraph | None = None
        self._rows: CompiledGraph | None = None

    def compile(self, logits: OnDevice) -> None:
        """Compiles the graphs for the type and width of ``logits`` [S, C], and runs each graph once with ``logits``."""
        given = as_device(logits)
        seqs, columns = given.shape
        self._candidates = CompiledGraph(candidates_cell(self.vocab_size, columns, given.dtype, self._part))
        self._rows = CompiledGraph(rows_cell(columns, given.dtype))
        with self._hooks.graph_run(compiles=True):
            self._candidates.compile((given, as_tensor(np.ones((seqs, 1), np.float32))))
            self._rows.compile((given, as_tensor(np.zeros(1, np.int32))))

    def scores(self, logits: OnDevice, best_ids: OnDevice, best_values: OnDevice, num_rows: int) -> DeviceScores:
        """Returns the scores of a step. The first ``num_rows`` rows of each agent are sequences, the others padding."""
        return _Scores(self, logits, best_ids, best_values, num_rows)

    def run_candidates(self, logits: OnDevice, temperatures: Float32Array) -> tuple[Tensor, ...]:
        """Runs the graph of ``candidates_cell``. ``temperatures`` is [S, 1]."""
        assert self._candidates is not None, "compile() must come first"
        with self._hooks.graph_run():
            results: tuple[Tensor, ...] = self._candidates.run((as_device(logits), as_tensor(temperatures)))
        return results

    def run_rows(self, logits: OnDevice, indices: Int32Array) -> Tensor:
        """Runs the graph of ``rows_cell``."""
        assert self._rows is not None, "compile() must come first"
        with self._hooks.graph_run():
            return self._rows.run((as_device(logits), as_tensor(indices)))


class _Scores(DeviceScores):
    def __init__(
        self, graphs: SamplingGraphs, logits: OnDevice, best_ids: OnDevice, best_values: OnDevice, num_rows: int
    ) -> None:
        self.vocab_size = graphs.vocab_size
        self.fetched_bytes = 0
        self._graphs, self._num_rows = graphs, num_rows
        self._logits, self._best = logits, (best_ids, best_values)
        self._found: tuple[Tensor, ...] = ()

    def best(self) -> tuple[Int32Array, Float32Array]:
        ids, values = (self._fetch(each).reshape(self._graphs.num_parts, -1) for each in self._best)
        wide = in_float32(values)[:, : self._num_rows]
        if len(ids) == 1:
            return ids[0, : self._num_rows], wide[0]
        # The first of equal values belongs to the smaller id. A NaN is the largest, so the sampler sees it.
        best = wide.argmax(0)
        columns = np.arange(self._num_rows)
        tokens: Int32Array = (ids[best, columns] + best * self._graphs.part_size).astype(np.int32)
        return tokens, np.ascontiguousarray(wide[best, columns])

    def find_candidates(self, temperatures: Float32Array) -> None:
        padded = np.ones((self._logits.shape[0], 1), np.float32)
        padded[: self._num_rows, 0] = temperatures
        self._found = self._graphs.run_candidates(self._logits, padded)

    def candidates(self) -> Candidates:
        parts = self._graphs.num_parts
        values, ids = (self._fetch(each).reshape(parts, -1, each.shape[1]) for each in self._found[:2])
        sums, scaled_sums = (self._fetch(each).reshape(parts, -1) for each in self._found[2:4])
        return Candidates(values, ids, sums, scaled_sums, self._graphs.part_size)

    def rows(self, indices: Int32Array) -> Float32Array:
        parts, logits = self._graphs.num_parts, self._logits
        if parts == 1:
            return in_float32(self._fetch(self._graphs.run_rows(logits, indices)))
        starts = np.arange(parts, dtype=np.int32)[:, None] * np.int32(logits.shape[0])
        gathered = self._graphs.run_rows(self._found[4], (starts + indices).astype(np.int32).reshape(-1))
        return side_by_side(in_float32(self._fetch(gathered)), parts, self.vocab_size)

    def _fetch(self, value: OnDevice) -> Array:
        array: Array = value if isinstance(value, np.ndarray) else as_storage(value)
        self.fetched_bytes += array.nbytes
        return array


def as_device(value: OnDevice) -> Tensor:
    """Returns a tensor for a graph; an array keeps its memory."""
    return as_tensor(value) if isinstance(value, np.ndarray) else value


def in_float32(values: Array) -> Float32Array:
    """Converts fetched values to float32; bfloat16 comes as uint16."""
    if values.dtype != np.uint16:
        return to_float32(values, str(values.dtype))
    wide = np.empty(values.shape, np.float32)
    widen_bfloat16(np.ascontiguousarray(values), wide)
    return wide


def side_by_side(parts: npt.NDArray[np.float32], num_agents: int, vocab_size: int) -> Float32Array:
    """Rearranges the logits of all agents, [agents * S, columns], to [S, vocab_size]. Drops the padding of the last
    agent.
    """
    rows, columns = len(parts) // num_agents, parts.shape[1]
    logits = np.empty((rows, vocab_size), np.float32)
    for index in range(num_agents):
        place = logits[:, index * columns : (index + 1) * columns]
        place[:] = parts[index * rows : (index + 1) * rows, : place.shape[1]]
    return logits
