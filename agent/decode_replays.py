"""Decode steps without MindSpore: launches of the dynamic graph, recorded once for each number of sequences.

A decode of so many sequences launches the same kernels every time, over inputs, weights and caches that stay where
they are. MindSpore's part in it is done twice: the first such step runs the graph and records what it launches
(``agent.kernels.launches``), as an Ascend captures a stream's launches; the second runs graph and replay, which must
give the same bits; those after it are replays.

Agents that share a model's layers launch sums and gathers together. All of them run the same steps in the same order,
and a size is replayed by all or by none: whatever one of them finds, all are asked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import numpy as np
from mindspore import Tensor

from agent.kernels import RecordedLaunches, RecordingError, has_failed, record
from agent.kernels.launches import AllAgree
from agent.layers.parameter import as_storage, as_tensor
from agent.step_inputs import StepInputs
from agent.weights.storage import Array
from llm_serving.ipc.shm import SlotLimits

logger = logging.getLogger("agent.decode_replays")

Run = Callable[[tuple[Tensor, ...]], Tensor]


class DecodeReplays:
    """Owns the inputs' memory. ``run`` of a graph that cannot be replayed runs the graph, now and ever after."""

    def __init__(
        self, run_graph: Run, tensors: Iterable[Tensor], limits: SlotLimits, all_agree: AllAgree = bool
    ) -> None:
        """``tensors`` are all parameters and constants of the graph; their memory stays where it is. ``all_agree`` is
        of the agents that share its layers."""
        self._run_graph = run_graph
        self._tensors = tuple(tensors)
        self._all_agree = all_agree
        seqs, self._table_width = limits.max_seqs, limits.max_blocks_per_seq
        self._entry: Array | None = None
        self._vectors = [np.zeros(seqs, np.int32) for _ in range(5)]
        self._tables = np.zeros(seqs * self._table_width, np.int32)
        self._recorded: dict[int, RecordedLaunches] = {}
        self._unconfirmed: dict[int, RecordedLaunches] = {}
        """Equal to the graph on the inputs they were recorded with, not yet on others."""
        self._problem = ""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of sequences whose decodes are replayed."""
        return tuple(self._recorded)

    @property
    def problem(self) -> str:
        """Why this graph's launches cannot be replayed; empty where they can, or none has run."""
        return self._problem

    def run(self, inputs: StepInputs, entry: Array) -> Array:
        """What the graph gives for a decode, bfloat16 as uint16, valid until the next call. ``entry``: token ids, or
        the stream of the stage before. Raises what ``all_agree`` does."""
        arrays, size = self._take(inputs, entry), len(entry)
        launches = self._recorded.get(size)
        if launches is not None:
            return launches.run()
        if self._problem:
            return self._graph_result(arrays)[0]
        if size in self._unconfirmed:
            return self._confirm(size, arrays)
        return self._record(size, arrays)

    def _record(self, size: int, arrays: tuple[Array, ...]) -> Array:
        memory = [(tensor.data_ptr(), tensor.nbytes) for tensor in self._tensors]
        memory += [(array.ctypes.data, array.nbytes) for array in arrays]
        try:
            result, self._unconfirmed[size] = record(lambda: self._graph_result(arrays), memory, self._all_agree)
        except RecordingError as error:
            if error.is_for_good:
                self._give_up(str(error))
            return error.result
        return result

    def _confirm(self, size: int, arrays: tuple[Array, ...]) -> Array:
        """What depends on the inputs and was taken for a constant would show with other inputs."""
        result, _ = self._graph_result(arrays)
        if has_failed():  # a primitive refused these inputs: the result means nothing
            return result
        result, launches = result.copy(), self._unconfirmed.pop(size)
        if self._all_agree(launches.agrees(result)):
            self._recorded[size] = launches
            return result
        launches.close()
        self._give_up("a replay with other inputs gives another result")
        return self._graph_result(arrays)[0]

    def _give_up(self, problem: str) -> None:
        self._problem = problem
        logger.info("decodes run the graph every time: %s", problem)

    def _take(self, inputs: StepInputs, entry: Array) -> tuple[Array, ...]:
        """The inputs in memory that is theirs, the block tables as wide as any: their width then is no other shape."""
        seqs, width = inputs.block_tables.shape
        if self._entry is None:
            self._entry = np.zeros((self._vectors[0].size, *entry.shape[1:]), entry.dtype)
        given = (
            inputs.positions,
            inputs.last_tokens,
            inputs.slot_mapping,
            inputs.context_lens,
            inputs.query_lens,
        )
        self._entry[:seqs] = entry
        arrays = [buffer[:seqs] for buffer in self._vectors]
        for array, values in zip(arrays, given, strict=True):
            array[:] = values
        tables = self._tables[: seqs * self._table_width].reshape(seqs, self._table_width)
        tables[:, :width] = inputs.block_tables
        tables[:, width:] = 0
        return (self._entry[:seqs], *arrays[:3], tables, *arrays[3:])

    def _graph_result(self, arrays: tuple[Array, ...]) -> tuple[Array, int]:
        """The graph's result, and where MindSpore has it."""
        tensor = self._run_graph(tuple(map(as_tensor, arrays)))
        return as_storage(tensor), tensor.data_ptr()
