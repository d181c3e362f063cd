"""Gives each token of a step its own block table and context, for graphs whose attention needs them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from agent.step_inputs import StepInputs


def by_token(inputs: StepInputs) -> StepInputs:
    """Returns the inputs of a graph whose attention takes a block table for each token (``OpTable.attends_by_token``).

    ``block_tables`` is [tokens, blocks], and ``context_lens`` and ``query_lens`` are [tokens]. The context of a token
    ends at the token itself. All other arrays stay as they are.
    """
    tokens = inputs.positions.size
    if inputs.query_lens.size == tokens:
        return inputs
    return replace(
        inputs,
        block_tables=np.repeat(inputs.block_tables, inputs.query_lens, axis=0),
        context_lens=inputs.positions + 1,
        query_lens=np.ones(tokens, np.int32),
    )
