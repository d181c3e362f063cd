"""The compiled graphs of a model: one call a step, inputs without a copy, logits out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
import numpy.typing as npt
from mindspore import Tensor, nn
from mindspore.graph.api import _cell_graph_executor

from agent.backends.base import OpTable
from agent.layers.parameter import as_float32_array, as_tensor
from agent.step_inputs import Int32Array, StepInputs

_VECTOR = (None,)
_MATRIX = (None, None)


class StepGraph:
    """Compiles the graphs of the op table and runs the one that fits a step. One thread may run graphs.

    The paged graph takes every step. The graph of whole prompts takes as many as ``max_whole_prompts`` of them.
    """

    def __init__(self, model: nn.Cell, ops: OpTable, max_whole_prompts: int) -> None:
        self._paged = _CompiledGraph(model, whole_prompts=False, query_lens=_int32(_VECTOR))
        self._whole_prompts: _CompiledGraph | None = None
        self._max_whole_prompts = max_whole_prompts
        if ops.has_whole_prompts:
            query_lens = Tensor(shape=(max_whole_prompts,), dtype=ms.int64)
            self._whole_prompts = _CompiledGraph(model, whole_prompts=True, query_lens=query_lens)

    def compile(self) -> None:
        """Compile, and run one token that writes nothing to the cache. Further calls do nothing new."""
        one, zero = np.ones(1, np.int32), np.zeros(1, np.int32)
        for whole_prompts in (False, True):
            inputs = StepInputs(zero, zero, zero - 1, zero.reshape(1, 1), one, one, zero, zero, whole_prompts)
            graph, arrays = self._choose(inputs, zero)
            graph.compile(arrays)

    def run(self, inputs: StepInputs, token_ids: Int32Array) -> npt.NDArray[np.float32]:
        """Logits [S, vocabulary] of each sequence's last token. ``token_ids`` [T] are those of ``inputs``, resolved.

        Raises RuntimeError when an operator refuses its inputs.
        """
        graph, arrays = self._choose(inputs, token_ids)
        return graph.run(arrays)

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

    def __init__(self, model: nn.Cell, *, whole_prompts: bool, query_lens: Tensor) -> None:
        self._cell = _Step(model, whole_prompts=whole_prompts)
        vector, matrix = _int32(_VECTOR), _int32(_MATRIX)
        self._cell.set_inputs(vector, vector, vector, vector, matrix, vector, query_lens)
        self._phase = ""

    def compile(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Compile, and run with these inputs."""
        self._cell(*map(as_tensor, arrays)).asnumpy()
        self._phase = self._cell.phase_cache[self._cell.phase]

    def run(self, arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.float32]:
        """Straight to MindSpore's executor: ``Cell.__call__`` would check again, at two to three times the overhead,
        that it is compiled for these inputs, which ``set_inputs`` and ``StepReader`` have settled."""
        return as_float32_array(_cell_graph_executor._graph_executor(tuple(map(as_tensor, arrays)), self._phase))


class _Step(nn.Cell):
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


def _int32(shape: tuple[None, ...]) -> Tensor:
    return Tensor(shape=shape, dtype=ms.int32)
