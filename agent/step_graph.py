"""The compiled graphs of a model: one call a step, logits out. One thread may run graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
import numpy.typing as npt
from mindspore import Tensor, nn
from mindspore.graph.api import _cell_graph_executor

from agent.backends.base import OpTable
from agent.backends.cpu.ops import FusedCpuOps
from agent.layers.parameter import as_float32_array, as_tensor
from agent.step_inputs import Int32Array, StepInputs
from llm_serving.ipc.shm import SlotLimits

_VECTOR = (None,)
_MATRIX = (None, None)


@dataclass(frozen=True, slots=True)
class StepLogits:
    """What the graph found, valid until its next run."""

    values: npt.NDArray[np.float32]
    """[S, vocabulary] of each sequence's last token; rows that do not sample may hold anything."""
    best_ids: Int32Array | None
    """[S] the token of the largest logit where the graph tells, the smaller id on a tie."""


class StepGraph(ABC):
    """Compiles what the op table needs and runs steps."""

    @abstractmethod
    def compile(self) -> None:
        """Compile, and run once."""

    @abstractmethod
    def run(self, inputs: StepInputs, token_ids: Int32Array) -> StepLogits:
        """Run a step. ``token_ids`` [T] are those of ``inputs``, resolved.

        Raises RuntimeError when an operator refuses its inputs.
        """


def make_step_graph(model: nn.Cell, ops: OpTable, limits: SlotLimits, max_whole_prompts: int) -> StepGraph:
    """The kind of graph the op table's operators are for, not compiled yet."""
    if isinstance(ops, FusedCpuOps):
        return StaticStepGraph(model, ops, limits)
    return DynamicStepGraph(model, ops, max_whole_prompts)


class StaticStepGraph(StepGraph):
    """One graph of the largest step's size. A step's inputs are copied to buffers whose tensors are made once: what
    was checked is what runs, and a call makes no tensor."""

    def __init__(self, model: nn.Cell, ops: FusedCpuOps, limits: SlotLimits) -> None:
        tokens, seqs = limits.max_tokens, limits.max_seqs
        self._logits = ops.logits
        self._token_ids, self._positions, self._slot_mapping = (np.zeros(tokens, np.int32) for _ in range(3))
        self._last_tokens, self._context_lens, self._query_lens = (np.zeros(seqs, np.int32) for _ in range(3))
        self._block_tables = np.zeros(seqs * limits.max_blocks_per_seq, np.int32)
        self._counts = np.zeros(4, np.int32)
        buffers = (
            self._token_ids,
            self._positions,
            self._last_tokens,
            self._slot_mapping,
            self._block_tables,
            self._context_lens,
            self._query_lens,
            self._counts,
        )
        self._tensors = tuple(map(as_tensor, buffers))
        self._graph = _CompiledGraph(_StaticStep(model))

    def compile(self) -> None:
        """With no tokens at all."""
        self._counts[:] = 0
        self._graph.compile(self._tensors)

    def run(self, inputs: StepInputs, token_ids: Int32Array) -> StepLogits:
        tokens, (seqs, width) = token_ids.size, inputs.block_tables.shape
        self._token_ids[:tokens] = token_ids
        self._positions[:tokens] = inputs.positions
        self._slot_mapping[:tokens] = inputs.slot_mapping
        self._last_tokens[:seqs] = inputs.sampled_tokens
        self._context_lens[:seqs] = inputs.context_lens
        self._query_lens[:seqs] = inputs.query_lens
        self._block_tables[: seqs * width] = inputs.block_tables.reshape(-1)
        self._counts[:3] = tokens, seqs, width
        best_ids: Int32Array = self._graph.run(self._tensors).asnumpy()
        return StepLogits(self._logits[:seqs], best_ids[:seqs])


