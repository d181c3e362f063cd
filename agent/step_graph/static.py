"""Defines the static graph of the fused operators, which is compiled once over the buffers of the largest step."""

from __future__ import annotations

from mindspore import Tensor, nn

from agent.backends.cpu.ops import FusedCpuOps
from agent.group.exchange import all_agree
from agent.kernels import StepBuffers
from agent.step_graph.fused_steps import FusedStepGraph
from agent.step_graph.replayed_graph import ReplayedGraph
from agent.weights.storage import Array


class StaticStepGraph(FusedStepGraph):
    """One graph whose tensors have the size of the largest step. Every step runs this graph."""

    def __init__(self, model: nn.Cell, ops: FusedCpuOps, buffers: StepBuffers) -> None:
        super().__init__(ops, buffers)
        inputs = (
            self._entry,
            buffers.positions,
            buffers.sampled_tokens,
            buffers.slot_mapping,
            buffers.block_tables,
            buffers.context_lens,
            buffers.query_lens,
            buffers.counts,
        )
        self._graph = ReplayedGraph(_StaticStep(model), inputs, lambda vote: all_agree(ops.part, vote))
        self.replays = self._graph.replays

    def compile(self) -> None:
        """Compiles the graph and runs it with 0 tokens."""
        self._buffers.counts[:] = 0
        self._graph.compile()

    def set_replaying(self, replaying: bool) -> None:
        self.replays.is_paused = not replaying

    @property
    def replayed_graphs(self) -> tuple[ReplayedGraph, ...]:
        """The compiled graph, for ``agent.stored_program.start``."""
        return (self._graph,)

    def _compute(self, results: tuple[Array, ...], num_tokens: int) -> None:
        self.replays.run(results, num_tokens)


class _StaticStep(nn.Cell):
    """The outermost Cell of the static graph. ``counts`` has the numbers of tokens and sequences of a step.

    All other inputs have the size of the largest step.
    """

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
    ) -> Tensor | tuple[Tensor, ...]:
        step = (slot_mapping, block_tables, context_lens, query_lens, counts)
        return self.model(token_ids, positions, last_tokens, step, False)
