"""Runs steps with graphs of native operators that have dynamic shapes. Chooses the graph, pads the inputs and runs it.

MindSpore runs these graphs, and ``dynamic_cell`` defines them as Cells. ``agent.step_graph.replay.native`` runs the
same steps without MindSpore.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from mindspore import Tensor, nn

from agent.backends.base import OpTable
from agent.backends.launch import OnDevice, as_array
from agent.compiled_graph import CompiledGraph
from agent.device_sampling.graphs import STEP_FETCHED, SamplingGraphs, as_device
from agent.group.exchange import all_agree
from agent.layers.parameter import as_tensor
from agent.run_ahead.inserted import InsertedIds
from agent.scores import DeviceScores
from agent.step_graph.adapter_order import AdapterOrder
from agent.step_graph.dynamic_cell import GraphKind, dynamic_step, gathers_blocks, graph_kinds
from agent.step_graph.interface import Operators, StepGraph, empty_entry
from agent.step_graph.replay.native import NativeReplays
from agent.step_graph.step_blocks import StepBlocks
from agent.step_graph.token_rows import by_token
from agent.step_inputs import NUM_ROTARY_DIMENSIONS, Int32Array, StepInputs
from agent.weights.storage import Array
from llm_serving.ipc.shm import NO_ADAPTER, PADDING_SLOT, SlotLimits


@runtime_checkable
class TakesForms(Protocol):
    """A model of MindFormers. Before a graph is compiled, ``take_form`` must be called to select the graph's kind of
    attention.
    """

    def take_form(self, *, whole_prompts: bool) -> None:
        """Prepares the model for the next graph. ``whole_prompts`` means the graph for whole prompts."""


class DynamicStepGraph(StepGraph):
    """Owns one dynamic graph for each of ``graph_kinds``, and runs steps with them.

    The graph for whole prompts takes at most ``max_whole_prompts`` prompts. ``decode_sizes`` are ascending numbers of
    sequences. MindSpore captures the launches of a decode step for each size, and decode steps are padded to one of the
    sizes. Without ``decode_sizes``, the agent replays the steps of all graphs itself if the device can replay steps.
    With ``fuses``, the agent's replays fuse operators. ``step_blocks`` lists the blocks that a step reads.
    ``step_blocks`` must be given if the graphs gather these blocks.
    """

    def __init__(
        self,
        model: nn.Cell,
        ops: OpTable,
        limits: SlotLimits,
        max_whole_prompts: int,
        vocab_size: int,
        decode_sizes: Sequence[int] = (),
        *,
        fuses: bool = False,
        step_blocks: StepBlocks | None = None,
    ) -> None:
        self._part, self._hooks, self._fuses = ops.part, ops.hooks, fuses
        self._has_taps = ops.num_taps > 0
        self._reads_rotary_positions = ops.reads_rotary_positions
        self._tapped: tuple[OnDevice, ...] = ()
        assert not (step_blocks and decode_sizes), "captured launches have one size, and lists of blocks have any size"
        self._step_blocks = step_blocks
        assert step_blocks or not ops.gathers_blocks, "graphs that gather blocks need the lists of blocks"
        self._attends_by_token = ops.attends_by_token
        self._gathering = {kind for kind in GraphKind if gathers_blocks(ops, kind)}
        self._adapter_order: AdapterOrder | None = None
        if ops.num_adapter_groups:
            self._adapter_order = AdapterOrder(ops.num_adapter_groups, orders_entry=ops.is_first_stage)
        self._inserts_ids = ops.inserts_ids
        self._empty_entry = empty_entry(ops, 1)
        self._max_table_width = limits.max_blocks_per_seq
        self._model = model
        self._graphs = {
            kind: CompiledGraph(
                dynamic_step(model, ops, kind, max_whole_prompts, vocab_size, captures=bool(decode_sizes))
            )
            for kind in graph_kinds(ops)
        }
        self._sampling: SamplingGraphs | None = None
        if ops.is_last_stage:
            # The device draws tokens only so that steps can be launched ahead. Captured launches overwrite the logits
            # that the host may need to check a draw. So captures exclude draws.
            draws = ops.traits.runs_ahead and not decode_sizes
            self._sampling = SamplingGraphs(vocab_size, ops.part, ops.hooks, draws=draws)
        self._max_whole_prompts = max_whole_prompts if ops.has_whole_prompt_graph else 0
        self._pads_prompts = ops.traits.pads_whole_prompts
        self._decode_sizes = tuple(decode_sizes)
        # Captured launches always write the logits into the same memory, so the next step overwrites them.
        self.keeps_logits = not decode_sizes
        self.replays: dict[GraphKind, NativeReplays] = {}
        if ops.traits.replays_steps and not decode_sizes and not isinstance(model, TakesForms):
            self.replays = {kind: self._replays_of(kind, graph, limits) for kind, graph in self._graphs.items()}

    def _replays_of(self, kind: GraphKind, graph: CompiledGraph, limits: SlotLimits) -> NativeReplays:
        tensors = [*graph.parameters(), *graph.constants()]
        max_prompts = self._max_whole_prompts if kind == GraphKind.PREFILL and self._pads_prompts else 0

        def agree(vote: bool) -> bool:
            return all_agree(self._part, vote)

        return NativeReplays(
            kind.value,
            graph.run,
            tensors,
            limits,
            agree,
            max_prompts=max_prompts,
            inserts_ids=self._inserts_ids,
            fuses=self._fuses,
            max_blocks=self._step_blocks.most if kind in self._gathering and self._step_blocks is not None else 0,
            adapter_order=self._adapter_order,
            reads_rotary_positions=self._reads_rotary_positions,
            attends_by_token=self._attends_by_token,
        )

    def operators(self) -> Mapping[str, Operators]:
        found = {}
        for kind, replays in self.replays.items():
            before, fusions = replays.operators
            if before:
                found[kind.value] = Operators(before, tuple(fusions))
        return found

    def compile(self) -> None:
        """Compiles every graph with a step of one padding token. Records the launches of graphs that are replayed."""
        zero, one, num_rotary = np.zeros(1, np.int32), np.ones(1, np.int32), int(self._reads_rotary_positions)
        inputs = StepInputs(
            zero, zero, zero + PADDING_SLOT, zero.reshape(1, 1), one, one, zero, zero, zero, zero + NO_ADAPTER,
            whole_prompts=False, rotary_positions=np.zeros((num_rotary, NUM_ROTARY_DIMENSIONS), np.int32),
        )  # fmt: skip
        for kind, graph in self._graphs.items():
            if isinstance(self._model, TakesForms):
                self._model.take_form(whole_prompts=kind == GraphKind.PREFILL)
            with self._hooks.graph_run(compiles=True):
                results = graph.compile(self._tensors(kind, inputs, self._empty_entry, blocks=zero))
                if kind in self.replays:
                    self.replays[kind].record(self._empty_entry, is_decode=kind == GraphKind.DECODE)
        if self._sampling is not None:
            self._sampling.compile(results[0])

    def set_replaying(self, replaying: bool) -> None:
        for replays in self.replays.values():
            replays.is_paused = not replaying

    def run(self, inputs: StepInputs, entry: Array, inserted: InsertedIds | None = None) -> DeviceScores:
        assert self._sampling is not None, "only the last stage has scores"
        step = self._hooks.launch(lambda: self._results(inputs, entry, inserted), self._sampling.step_fetched)
        if self._has_taps:
            self._tapped = step.results()[STEP_FETCHED.stop :]
        return self._sampling.scores(step, inputs.query_lens.size, self._num_ids(inputs))

    def tapped(self, num_tokens: int) -> tuple[Array, ...]:
        streams = tuple(as_array(stream)[:num_tokens] for stream in self._tapped)
        return streams if self._adapter_order is None else tuple(map(self._adapter_order.restored, streams))

    def run_stage(self, inputs: StepInputs, entry: Array) -> Array:
        return as_array(self._results(inputs, entry)[0])

    def inserts(self, inputs: StepInputs, num_ids: int) -> bool:
        """Returns whether the graph of this step can insert sampled token ids that are still on the device.

        ``num_ids`` is the length of the array in which the previous step has left its token ids. If MindSpore captures
        decode steps, this length must equal the number of sequences of this step with its padding sequences.
        """
        return self._inserts_ids and (not self._is_padded(inputs) or num_ids == self._num_ids(inputs))

    def _is_padded(self, inputs: StepInputs) -> bool:
        return bool(self._decode_sizes) and self.kind_of(inputs) == GraphKind.DECODE

    def _num_ids(self, inputs: StepInputs) -> int:
        """Returns the number of best tokens that the graph computes: one for each sequence, including padding
        sequences."""
        seqs = inputs.query_lens.size
        return next(size for size in self._decode_sizes if size >= seqs) if self._is_padded(inputs) else seqs

    def _results(self, inputs: StepInputs, entry: Array, inserted: InsertedIds | None = None) -> tuple[OnDevice, ...]:
        with self._hooks.graph_run():
            kind = self.kind_of(inputs)
            if self._adapter_order is not None:
                inputs, entry, inserted = self._adapter_order.sorted(inputs, entry, inserted)
            if self._attends_by_token:
                inputs = by_token(inputs)
            blocks = None
            if kind in self._gathering and self._step_blocks is not None:
                blocks, tables = self._step_blocks.of(inputs.block_tables, inputs.context_lens)
                inputs = replace(inputs, block_tables=tables)
            replays = self.replays.get(kind)
            if replays is not None and len(entry) <= replays.max_tokens:
                return replays.run(inputs, entry, inserted, blocks)
            if self._is_padded(inputs):
                inputs, entry, inserted = _padded_decode(
                    inputs, entry, inserted, self._num_ids(inputs), self._max_table_width
                )
            results = self._graphs[kind].run(self._tensors(kind, inputs, entry, inserted, blocks))
            return results if isinstance(results, tuple) else (results,)

    def kind_of(self, inputs: StepInputs) -> GraphKind:
        """Returns the kind of the graph that runs the step."""
        seqs = inputs.query_lens.size
        if inputs.whole_prompts and seqs <= self._max_whole_prompts:
            return GraphKind.PREFILL
        is_decode = inputs.positions.size == seqs and not self._attends_by_token
        return GraphKind.DECODE if is_decode else GraphKind.CHUNKED

    def _tensors(
        self,
        kind: GraphKind,
        inputs: StepInputs,
        entry: Array,
        inserted: InsertedIds | None = None,
        blocks: Int32Array | None = None,
    ) -> tuple[Tensor, ...]:
        """Returns the inputs of a graph. ``blocks`` are the gathered blocks; only a graph that gathers them uses it."""
        query_lens: npt.NDArray[np.int32 | np.int64] = inputs.query_lens
        if kind == GraphKind.PREFILL and self._pads_prompts:
            query_lens = np.zeros(self._max_whole_prompts, np.int64)
            query_lens[: inputs.query_lens.size] = inputs.query_lens
        arrays = (
            entry,
            inputs.graph_positions,
            inputs.last_tokens,
            inputs.slot_mapping,
            self._tables(kind, inputs.block_tables),
            inputs.context_lens,
            query_lens,
            *((blocks,) if blocks is not None and kind in self._gathering else ()),
            *((self._adapter_order.rows(inputs.adapters),) if self._adapter_order is not None else ()),
        )
        return (*map(as_tensor, arrays), *self._inserted_tensors(len(entry), inserted, self._num_ids(inputs)))

    def _inserted_tensors(self, tokens: int, inserted: InsertedIds | None, num_ids: int) -> tuple[Tensor, ...]:
        """Returns the inputs of ``InsertIds``, or () if the graph has no ``InsertIds``.

        If ``inserted`` is None, no token is inserted, and all inputs are zeros. ``num_ids`` is then the length of the
        input ``earlier_ids``.
        """
        if not self._inserts_ids:
            return ()
        if inserted is None:
            zeros = np.zeros(tokens, np.int32)
            return as_tensor(np.zeros(num_ids, np.int32)), as_tensor(zeros), as_tensor(zeros)
        return as_device(inserted.earlier.chosen_ids()), as_tensor(inserted.places), as_tensor(inserted.mask)

    def _tables(self, kind: GraphKind, tables: Int32Array) -> Int32Array:
        """Returns the block tables. For a step with chunks, pads them to the width of the attention mask.

        A kernel of the Ascend requires block tables and mask of the same width.
        """
        missing = self._max_table_width - tables.shape[1]
        return np.pad(tables, ((0, 0), (0, missing))) if kind == GraphKind.CHUNKED and missing else tables


def _padded_decode(
    inputs: StepInputs, entry: Array, inserted: InsertedIds | None, size: int, table_width: int
) -> tuple[StepInputs, Array, InsertedIds | None]:
    """Pads the inputs of a decode step to ``size`` sequences.

    The padding sequences read the null block, write no keys or values and have no adapter.
    """
    rows = size - inputs.query_lens.size

    def longer(array: Int32Array, value: int) -> Int32Array:
        return np.pad(array, (0, rows), constant_values=value)

    tables = np.pad(inputs.block_tables, ((0, rows), (0, table_width - inputs.block_tables.shape[1])))
    padded = replace(
        inputs,
        positions=longer(inputs.positions, 0),
        rotary_positions=np.pad(inputs.rotary_positions, ((0, rows * (inputs.rotary_positions.size > 0)), (0, 0))),
        slot_mapping=longer(inputs.slot_mapping, PADDING_SLOT),
        block_tables=tables,
        context_lens=longer(inputs.context_lens, 1),
        query_lens=longer(inputs.query_lens, 1),
        last_tokens=np.concatenate([inputs.last_tokens, np.arange(size - rows, size, dtype=np.int32)]),
        adapters=longer(inputs.adapters, NO_ADAPTER) if inputs.adapters.size else inputs.adapters,
    )
    if inserted is not None:
        inserted = replace(inserted, places=longer(inserted.places, 0), mask=longer(inserted.mask, 0))
    return padded, np.pad(entry, ((0, rows), *((0, 0),) * (entry.ndim - 1))), inserted
