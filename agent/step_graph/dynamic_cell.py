"""Defines the dynamic graphs that MindSpore compiles: their kinds, their outermost Cell, and their inputs.

``tools/check_ascend_graph.py`` compiles exactly this Cell for an Ascend, without a device.
"""

from __future__ import annotations

import enum

import mindspore as ms
from mindspore import Tensor, nn

from agent.backends.base import OpTable
from agent.device_sampling.cells import BestTokens
from agent.layers.parameter import MINDSPORE_DTYPES
from agent.run_ahead.cells import InsertIds
from agent.step_inputs import NUM_ROTARY_DIMENSIONS

_VECTOR = (None,)
_MATRIX = (None, None)


class GraphKind(enum.Enum):
    """The kinds of dynamic graphs. Each kind uses the attention primitives in a different way."""

    PREFILL = "prefill"
    """The graph for whole prompts. Its attention is among the tokens of the step, without the cache."""
    CHUNKED = "chunked"
    """The graph for any mix of prompts, chunks and decoding sequences. Its attention reads the cache and uses a mask.
    """
    DECODE = "decode"
    """The graph for steps with one token of each sequence. Its attention reads the cache and needs no mask."""


def graph_kinds(ops: OpTable) -> tuple[GraphKind, ...]:
    """Returns the kinds of graphs of a model that has been built with ``ops``."""
    if ops.attends_by_token:
        return (GraphKind.CHUNKED,)
    return tuple(kind for kind in GraphKind if kind != GraphKind.PREFILL or ops.has_whole_prompt_graph)


def gathers_blocks(ops: OpTable, kind: GraphKind) -> bool:
    """Returns whether a graph has the input ``step_blocks``. The graph must read the cache, and
    ``OpTable.gathers_blocks`` must be True.
    """
    return ops.gathers_blocks and kind != GraphKind.PREFILL


def dynamic_step(
    model: nn.Cell, ops: OpTable, kind: GraphKind, max_whole_prompts: int, vocab_size: int, *, captures: bool = False
) -> nn.Cell:
    """Makes the outermost Cell of a graph and declares the types of its inputs.

    In the last pipeline stage, the graph returns the agent's logits and the results of ``BestTokens``. The residual
    streams of the operators of ``OpTable.tap`` follow. In any other stage, the graph returns the residual stream.

    All graphs have the same first inputs. ``step_blocks`` and ``adapter_rows`` follow if the operators need them. The
    inputs of ``InsertIds`` come last if the agent has the whole model. ``captures`` means that MindSpore captures the
    launches of decode steps.
    """
    best_tokens = BestTokens(vocab_size, ops.part) if ops.is_last_stage else None
    gathers = gathers_blocks(ops, kind)
    step = _STEPS[gathers, ops.num_adapter_groups > 0]
    cell = step(model, ops, kind, best_tokens, captures=captures)
    vector, matrix = _int32(_VECTOR), _int32(_MATRIX)
    query_lens = vector
    if kind == GraphKind.PREFILL and ops.traits.pads_whole_prompts:
        query_lens = Tensor(shape=(max_whole_prompts,), dtype=ms.int64)
    entry = vector
    if ops.part is not None and not ops.embeds:
        entry = Tensor(shape=(None, ops.part.whole.hidden_size), dtype=MINDSPORE_DTYPES[ops.dtype])
    positions = _int32((1 + NUM_ROTARY_DIMENSIONS, None)) if ops.reads_rotary_positions else vector
    inserted = (vector, vector, vector) if ops.inserts_ids else ()
    blocks = (vector,) if gathers else ()
    groups = ops.num_adapter_groups
    adapter_rows = (Tensor(shape=(groups,), dtype=ms.int64),) if groups else ()
    cell.set_inputs(entry, positions, vector, vector, matrix, vector, query_lens, *blocks, *adapter_rows, *inserted)
    return cell


