"""The compiled graphs of a model: one call a step, logits out. One thread may run graphs."""

from __future__ import annotations

import enum
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import mindspore as ms
import numpy as np
import numpy.typing as npt
from mindspore import Tensor, nn
from mindspore.graph.api import _cell_graph_executor

from agent.backends.base import OpTable
from agent.backends.cpu.ops import FusedCpuOps
from agent.decode_replays import DecodeReplays
from agent.kernels import widen_bfloat16
from agent.layers.parameter import MINDSPORE_DTYPES, as_storage, as_tensor
from agent.step_inputs import Int32Array, StepInputs
from agent.weights.storage import STORAGE_DTYPES, Array, to_float32
from llm_serving.errors import AgentStartError
from llm_serving.ipc.shm import PADDING_SLOT, SlotLimits

_NO_KERNEL = re.compile(r"Unsupported op \[(\w+)\]|operator\[(\w+)\] fail! Unsupported data type")
"""MindSpore's words for a primitive without a kernel, at all or for these types."""
_VECTOR = (None,)
_MATRIX = (None, None)


class OperatorRefusedError(RuntimeError):
    """An operator refused its inputs; the graph is as good as before."""


class GraphKind(enum.Enum):
    """The dynamic graphs. Each takes the steps its device's attention primitives have a form for."""

    PREFILL = "prefill"
    """Whole prompts: attention among the tokens of the step."""
    CHUNKED = "chunked"
    """Any step, parts of prompts and decoding sequences mixed: attention over the cache, with a mask."""
    DECODE = "decode"
    """A token a sequence: attention over the cache, which needs no mask."""


@runtime_checkable
class TakesForms(Protocol):
    """A model whose Cells must be told, before a graph is compiled, which kind they are to become."""

    def take_form(self, *, whole_prompts: bool) -> None:
        """For steps of whole prompts, or of anything."""


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
    def run(self, inputs: StepInputs, entry: Array) -> StepLogits:
        """Run a step of the last stage. ``entry`` are the token ids [T] of ``inputs``, resolved, or in a later stage
        than the first the stream [T, hidden_size] of the one before.

        Raises RuntimeError when an operator refuses its inputs.
        """

    @abstractmethod
    def run_stage(self, inputs: StepInputs, entry: Array) -> Array:
        """The same of an earlier stage: the stream [T, hidden_size] for the next one, valid until the next run."""


def make_step_graph(
    model: nn.Cell, ops: OpTable, limits: SlotLimits, max_whole_prompts: int, decode_sizes: Sequence[int] = ()
) -> StepGraph:
    """The kind of graph the op table's operators are for, not compiled yet; ``decode_sizes`` of a dynamic one."""
    if isinstance(ops, FusedCpuOps):
        return StaticStepGraph(model, ops, limits)
    return DynamicStepGraph(model, ops, limits, max_whole_prompts, decode_sizes)


class StaticStepGraph(StepGraph):
    """One graph of the largest step's size. A step's inputs are copied to buffers whose tensors are made once: what
    was checked is what runs, and a call makes no tensor."""

    def __init__(self, model: nn.Cell, ops: FusedCpuOps, limits: SlotLimits) -> None:
        tokens, seqs = limits.max_tokens, limits.max_seqs
        self._logits, self._stream = ops.logits, ops.stream
        self._entry = _no_entry(ops, tokens)
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
        self._graph = _CompiledGraph(_StaticStep(model))

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


