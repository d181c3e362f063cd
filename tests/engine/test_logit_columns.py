"""Tests that columns of logits give back the tokens that were added."""

from __future__ import annotations

import math

import pytest

from llm_serving.engine.logit_columns import LogitColumns
from llm_serving.engine.outputs import merge_outputs
from llm_serving.request import RequestOutput, TokenLogits

ENTRIES = [
    TokenLogits(7, -0.1, 2.3, ((7, 0.1 + 0.2), (2**31 - 1, -math.inf))),
    TokenLogits(0, -1e-300, 1e300),
    TokenLogits(5, -math.inf, 0.0, ((-1, 1 / 3),)),
]


def test_the_tokens_come_back_exactly() -> None:
    columns = LogitColumns(ENTRIES)
    columns.extend(LogitColumns(ENTRIES[1:]))
    columns.extend(LogitColumns())
    columns.extend(ENTRIES[:1])
    expected = [*ENTRIES, *ENTRIES[1:], ENTRIES[0]]
    assert list(columns) == expected == [columns[index] for index in range(6)]
    assert (len(columns), columns[-1], columns[1:3]) == (6, ENTRIES[0], expected[1:3])
    assert list(columns.token_ids) == [entry.token_id for entry in expected]
    assert list(columns.logprobs) == [entry.logprob for entry in expected]
    with pytest.raises(IndexError):
        columns[6]


def test_merged_pieces_leave_the_old_pieces_unchanged() -> None:
    """A merged piece has all logits, and merging it again with a later piece does not change it."""
    pieces = [RequestOutput("a", "x", (entry.token_id,), (entry,), 1, 1) for entry in ENTRIES]
    first = merge_outputs(pieces[:2])
    assert list(merge_outputs([first, pieces[2]]).logits) == ENTRIES
    assert list(first.logits) == ENTRIES[:2]
    assert merge_outputs([RequestOutput("a", "x", (1,), (), 1, 1)] * 2).logits == ()