class _DynamicStep(nn.Cell):
    """The outermost Cell of a graph. The arguments of ``construct`` are the graph's inputs.

    MindSpore reads some names here, which must not change. On an Ascend, the attention kernels take the lengths of
    sequences from the graph inputs named ``batch_valid_length`` and ``q_seq_lens`` (MindSpore's "LLMManager"). The
    layout of weights may depend on the name of the phase, which is ``prefill`` or ``increment``.

    MindSpore can capture the launches of graphs whose phase is ``increment``. It finds captured launches by the shapes
    of the inputs alone. Therefore only one graph may be named ``increment`` if MindSpore captures launches.

    In a later pipeline stage, ``token_ids`` is the residual stream of the previous stage. In the first stage of a model
    that reads images, ``token_ids`` has the embeddings of text tokens and the outputs of the vision encoder.
    ``StepInputs.graph_positions`` describes ``positions``.
    """

    def __init__(
        self, model: nn.Cell, ops: OpTable, kind: GraphKind, best_tokens: BestTokens | None, *, captures: bool
    ) -> None:
        super().__init__(auto_prefix=False)
        self.model = model
        self.best_tokens = best_tokens
        self.insert = InsertIds() if ops.inserts_ids else None
        self.whole_prompts = kind == GraphKind.PREFILL
        self.chunk_mask = ops.chunk_mask() if kind == GraphKind.CHUNKED and not ops.attends_by_token else None
        self.has_taps = ops.num_taps > 0
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
        earlier_ids: Tensor | None = None,
        places: Tensor | None = None,
        inserted: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        step = (slot_mapping, block_tables, batch_valid_length, q_seq_lens)
        return self.outputs(token_ids, positions, last_tokens, step, (), (earlier_ids, places, inserted))

    def outputs(
        self,
        token_ids: Tensor,
        positions: Tensor,
        last_tokens: Tensor,
        step: tuple[Tensor, ...],
        more: tuple[Tensor, ...],
        inserted: tuple[Tensor | None, ...],
    ) -> Tensor | tuple[Tensor, ...]:
        """Returns the outputs of the graph. ``more`` has the inputs ``step_blocks`` and ``adapter_rows`` if they exist.
        """
        if self.insert is not None:
            token_ids = self.insert(token_ids, *inserted)
        if self.chunk_mask is not None:
            step = (*step, self.chunk_mask(positions))
        output = self.model(token_ids, positions, last_tokens, (*step, *more), self.whole_prompts)
        if self.has_taps and self.best_tokens is not None:
            return (output[0], *self.best_tokens(output[0]), *output[1:])
        return output if self.best_tokens is None else (output, *self.best_tokens(output))


class _GatheringStep(_DynamicStep):
    """The outermost Cell of a graph that gathers the blocks of the step: it has one more input, ``step_blocks``."""

    def construct(  # type: ignore[override]
        self,
        token_ids: Tensor,
        positions: Tensor,
        last_tokens: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        batch_valid_length: Tensor,
        q_seq_lens: Tensor,
        step_blocks: Tensor,
        earlier_ids: Tensor | None = None,
        places: Tensor | None = None,
        inserted: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        step = (slot_mapping, block_tables, batch_valid_length, q_seq_lens)
        return self.outputs(token_ids, positions, last_tokens, step, (step_blocks,), (earlier_ids, places, inserted))


class _AdaptedStep(_DynamicStep):
    """The outermost Cell of a graph with LoRA adapters: it has one more input, ``adapter_rows``."""

    def construct(  # type: ignore[override]
        self,
        token_ids: Tensor,
        positions: Tensor,
        last_tokens: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        batch_valid_length: Tensor,
        q_seq_lens: Tensor,
        adapter_rows: Tensor,
        earlier_ids: Tensor | None = None,
        places: Tensor | None = None,
        inserted: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        step = (slot_mapping, block_tables, batch_valid_length, q_seq_lens)
        return self.outputs(token_ids, positions, last_tokens, step, (adapter_rows,), (earlier_ids, places, inserted))


class _AdaptedGatheringStep(_DynamicStep):
    """The outermost Cell of a graph that gathers blocks and has LoRA adapters."""

    def construct(  # type: ignore[override]
        self,
        token_ids: Tensor,
        positions: Tensor,
        last_tokens: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        batch_valid_length: Tensor,
        q_seq_lens: Tensor,
        step_blocks: Tensor,
        adapter_rows: Tensor,
        earlier_ids: Tensor | None = None,
        places: Tensor | None = None,
        inserted: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        step = (slot_mapping, block_tables, batch_valid_length, q_seq_lens)
        more = (step_blocks, adapter_rows)
        return self.outputs(token_ids, positions, last_tokens, step, more, (earlier_ids, places, inserted))


_STEPS = {
    (False, False): _DynamicStep,
    (True, False): _GatheringStep,
    (False, True): _AdaptedStep,
    (True, True): _AdaptedGatheringStep,
}
"""The class of the outermost Cell. The key is (whether the graph gathers blocks, whether it has LoRA adapters)."""


def _int32(shape: tuple[int | None, ...]) -> Tensor:
    return Tensor(shape=shape, dtype=ms.int32)