class DynamicStepGraph(StepGraph):
    """A graph of each kind. That of whole prompts takes as many as ``max_whole_prompts`` of them; decodes are padded to
    one of ``decode_sizes``, rising, so that MindSpore finds the shapes that it has captured. Empty: they are not, and
    replayed where the op table may."""

    def __init__(
        self, model: nn.Cell, ops: OpTable, limits: SlotLimits, max_whole_prompts: int, decode_sizes: Sequence[int] = ()
    ) -> None:
        self._part, self._ops = ops.part, ops
        self._no_entry = _no_entry(ops, 1)
        self._max_table_width = limits.max_blocks_per_seq
        self._model = model
        self._graphs = {
            kind: _CompiledGraph(dynamic_step(model, ops, kind, max_whole_prompts, captures=bool(decode_sizes)))
            for kind in GraphKind
            if kind != GraphKind.PREFILL or ops.has_whole_prompts
        }
        self._max_whole_prompts = max_whole_prompts if ops.has_whole_prompts else 0
        self._logits = np.empty(0, np.float32)
        self._pads_prompts = not ops.dynamic_prompts
        self._decode_sizes = tuple(decode_sizes)
        self.replays: DecodeReplays | None = None
        if ops.replays_decodes and not decode_sizes and not isinstance(model, TakesForms):
            parameters = self._graphs[GraphKind.DECODE].parameters()
            self.replays = DecodeReplays(self._graphs[GraphKind.DECODE].run, parameters, limits)

    def compile(self) -> None:
        """With one padding token."""
        zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
        inputs = StepInputs(zero, zero, zero - 1, zero.reshape(1, 1), one, one, zero, zero, zero, whole_prompts=False)
        self._ops.failed_operator()  # forgotten, if it is of a graph that failed for another reason
        for kind, graph in self._graphs.items():
            if isinstance(self._model, TakesForms):
                self._model.take_form(whole_prompts=kind == GraphKind.PREFILL)
            graph.compile(self._tensors(kind, inputs, self._no_entry))
            self._check_operators()

    def run(self, inputs: StepInputs, entry: Array) -> StepLogits:
        with self._running():
            if self.replays is not None and self.kind_of(inputs) == GraphKind.DECODE:
                logits = self._float32(self.replays.run(inputs, entry))
            else:
                logits = self._float32(as_storage(self._run(inputs, entry)))
        self._check_operators()
        part = self._part
        if part is not None and part.is_split:
            if not part.answers:
                return StepLogits(logits[:0], None)
            return StepLogits(beside(logits, part.parallel.tensor_parallel, part.whole.vocab_size), None)
        return StepLogits(logits[: inputs.query_lens.size], None)

    def run_stage(self, inputs: StepInputs, entry: Array) -> Array:
        with self._running():
            stream = as_storage(self._run(inputs, entry))
        self._check_operators()
        return stream

    def _float32(self, logits: Array) -> npt.NDArray[np.float32]:
        """Logits [rows, vocabulary], bfloat16 as uint16, in memory that the next run may write to again."""
        if logits.dtype != np.uint16:
            return to_float32(logits, str(logits.dtype))
        if self._logits.size < logits.size:
            self._logits = np.empty(logits.size, np.float32)
        widened = self._logits[: logits.size].reshape(logits.shape)
        widen_bfloat16(logits, widened)
        return widened

    @contextmanager
    def _running(self) -> Iterator[None]:
        self._ops.set_running(True)
        try:
            yield
        finally:
            self._ops.set_running(False)

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


def padded_decode(inputs: StepInputs, entry: Array, size: int, table_width: int) -> tuple[StepInputs, Array]:
    """A decode step, and its token ids, with rows up to ``size`` that read the block that pads and write nothing."""
    rows = size - inputs.query_lens.size

    def longer(array: Int32Array, value: int) -> Int32Array:
        return np.pad(array, (0, rows), constant_values=value)

    tables = np.pad(inputs.block_tables, ((0, rows), (0, table_width - inputs.block_tables.shape[1])))
    padded = replace(
        inputs,
        positions=longer(inputs.positions, 0),
        slot_mapping=longer(inputs.slot_mapping, PADDING_SLOT),
        block_tables=tables,
        context_lens=longer(inputs.context_lens, 1),
        query_lens=longer(inputs.query_lens, 1),
        last_tokens=np.arange(size, dtype=np.int32),
    )
    return padded, longer(entry, 0)


def _no_entry(ops: OpTable, tokens: int) -> Array:
    """Zeros of what a stage's graph begins with."""
    if ops.part is None or ops.is_first_stage:
        return np.zeros(tokens, np.int32)
    return np.zeros((tokens, ops.part.whole.hidden_size), STORAGE_DTYPES[ops.dtype])


