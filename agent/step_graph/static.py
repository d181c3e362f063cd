"""The static graph of the fused operators: compiled once over the buffers of the largest step."""

from __future__ import annotations

from mindspore import Tensor, nn

from agent.backends.cpu.ops import FusedCpuOps
from agent.compiled_graph import CompiledGraph
from agent.group.exchange import all_agree
from agent.kernels import StepBuffers
from agent.layers.parameter import as_tensor
from agent.run_ahead.inserted import InsertedIds
from agent.scores import StepLogits
from agent.step_graph.interface import StepGraph, empty_entry
from agent.step_graph.replay.fused import FusedReplays
from agent.step_inputs import StepInputs
from agent.weights.storage import Array

_MAX_STEP_NUMBER = 2**31 - 1


class StaticStepGraph(StepGraph):
    """One graph of the largest step's size that reads its inputs from the step reader's buffers.

    The step reader has checked these inputs. ``run`` creates no tensor and copies nothing.
    """

    def __init__(self, model: nn.Cell, ops: FusedCpuOps, buffers: StepBuffers) -> None:
        """``buffers`` are the buffers that the step reader fills for every step."""
        self._buffers = buffers
        self._logits, self._best_ids, self._stream = ops.logits, ops.best_ids, ops.stream
        self._result = StepLogits(self._logits[:0], self._best_ids[:0])
        self._number = 0
        # Memoryviews: with cold caches, NumPy takes tens of microseconds to read or write one number.
        self._counts, self._done = buffers.counts.data, ops.best_ids.data
        self._entry: Array = buffers.token_ids if ops.is_first_stage else empty_entry(ops, buffers.token_ids.size)
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
        self.replays = FusedReplays(lambda: graph.run(self._tensors), tensors, lambda vote: all_agree(ops.part, vote))

    def compile(self) -> None:
        """Compiles the graph and runs it with no tokens."""
        self._buffers.counts[:] = 0
        self._graph.compile(self._tensors)

    def set_replaying(self, replaying: bool) -> None:
        self.replays.is_paused = not replaying

    def run(self, inputs: StepInputs, entry: Array, inserted: InsertedIds | None = None) -> StepLogits:
        assert inserted is None, "a fused step does not run ahead"
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
        assert inputs.positions.base is self._buffers.positions, "the step must be in the buffers of this graph"
        if entry is not inputs.token_ids:
            self._entry[: len(entry)] = entry
        self._number = self._number % _MAX_STEP_NUMBER + 1
        self._counts[3] = self._number
        self.replays.run(results, len(entry))


class _StaticStep(nn.Cell):
    """The outermost Cell. Its inputs are those of a dynamic graph and ``counts``, which has the step's sizes."""

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