class DynamicStepGraph(StepGraph):
    """The paged graph takes every step. The graph of whole prompts takes as many as ``max_whole_prompts`` of them."""

    def __init__(self, model: nn.Cell, ops: OpTable, max_whole_prompts: int) -> None:
        self._paged = _dynamic_graph(model, whole_prompts=False, query_lens=_int32(_VECTOR))
        self._whole_prompts: _CompiledGraph | None = None
        self._max_whole_prompts = max_whole_prompts
        if ops.has_whole_prompts:
            query_lens = Tensor(shape=(max_whole_prompts,), dtype=ms.int64)
            self._whole_prompts = _dynamic_graph(model, whole_prompts=True, query_lens=query_lens)

    def compile(self) -> None:
        """With one padding token."""
        zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
        for whole_prompts in (False, True):
            inputs = StepInputs(zero, zero, zero - 1, zero.reshape(1, 1), one, one, zero, zero, zero, whole_prompts)
            graph, arrays = self._choose(inputs, zero)
            graph.compile(tuple(map(as_tensor, arrays)))

    def run(self, inputs: StepInputs, token_ids: Int32Array) -> StepLogits:
        graph, arrays = self._choose(inputs, token_ids)
        return StepLogits(as_float32_array(graph.run(tuple(map(as_tensor, arrays)))), None)

    def _choose(self, inputs: StepInputs, token_ids: Int32Array) -> tuple[_CompiledGraph, Sequence[npt.NDArray[Any]]]:
        query_lens: npt.NDArray[Any]
        graph, query_lens, seqs = self._paged, inputs.query_lens, inputs.query_lens.size
        if inputs.whole_prompts and self._whole_prompts is not None and seqs <= self._max_whole_prompts:
            graph, query_lens = self._whole_prompts, np.zeros(self._max_whole_prompts, np.int64)
            query_lens[:seqs] = inputs.query_lens
        return graph, (
            token_ids,
            inputs.positions,
            inputs.last_tokens,
            inputs.slot_mapping,
            inputs.block_tables,
            inputs.context_lens,
            query_lens,
        )


class _CompiledGraph:
    """A graph and the way to run it with the least overhead."""

    def __init__(self, cell: nn.Cell) -> None:
        self._cell = cell
        self._phase = ""

    def compile(self, tensors: tuple[Tensor, ...]) -> None:
        """Compile, and run with these inputs."""
        self._cell(*tensors).asnumpy()
        self._phase = self._cell.phase_cache[self._cell.phase]

    def run(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """Straight to MindSpore's executor: ``Cell.__call__`` would check again, at two to three times the overhead,
        that it is compiled for these inputs, which the caller has settled."""
        return _cell_graph_executor._graph_executor(tensors, self._phase)


def _dynamic_graph(model: nn.Cell, *, whole_prompts: bool, query_lens: Tensor) -> _CompiledGraph:
    cell = _DynamicStep(model, whole_prompts=whole_prompts)
    vector, matrix = _int32(_VECTOR), _int32(_MATRIX)
    cell.set_inputs(vector, vector, vector, vector, matrix, vector, query_lens)
    return _CompiledGraph(cell)


class _DynamicStep(nn.Cell):
    """A graph's outermost Cell: its arguments are the graph's inputs."""

    def __init__(self, model: nn.Cell, *, whole_prompts: bool) -> None:
        super().__init__(auto_prefix=False)
        self.model = model
        self.whole_prompts = whole_prompts
        self.set_train(False)

    def construct(
        self,
        token_ids: Tensor,
        positions: Tensor,
        last_tokens: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        query_lens: Tensor,
    ) -> Tensor:
        step = (slot_mapping, block_tables, context_lens, query_lens)
        return self.model(token_ids, positions, last_tokens, step, self.whole_prompts)


class _StaticStep(nn.Cell):
    """The same, with the counts that say how much of each input there is."""

    def __init__(self, model: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.model = model
        self.set_train(False)

    def construct(
        self,
        token_ids: Tensor,
        positions: Tensor,
        last_tokens: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        query_lens: Tensor,
        counts: Tensor,
    ) -> Tensor:
        step = (slot_mapping, block_tables, context_lens, query_lens, counts)
        return self.model(token_ids, positions, last_tokens, step, False)


def _int32(shape: tuple[None, ...]) -> Tensor:
    return Tensor(shape=shape, dtype=ms.int32)
