"""Compiles and runs the graphs of a head, a small network that makes drafts.

An EAGLE-3 head has two graphs. One takes the hidden states of three layers of the model, and the other takes the head's
own hidden states. An MTP head has one graph, because it takes one hidden state of the same size in both cases.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from agent.backends.base import OpTable
from agent.backends.cpu.ops import FusedCpuOps
from agent.compiled_graph import CompiledGraph
from agent.device_sampling.cells import BestTokens
from agent.kernels import StepBuffers
from agent.layers.parameter import MINDSPORE_DTYPES, as_storage, as_tensor
from agent.step_graph.head_steps import FusedHeadGraph, HeadGraph, HeadStates, state_widths
from agent.step_graph.replayed_graph import ReplayedGraph
from agent.step_inputs import Int32Array, StepInputs
from agent.weights.storage import STORAGE_DTYPES, Array
from llm_serving.config import Config
from llm_serving.config.draft_model import Head
from llm_serving.ipc.shm import PADDING_SLOT


def make_head_graph(
    cell: nn.Cell, head: Head, config: Config, ops: OpTable, buffers: StepBuffers, states: HeadStates | None
) -> HeadGraph:
    """Makes the graphs of ``cell`` for the op table ``ops``. The caller compiles them.

    ``cell`` is a network of ``agent.models.heads``. Graphs of fused operators read token ids and sizes from
    ``buffers``, and hidden states from ``states``. For other operators, ``states`` is None.
    """
    if isinstance(ops, FusedCpuOps):
        assert states is not None, "fused operators read hidden states from fixed memory"
        return StaticHeadGraph(cell, ops, buffers, states)
    return _NativeHeadGraph(cell, state_widths(config, head), config, ops)


class StaticHeadGraph(FusedHeadGraph):
    """Compiled static graphs, like ``agent.step_graph.static``. Replays steps without MindSpore."""

    def __init__(self, cell: nn.Cell, ops: FusedCpuOps, buffers: StepBuffers, states: HeadStates) -> None:
        super().__init__(ops, buffers, states)
        tokens = (buffers.token_ids, buffers.positions, buffers.sampled_tokens, buffers.slot_mapping)
        sizes = (buffers.block_tables, buffers.context_lens, buffers.query_lens, buffers.counts)
        self._graphs = {
            own: ReplayedGraph(_StaticHeadStep(cell, own=own), (array, *tokens, *sizes), bool)
            for own, array in states.arrays.items()
        }

    def compile(self) -> None:
        self._buffers.counts[:] = 0
        for graph in self._graphs.values():
            graph.compile()

    @property
    def replayed_graphs(self) -> tuple[ReplayedGraph, ...]:
        """The compiled graphs, for ``agent.stored_program.start``."""
        return tuple(self._graphs.values())

    def _compute(self, results: tuple[Array, ...], num_tokens: int, *, own: bool) -> None:
        self._graphs[own].replays.run(results, num_tokens)


class _StaticHeadStep(nn.Cell):
    """The outermost Cell of a static graph. ``counts`` has the numbers of tokens and sequences of a step."""

    def __init__(self, head: nn.Cell, *, own: bool) -> None:
        super().__init__(auto_prefix=False)
        self.head, self.own = head, own
        self.set_train(False)

    def construct(
        self,
        states: Tensor,
        token_ids: Tensor,
        positions: Tensor,
        last_tokens: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        query_lens: Tensor,
        counts: Tensor,
    ) -> tuple[Tensor, Tensor]:
        step = (slot_mapping, block_tables, context_lens, query_lens, counts)
        logits, hidden = self.head(states, token_ids, positions, last_tokens, step, self.own)
        return logits, hidden


class _NativeHeadGraph(HeadGraph):
    """Runs dynamic graphs of native operators. MindSpore runs each step, without replays.

    A graph with a mask runs steps in which a sequence has several tokens. A graph without a mask runs steps in which
    every sequence has one token.
    """

    def __init__(self, cell: nn.Cell, widths: dict[bool, int], config: Config, ops: OpTable) -> None:
        self._hooks, self._widths = ops.hooks, widths
        self._state_type = STORAGE_DTYPES[ops.dtype]
        self._table_width = config.max_blocks_per_seq
        self._graphs = {
            (own, chunked): CompiledGraph(_dynamic_step(cell, width, config, ops, own=own, chunked=chunked))
            for own, width in widths.items()
            for chunked in (False, True)
        }

    def compile(self) -> None:
        zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
        inputs = StepInputs(
            zero, zero, zero + PADDING_SLOT, zero.reshape(1, 1), one, one, zero, zero, zero, zero[:0],
            whole_prompts=False,
        )  # fmt: skip
        for (own, _), graph in self._graphs.items():
            states = np.zeros((1, self._widths[own]), self._state_type)
            with self._hooks.graph_run(compiles=True):
                graph.compile(self._tensors(inputs, states))

    def run(self, inputs: StepInputs, states: Array, *, own: bool) -> tuple[Int32Array, Array]:
        chunked = inputs.positions.size != inputs.query_lens.size
        with self._hooks.graph_run():
            graph = self._graphs[own and True in self._widths, chunked]
            guesses, hidden = map(as_storage, graph.run(self._tensors(inputs, np.ascontiguousarray(states))))
            return guesses, hidden

    def _tensors(self, inputs: StepInputs, states: Array) -> tuple[Tensor, ...]:
        missing = self._table_width - inputs.block_tables.shape[1]
        tables = np.pad(inputs.block_tables, ((0, 0), (0, missing)))
        arrays = (states, inputs.token_ids, inputs.positions, inputs.last_tokens, inputs.slot_mapping, tables)
        return tuple(map(as_tensor, (*arrays, inputs.context_lens, inputs.query_lens)))


def _dynamic_step(cell: nn.Cell, width: int, config: Config, ops: OpTable, *, own: bool, chunked: bool) -> nn.Cell:
    """Makes the outermost Cell of a dynamic graph and declares the types of its inputs.

    ``own`` selects the graph that takes the head's own hidden states, ``chunked`` the graph with a mask.
    """
    step = _DynamicHeadStep(cell, ops.chunk_mask() if chunked else None, config.shape.vocab_size, ops, own=own)
    vector = Tensor(shape=(None,), dtype=ms.int32)
    states = Tensor(shape=(None, width), dtype=MINDSPORE_DTYPES[ops.dtype])
    tables = Tensor(shape=(None, None), dtype=ms.int32)
    step.set_inputs(states, vector, vector, vector, vector, tables, vector, vector)
    return step


class _DynamicHeadStep(nn.Cell):
    """The outermost Cell of a dynamic graph. It returns the best guesses and the head's hidden states."""

    def __init__(self, head: nn.Cell, mask: nn.Cell | None, vocab_size: int, ops: OpTable, *, own: bool) -> None:
        super().__init__(auto_prefix=False)
        self.head, self.own, self.mask = head, own, mask
        self.best_tokens = BestTokens(vocab_size, ops.part)
        self.set_train(False)

    def construct(
        self,
        states: Tensor,
        token_ids: Tensor,
        positions: Tensor,
        last_tokens: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        batch_valid_length: Tensor,
        q_seq_lens: Tensor,
    ) -> tuple[Tensor, Tensor]:
        step: tuple[Tensor, ...] = (slot_mapping, block_tables, batch_valid_length, q_seq_lens)
        if self.mask is not None:
            step = (*step, self.mask(positions))
        logits, hidden = self.head(states, token_ids, positions, last_tokens, step, self.own)
        return self.best_tokens(logits)[0], hidden
