"""A dynamic graph as MindSpore sees it: its kinds, its outermost Cell, its inputs' names, types and shapes.

``tools/check_ascend_graph.py`` compiles exactly this for an Ascend, without a device.
"""

from __future__ import annotations

import enum

import mindspore as ms
from mindspore import Tensor, nn

from agent.backends.base import OpTable
from agent.layers.parameter import MINDSPORE_DTYPES

_VECTOR = (None,)
_MATRIX = (None, None)


class GraphKind(enum.Enum):
    """The dynamic graphs. Each takes the steps its device's attention primitives have a form for."""

    PREFILL = "prefill"
    """Whole prompts: attention among the tokens of the step."""
    CHUNKED = "chunked"
    """Any step, parts of prompts and decoding sequences mixed: attention over the cache, with a mask."""
    DECODE = "decode"
    """A token a sequence: attention over the cache, which needs no mask."""


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


def _int32(shape: tuple[None, ...]) -> Tensor:
    return Tensor(shape=shape, dtype=ms.int32)
