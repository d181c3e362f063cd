"""Tests which keys and values of the draft model are up to date: after new tokens, wrong drafts, reused and moved
blocks.
"""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from agent.drafting.drafter import Drafter
from agent.drafting.rows import DraftRows
from agent.warm_up import make_moves
from llm_serving.ipc.shm import MOVE_WIDTH, MoveKind
from support.small_configs import TINY_LLAMA, small_config

SIZE = 4
TABLE = np.array([3, 5, 7], np.int32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def new_rows() -> DraftRows:
    return DraftRows(num_rows=2, max_tokens=12, block_size=SIZE, num_blocks=10, num_host_blocks=4)


def put(rows: DraftRows, row: int, start: int, *tokens: int, table: np.ndarray = TABLE) -> None:
    """Stores tokens that a step has computed, as the drafter does."""
    positions = np.arange(start, start + len(tokens), dtype=np.int32)
    indices = np.full(len(tokens), row, np.int32)
    rows.put(indices, positions, ints(*tokens))
    rows.note_blocks(indices, positions, table[positions // SIZE])


def started(length: int) -> DraftRows:
    """Returns rows in which row 0 has ``length`` tokens that the draft model has computed."""
    rows = new_rows()
    rows.begin(0, 0, TABLE)
    put(rows, 0, 0, *range(20, 20 + length))
    assert rows.num_computed[0] == 0
    rows.computed(0, 0, length, TABLE)
    return rows


def test_a_right_draft_stays_computed_and_a_wrong_one_does_not() -> None:
    rows = started(6)
    rows.tokens[0, 6:8] = 41, 42
    rows.computed(0, 6, 8, TABLE)
    put(rows, 0, 6, 41)
    assert rows.num_computed[0] == 8
    put(rows, 0, 7, 43)
    assert rows.num_computed[0] == 7


def test_a_sequence_behind_a_computed_prefix_continues_after_it() -> None:
    for length in (4, 6, 8):
        rows = started(8)
        rows.begin(1, length, TABLE)
        assert rows.num_computed[1] == length


def test_a_prefix_that_was_not_computed_gives_no_drafts() -> None:
    rows = started(6)
    rows.begin(1, 7, TABLE)
    assert rows.num_computed[1] < 0
    put(rows, 1, 7, 50, table=ints(3, 6))
    assert rows.num_computed[1] < 0
    rows.begin(1, 6, TABLE)
    assert rows.num_computed[1] == 6


def test_a_prefix_whose_tokens_the_server_has_sent_is_computed_later() -> None:
    rows = started(6)
    rows.begin(1, 6, TABLE, ints(*range(20, 29)))
    assert rows.num_computed[1] == 6
    rows.begin(1, 7, TABLE, ints(*range(20, 29)))
    assert rows.num_computed[1] == 4, "the first block is complete"
    assert rows.tokens[1, :8].tolist() == [*range(20, 27), 0]
    put(rows, 1, 7, 27)
    assert rows.num_computed[1] == 4


def test_blocks_that_have_arrived_are_as_computed_as_their_sender_says() -> None:
    rows = started(8)
    rows.arrive(ints(5), 0)
    rows.begin(1, 8, TABLE)
    assert rows.num_computed[1] < 0
    rows.arrive(ints(3, 5), SIZE)
    rows.begin(1, 7, TABLE)
    assert rows.num_computed[1] == 7


def test_a_block_that_another_sequence_has_overwritten_is_not_computed() -> None:
    rows = started(8)
    rows.begin(1, 0, TABLE)
    put(rows, 1, 0, 1, 2, table=ints(5))
    rows.begin(0, 8, TABLE)
    assert rows.num_computed[0] < 0
    rows.begin(0, 4, TABLE)
    assert rows.num_computed[0] == 4


def test_copied_and_swapped_blocks_are_as_computed_as_their_sources() -> None:
    rows = started(6)
    rows.move(np.array([[MoveKind.COPY, 5, 8], [MoveKind.SWAP_OUT, 3, 1]], np.int32))
    rows.move(np.array([[MoveKind.SWAP_IN, 1, 9]], np.int32))
    rows.begin(1, 6, ints(9, 8))
    assert rows.num_computed[1] == 6
    rows.begin(1, 7, ints(9, 8))
    assert rows.num_computed[1] < 0
    rows.move(np.array([[MoveKind.SWAP_IN, 0, 9]], np.int32))
    rows.begin(1, 6, ints(9, 8))
    assert rows.num_computed[1] < 0
    rows.reset()
    rows.begin(1, 6, TABLE)
    assert rows.num_computed[1] < 0


@pytest.mark.parametrize(("num_swapped", "num_of_tiers"), [(0, 6), (5, 0), (5, 6)])
def test_the_draft_model_follows_copies_to_every_host_block(
    num_swapped: int, num_of_tiers: int, tmp_path: Path
) -> None:
    """The first step of an agent copies blocks to all host blocks, those of swapped sequences and those of KV tiers."""
    config = small_config(tmp_path, [
        *("speculative_config.method=draft", f"speculative_config.model={TINY_LLAMA}"),
        *(f"pa_config.num_host_blocks={num_swapped}", f"kv_tier_config.host_blocks={num_of_tiers}"),
        "scheduler_config.preemption=swap",
    ])  # fmt: skip
    moves = make_moves(config).moves.reshape(-1, MOVE_WIDTH)
    swapped = moves[moves[:, 0] == MoveKind.SWAP_OUT, 2]
    assert set(swapped.tolist()) == set(range(config.num_host_blocks + num_of_tiers))
    Drafter(config, Mock()).move_blocks(moves)
