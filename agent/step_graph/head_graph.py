"""Compiles and runs the graphs of a head, a small network that makes drafts.

An EAGLE-3 head has two graphs. One takes the hidden states of three layers of the model, and the other takes the head's
own hidden states. An MTP head has one graph, because it takes one hidden state of the same size in both cases.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from agent.backends.base import OpTable
from agent.backends.cpu.ops import FusedCpuOps
from agent.compiled_graph import CompiledGraph
from agent.device_sampling.cells import BestTokens
from agent.kernels import StepBuffers
from agent.layers.parameter import MINDSPORE_DTYPES, as_storage, as_tensor
from agent.step_graph.replay.fused import FusedReplays
from agent.step_inputs import Int32Array, StepInputs
from agent.weights.storage import STORAGE_DTYPES, Array, allocate
from llm_serving.config import Config
from llm_serving.config.draft_model import Head
from llm_serving.ipc.shm import PADDING_SLOT

_MAX_STEP_NUMBER = 2**31 - 1
"""Largest number that a step can have. The step after it has the number 1."""


class HeadGraph(ABC):
    """Runs the steps of a head."""

    @abstractmethod
    def compile(self) -> None:
        """Compiles the graphs and runs each of them once."""

    @abstractmethod
    def run(self, inputs: StepInputs, states: Array, *, own: bool) -> tuple[Int32Array, Array]:
        """Runs a step. Returns the best guess of each sequence [seqs], and the head's hidden states [tokens, width].

        ``states`` are the model's hidden states [tokens, layers x width]: of three layers for an EAGLE-3 head, of one
        layer for an MTP head. With ``own``, ``states`` are the head's own hidden states [tokens, width]. Both results
        are valid until the next run. bfloat16 is returned as uint16. Raises RuntimeError if an operator refuses its
        inputs.
        """


def make_head_graph(cell: nn.Cell, head: Head, config: Config, ops: OpTable, buffers: StepBuffers) -> HeadGraph:
    """Makes the graphs of ``cell`` for the op table ``ops``. The caller compiles them.

    ``cell`` is a network of ``agent.models.heads``. The graph reads token ids and sizes of each step from ``buffers``.
    """
    widths = {False: len(head.layers) * head.hidden_size, True: config.shape.hidden_size}
    if isinstance(ops, FusedCpuOps):
        return _FusedHeadGraph(cell, widths, config, ops, buffers)
    return _NativeHeadGraph(cell, widths, config, ops)


class _FusedHeadGraph(HeadGraph):
    """Runs static graphs over the buffers of the step reader, like ``agent.step_graph.static``. Replays steps without
    MindSpore.
    """

    def __init__(
        self, cell: nn.Cell, widths: dict[bool, int], config: Config, ops: FusedCpuOps, buffers: StepBuffers
    ) -> None:
        self._buffers, self._logits, self._best_ids, self._own = buffers, ops.logits, ops.best_ids, ops.taps[0]
        self._number = 0
        self._has_fusion = cell.has_fusion
        self._states: dict[bool, Array] = {}
        self._graphs: dict[bool, CompiledGraph] = {}
        self._replays: dict[bool, FusedReplays] = {}
        self._tensors: dict[bool, tuple[Tensor, ...]] = {}
        for own in (False, True) if cell.has_fusion else (False,):
            self._add_graph(cell, allocate((config.max_num_batched_tokens, widths[own]), ops.dtype), own=own)

    def _add_graph(self, cell: nn.Cell, states: Array, *, own: bool) -> None:
        buffers = self._buffers
        arrays = (states, buffers.token_ids, buffers.positions, buffers.sampled_tokens, buffers.slot_mapping)
        sizes = (buffers.block_tables, buffers.context_lens, buffers.query_lens, buffers.counts)
        self._states[own] = states
        tensors = self._tensors[own] = tuple(map(as_tensor, (*arrays, *sizes)))
        graph = self._graphs[own] = CompiledGraph(_StaticHeadStep(cell, own=own))
        memory = [*tensors, *graph.parameters(), *graph.constants()]
        self._replays[own] = FusedReplays(lambda: graph.run(tensors), memory, bool)

    def compile(self) -> None:
        self._buffers.counts[:] = 0
        for own, graph in self._graphs.items():
            graph.compile(self._tensors[own])

    def run(self, inputs: StepInputs, states: Array, *, own: bool) -> tuple[Int32Array, Array]:
        tokens, seqs = len(states), inputs.query_lens.size
        own = own and self._has_fusion
        self._states[own][:tokens] = states
        self._number = self._number % _MAX_STEP_NUMBER + 1
        self._buffers.counts[3] = self._number
        results = (self._logits[:seqs], self._best_ids[:seqs], self._own[:tokens])
        self._replays[own].run(results, tokens)
        if self._best_ids[-1] != self._number:
            raise RuntimeError(f"the head's output is of step {self._best_ids[-1]}, the graph's of {self._number}")
        return results[1], results[2]


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
        self._hooks, self._widths, self._has_fusion = ops.hooks, widths, cell.has_fusion
        self._state_type = STORAGE_DTYPES[ops.dtype]
        self._table_width = config.max_blocks_per_seq
        owns = (False, True) if cell.has_fusion else (False,)
        self._graphs = {
            (own, chunked): CompiledGraph(_dynamic_step(cell, widths[own], config, ops, own=own, chunked=chunked))
            for own in owns
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
            graph = self._graphs[own and self._has_fusion, chunked]
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
