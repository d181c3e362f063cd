"""Inputs of a graph that are not a step's own: the entry of a step without tokens, and rows that pad a decode."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from agent.backends.base import OpTable
from agent.step_inputs import Int32Array, StepInputs
from agent.weights.storage import STORAGE_DTYPES, Array
from llm_serving.ipc.shm import PADDING_SLOT


def no_entry(ops: OpTable, tokens: int) -> Array:
    """Zeros of what a stage's graph begins with."""
    if ops.part is None or ops.is_first_stage:
        return np.zeros(tokens, np.int32)
    return np.zeros((tokens, ops.part.whole.hidden_size), STORAGE_DTYPES[ops.dtype])


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
