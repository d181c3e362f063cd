"""The dynamic graphs, of native primitives: which of them takes a step, how it is run, what its failures mean.

What the graphs are made of is in ``dynamic_cell``; steps without MindSpore are in
``agent.step_graph.replay.dynamic_replays``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from mindspore import Tensor, nn

from agent.backends.base import OpTable
from agent.layers.parameter import as_storage, as_tensor
from agent.step_graph.compiled import CompiledGraph
from agent.step_graph.dynamic_cell import GraphKind, dynamic_step
from agent.step_graph.inputs import no_entry, padded_decode
from agent.step_graph.interface import OperatorRefusedError, StepGraph
from agent.step_graph.logits import LogitsInFloat32, StepLogits, beside
from agent.step_graph.replay.dynamic_replays import DynamicReplays
from agent.step_inputs import Int32Array, StepInputs
from agent.weights.storage import Array
from llm_serving.ipc.shm import SlotLimits


@runtime_checkable
class TakesForms(Protocol):
    """A model whose Cells must be told, before a graph is compiled, which kind they are to become."""

    def take_form(self, *, whole_prompts: bool) -> None:
        """For steps of whole prompts, or of anything."""


class DynamicStepGraph(StepGraph):
    """A graph of each kind. That of whole prompts takes as many as ``max_whole_prompts`` of them; decodes are padded to
    one of ``decode_sizes``, rising, so that MindSpore finds the shapes that it has captured. Empty: they are not, and
    steps of any kind are replayed where the op table may."""

    def __init__(
        self, model: nn.Cell, ops: OpTable, limits: SlotLimits, max_whole_prompts: int, decode_sizes: Sequence[int] = ()
    ) -> None:
        self._part, self._ops = ops.part, ops
        self._no_entry = no_entry(ops, 1)
        self._max_table_width = limits.max_blocks_per_seq
        self._model = model
        self._graphs = {
            kind: CompiledGraph(dynamic_step(model, ops, kind, max_whole_prompts, captures=bool(decode_sizes)))
            for kind in GraphKind
            if kind != GraphKind.PREFILL or ops.has_whole_prompts
        }
        self._max_whole_prompts = max_whole_prompts if ops.has_whole_prompts else 0
        self._float32 = LogitsInFloat32()
        self._pads_prompts = not ops.dynamic_prompts
        self._decode_sizes = tuple(decode_sizes)
        self.replays: dict[GraphKind, DynamicReplays] = {}
        if ops.replays_steps and not decode_sizes and not isinstance(model, TakesForms):
            self.replays = {kind: self._replays_of(kind, graph, limits) for kind, graph in self._graphs.items()}

    def _replays_of(self, kind: GraphKind, graph: CompiledGraph, limits: SlotLimits) -> DynamicReplays:
        tensors = [*graph.parameters(), *graph.constants()]
        padded = self._max_whole_prompts if kind == GraphKind.PREFILL and self._pads_prompts else 0
        return DynamicReplays(kind.value, graph.run, tensors, limits, self._ops.stage_agrees, max_prompts=padded)

    def compile(self) -> None:
        """With one padding token; what is replayed is recorded."""
        zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
        inputs = StepInputs(zero, zero, zero - 1, zero.reshape(1, 1), one, one, zero, zero, zero, whole_prompts=False)
        self._ops.failed_operator()  # forgotten, if it is of a graph that failed for another reason
        for kind, graph in self._graphs.items():
            if isinstance(self._model, TakesForms):
                self._model.take_form(whole_prompts=kind == GraphKind.PREFILL)
            graph.compile(self._tensors(kind, inputs, self._no_entry))
            if kind in self.replays:
                self.replays[kind].record(self._no_entry, is_decode=kind == GraphKind.DECODE)
            self._check_operators()

    def run(self, inputs: StepInputs, entry: Array) -> StepLogits:
        with self._running():
            logits = self._float32.of(self._result(inputs, entry))
        self._check_operators()
        part = self._part
        if part is not None and part.is_split:
            if not part.answers:
                return StepLogits(logits[:0], None)
            return StepLogits(beside(logits, part.parallel.tensor_parallel, part.whole.vocab_size), None)
        return StepLogits(logits[: inputs.query_lens.size], None)

    def run_stage(self, inputs: StepInputs, entry: Array) -> Array:
        with self._running():
            stream = self._result(inputs, entry)
        self._check_operators()
        return stream

    @contextmanager
    def _running(self) -> Iterator[None]:
        self._ops.set_running(True)
        try:
            yield
        finally:
            self._ops.set_running(False)

    def _result(self, inputs: StepInputs, entry: Array) -> Array:
        replays = self.replays.get(self.kind_of(inputs))
        if replays is not None and len(entry) <= replays.most_tokens:
            return replays.run(inputs, entry)
        return as_storage(self._run(inputs, entry))

    def _run(self, inputs: StepInputs, entry: Array) -> Tensor:
        kind = self.kind_of(inputs)
        if kind == GraphKind.DECODE and self._decode_sizes:
            size = next(size for size in self._decode_sizes if size >= inputs.query_lens.size)
            inputs, entry = padded_decode(inputs, entry, size, self._max_table_width)
        return self._graphs[kind].run(self._tensors(kind, inputs, entry))

    def kind_of(self, inputs: StepInputs) -> GraphKind:
        """Which graph takes the step."""
        seqs = inputs.query_lens.size
        if inputs.whole_prompts and seqs <= self._max_whole_prompts:
            return GraphKind.PREFILL
        return GraphKind.DECODE if inputs.positions.size == seqs else GraphKind.CHUNKED

    def _check_operators(self) -> None:
        failed = self._ops.failed_operator()
        if failed is not None:
            raise OperatorRefusedError(f"{failed} refused its inputs; the reason is in the agent's log")

    def _tensors(self, kind: GraphKind, inputs: StepInputs, entry: Array) -> tuple[Tensor, ...]:
        query_lens: npt.NDArray[np.int32 | np.int64] = inputs.query_lens
        if kind == GraphKind.PREFILL and self._pads_prompts:
            query_lens = np.zeros(self._max_whole_prompts, np.int64)
            query_lens[: inputs.query_lens.size] = inputs.query_lens
        arrays = (
            entry,
            inputs.positions,
            inputs.last_tokens,
            inputs.slot_mapping,
            self._tables(kind, inputs.block_tables),
            inputs.context_lens,
            query_lens,
        )
        return tuple(map(as_tensor, arrays))

    def _tables(self, kind: GraphKind, tables: Int32Array) -> Int32Array:
        """As wide as the mask of a step with parts of prompts: an Ascend's kernel compares the two."""
        missing = self._max_table_width - tables.shape[1]
        return np.pad(tables, ((0, 0), (0, missing))) if kind == GraphKind.CHUNKED and missing else tables