def beside(parts: npt.NDArray[np.float32], size: int, vocab_size: int) -> npt.NDArray[np.float32]:
    """[size * S, n], of each agent one after the other -> [S, vocab_size], its columns those of the agents in order;
    what pads the last one's is left out."""
    rows, columns = len(parts) // size, parts.shape[1]
    logits = np.empty((rows, vocab_size), np.float32)
    for index in range(size):
        place = logits[:, index * columns : (index + 1) * columns]
        place[:] = parts[index * rows : (index + 1) * rows, : place.shape[1]]
    return logits


class _CompiledGraph:
    """A graph and the way to run it with the least overhead."""

    def __init__(self, cell: nn.Cell) -> None:
        self._cell = cell
        self._phase = ""

    def compile(self, tensors: tuple[Tensor, ...]) -> None:
        """Compile, and run with these inputs. Raises AgentStartError naming a primitive without a kernel."""
        try:
            self._cell(*tensors).asnumpy()
        except (RuntimeError, TypeError) as error:
            lacking = _NO_KERNEL.search(str(error))
            if lacking is None:
                raise
            types = ", ".join(sorted({str(parameter.dtype) for parameter in self._cell.get_parameters()}))
            raise AgentStartError(
                f"the graph needs the primitive {lacking[1] or lacking[2]}, and this device has no kernel of it, or "
                f"none for its types (the model's are {types}); docs/ascend.md has a table of the primitives there are"
            ) from error
        self._phase = self._cell.phase_cache[self._cell.phase]

    def parameters(self) -> Iterator[Tensor]:
        """All that the graph has."""
        found: Iterator[Tensor] = self._cell.get_parameters()
        return found

    def run(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """Straight to MindSpore's executor: ``Cell.__call__`` would check again, at two to three times the overhead,
        that it is compiled for these inputs, which the caller has settled."""
        return _cell_graph_executor._graph_executor(tensors, self._phase)


def dynamic_step(
    model: nn.Cell, ops: OpTable, kind: GraphKind, max_whole_prompts: int, *, captures: bool = False
) -> nn.Cell:
    """The outermost Cell of a graph, its inputs' types and shapes set; ``captures``: decodes' launches are captured."""
    cell = _DynamicStep(model, ops, kind, captures=captures)
    vector, matrix = _int32(_VECTOR), _int32(_MATRIX)
    query_lens = vector
    if kind == GraphKind.PREFILL and not ops.dynamic_prompts:
        query_lens = Tensor(shape=(max_whole_prompts,), dtype=ms.int64)
    entry = vector
    if ops.part is not None and not ops.is_first_stage:
        entry = Tensor(shape=(None, ops.part.whole.hidden_size), dtype=MINDSPORE_DTYPES[ops.dtype])
    cell.set_inputs(entry, vector, vector, vector, matrix, vector, query_lens)
    return cell


class _DynamicStep(nn.Cell):
    """A graph's outermost Cell: its arguments are the graph's inputs.

    On an Ascend the attention kernels take the lengths of sequences from the graph's inputs of the names
    ``batch_valid_length`` and ``q_seq_lens`` (MindSpore's "LLMManager"), and weight formats may depend on the phase
    being called ``prefill`` or ``increment``: the names are part of the interface. Of a later
    stage ``token_ids`` is the stream of the one before.

    MindSpore captures the launches of any ``increment`` graph, and knows them by the inputs' shapes alone: where it
    captures, only one graph may be called that.
    """

    def __init__(self, model: nn.Cell, ops: OpTable, kind: GraphKind, *, captures: bool) -> None:
        super().__init__(auto_prefix=False)
        self.model = model
        self.whole_prompts = kind == GraphKind.PREFILL
        self.chunk_mask = ops.chunk_mask() if kind == GraphKind.CHUNKED else None
        self.set_train(False)
        names = {GraphKind.PREFILL: "prefill", GraphKind.CHUNKED: "chunked" if captures else "increment"}
        self.phase = names.get(kind, "increment")

    def construct(
        self,
        token_ids: Tensor,
        positions: Tensor,
        last_tokens: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        batch_valid_length: Tensor,
        q_seq_lens: Tensor,
    ) -> Tensor:
        step: tuple[Tensor, ...] = (slot_mapping, block_tables, batch_valid_length, q_seq_lens)
        if self.chunk_mask is not None:
            step = (*step, self.chunk_mask(positions))
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
