"""Orders the sequences of a step by adapter slot, for graphs that multiply the rows of each adapter together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from agent.run_ahead.inserted import InsertedIds
from agent.step_inputs import Int32Array, StepInputs
from agent.weights.storage import Array
from llm_serving.ipc.shm import NO_ADAPTER


class AdapterOrder:
    """Orders sequences by adapter slot. Sequences without an adapter come last, as the group with the highest number.

    Only the tokens and sequences in the graph's inputs have this order. The input ``last_tokens`` still lists the
    sequences in the order of the step. So the logits of the graph are also in the order of the step.
    """

    def __init__(self, num_groups: int, *, orders_entry: bool) -> None:
        """``num_groups`` is the number of adapter slots + 1.

        ``orders_entry`` is False in later stages of a pipeline. The first input of their graphs comes from the first
        stage, which has already ordered it.
        """
        self._num_groups = num_groups
        self._orders_entry = orders_entry
        self._tokens: Int32Array | None = None
        """[tokens]: the tokens of the last step in the order of adapters, each as its index in the step. None if both
        orders are the same.
        """

    def sorted(
        self, inputs: StepInputs, entry: Array, inserted: InsertedIds | None
    ) -> tuple[StepInputs, Array, InsertedIds | None]:
        """Returns the arguments with the sequences of the step in the order of their adapter slots. ``StepGraph.run``
        describes ``entry`` and ``inserted``."""
        groups = self._groups(inputs.adapters[inputs.last_tokens])
        if (groups[1:] >= groups[:-1]).all():
            self._tokens = None
            return inputs, entry, inserted
        order = np.argsort(groups, kind="stable")
        lens = inputs.query_lens[order]
        ends = np.cumsum(lens, dtype=np.int32)
        first_tokens = (inputs.last_tokens - inputs.query_lens + 1)[order]
        starts: Int32Array = np.repeat(first_tokens - (ends - lens), lens)
        tokens: Int32Array = np.add(starts, np.arange(inputs.positions.size, dtype=np.int32))
        self._tokens = tokens
        last_tokens = np.empty_like(ends)
        last_tokens[order] = ends - 1
        rotary = inputs.rotary_positions
        ordered = replace(
            inputs,
            token_ids=inputs.token_ids[tokens],
            positions=inputs.positions[tokens],
            rotary_positions=rotary[tokens] if rotary.size else rotary,
            slot_mapping=inputs.slot_mapping[tokens],
            adapters=inputs.adapters[tokens],
            block_tables=inputs.block_tables[order],
            context_lens=inputs.context_lens[order],
            query_lens=lens,
            rows=inputs.rows[order],
            last_tokens=last_tokens,
            sampled_tokens=np.where(inputs.sampled_tokens < 0, inputs.sampled_tokens, last_tokens),
        )
        if inserted is not None:
            inserted = replace(inserted, places=inserted.places[tokens], mask=inserted.mask[tokens])
        return ordered, entry[tokens] if self._orders_entry else entry, inserted

    def restored(self, rows: Array) -> Array:
        """Undoes the order for an array [tokens, ...] of the last step: returns its rows in the order of the step."""
        if self._tokens is None:
            return rows
        restored = np.empty_like(rows)
        restored[self._tokens] = rows
        return restored

    def rows(self, adapters: Int32Array) -> npt.NDArray[np.int64]:
        """Returns the number of tokens of each group, int64 [groups]. ``adapters`` has the adapter slot of each token.
        """
        return np.bincount(self._groups(adapters), minlength=self._num_groups).astype(np.int64)

    def _groups(self, adapters: Int32Array) -> Int32Array:
        """Returns the group of each adapter slot in ``adapters``. The group of NO_ADAPTER is the last group. The group
        of any other slot has the number of the slot."""
        return np.where(adapters == NO_ADAPTER, np.int32(self._num_groups - 1), adapters)
