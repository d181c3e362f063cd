"""The static graph, of the fused operators: the Cell that is compiled over the buffers of the largest step."""

from __future__ import annotations

from mindspore import Tensor, nn

from agent.backends.cpu.ops import FusedCpuOps
from agent.kernels import LaunchRefusedError, StepBuffers
from agent.layers.parameter import as_tensor
from agent.step_graph.compiled import CompiledGraph
from agent.step_graph.inputs import no_entry
from agent.step_graph.interface import OperatorRefusedError, StepGraph
from agent.step_graph.logits import StepLogits
from agent.step_graph.replay.step_replays import StepReplays
from agent.step_inputs import StepInputs
from agent.weights.storage import Array

_MOST_STEPS = 2**31 - 1


class StaticStepGraph(StepGraph):
    """One graph of the largest step's size, bound to the memory that steps are read into: what was checked is what
    runs, and a call makes no tensor and copies nothing."""

    def __init__(self, model: nn.Cell, ops: FusedCpuOps, buffers: StepBuffers) -> None:
        """``buffers``: those of the reader of every step."""
        self._buffers = buffers
        self._logits, self._best_ids, self._stream = ops.logits, ops.best_ids, ops.stream
        self._result = StepLogits(self._logits[:0], self._best_ids[:0])
        self._number = 0
        # numbers of them, for which NumPy takes tens of microseconds when nothing of it is in the caches
        self._counts, self._done = buffers.counts.data, ops.best_ids.data
        self._entry: Array = buffers.token_ids if ops.is_first_stage else no_entry(ops, buffers.token_ids.size)
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
        self._tensors = tuple(map(as_tensor, inputs))
        self._graph = graph = CompiledGraph(_StaticStep(model))
        tensors = [*self._tensors, *graph.parameters(), *graph.constants()]
        self.replays = StepReplays(lambda: graph.run(self._tensors), tensors, ops.stage_agrees)

    def compile(self) -> None:
        """With no tokens at all."""
        self._buffers.counts[:] = 0
        self._graph.compile(self._tensors)

    def run(self, inputs: StepInputs, entry: Array) -> StepLogits:
        seqs = inputs.query_lens.size
        self._run(inputs, entry, (self._logits[:seqs], self._best_ids[:seqs]))
        if self._done[-1] != self._number:
            raise RuntimeError(f"the output layer is at step {self._done[-1]}, the graph at step {self._number}")
        if seqs != len(self._result.values):
            self._result = StepLogits(self._logits[:seqs], self._best_ids[:seqs])
        return self._result

    def run_stage(self, inputs: StepInputs, entry: Array) -> Array:
        stream = self._stream[: len(entry)]
        self._run(inputs, entry, (stream,))
        return stream

    def _run(self, inputs: StepInputs, entry: Array, results: tuple[Array, ...]) -> None:
        assert inputs.positions.base is self._buffers.positions, "a step must be in the buffers of this graph"
        if entry is not inputs.token_ids:
            self._entry[: len(entry)] = entry
        self._number = self._number % _MOST_STEPS + 1
        self._counts[3] = self._number
        try:
            self.replays.run(results, len(entry))
        except LaunchRefusedError as error:
            raise OperatorRefusedError(str(error)) from error


class _StaticStep(nn.Cell):
    """The inputs of a dynamic graph, with the counts that say how much of each input there is."""

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
