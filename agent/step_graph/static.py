"""The static graph, of the fused operators: buffers of the largest step, and the Cell that is compiled over them."""

from __future__ import annotations

import numpy as np
from mindspore import Tensor, nn

from agent.backends.cpu.ops import FusedCpuOps
from agent.layers.parameter import as_tensor
from agent.step_graph.compiled import CompiledGraph
from agent.step_graph.inputs import no_entry
from agent.step_graph.interface import StepGraph
from agent.step_graph.logits import StepLogits
from agent.step_inputs import Int32Array, StepInputs
from agent.weights.storage import Array
from llm_serving.ipc.shm import SlotLimits


class StaticStepGraph(StepGraph):
    """One graph of the largest step's size. A step's inputs are copied to buffers whose tensors are made once: what
    was checked is what runs, and a call makes no tensor."""

    def __init__(self, model: nn.Cell, ops: FusedCpuOps, limits: SlotLimits) -> None:
        tokens, seqs = limits.max_tokens, limits.max_seqs
        self._logits, self._stream = ops.logits, ops.stream
        self._entry = no_entry(ops, tokens)
        self._positions, self._slot_mapping = (np.zeros(tokens, np.int32) for _ in range(2))
        self._last_tokens, self._context_lens, self._query_lens = (np.zeros(seqs, np.int32) for _ in range(3))
        self._block_tables = np.zeros(seqs * limits.max_blocks_per_seq, np.int32)
        self._counts = np.zeros(4, np.int32)
        buffers = (
            self._entry,
            self._positions,
            self._last_tokens,
            self._slot_mapping,
            self._block_tables,
            self._context_lens,
            self._query_lens,
            self._counts,
        )
        self._tensors = tuple(map(as_tensor, buffers))
        self._graph = CompiledGraph(_StaticStep(model))

    def compile(self) -> None:
        """With no tokens at all."""
        self._counts[:] = 0
        self._graph.compile(self._tensors)

    def run(self, inputs: StepInputs, entry: Array) -> StepLogits:
        best_ids = self._run(inputs, entry)
        seqs = inputs.query_lens.size
        return StepLogits(self._logits[:seqs], best_ids[:seqs])

    def run_stage(self, inputs: StepInputs, entry: Array) -> Array:
        self._run(inputs, entry)
        return self._stream[: len(entry)]

    def _run(self, inputs: StepInputs, entry: Array) -> Int32Array:
        tokens, (seqs, width) = len(entry), inputs.block_tables.shape
        self._entry[:tokens] = entry
        self._positions[:tokens] = inputs.positions
        self._slot_mapping[:tokens] = inputs.slot_mapping
        self._last_tokens[:seqs] = inputs.sampled_tokens
        self._context_lens[:seqs] = inputs.context_lens
        self._query_lens[:seqs] = inputs.query_lens
        self._block_tables[: seqs * width] = inputs.block_tables.reshape(-1)
        self._counts[:3] = tokens, seqs, width
        result: Int32Array = self._graph.run(self._tensors).asnumpy()
        return result


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
