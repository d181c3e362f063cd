"""Tests the list of the blocks that a step gathers from the cache, and block tables whose entries are places in this
list.
"""

from __future__ import annotations

import numpy as np

from agent.step_graph.step_blocks import StepBlocks
from agent.step_inputs import Int32Array


def int32(*rows: object) -> Int32Array:
    return np.array(rows, np.int32)


def test_each_block_is_in_the_list_once_and_tables_refer_to_it() -> None:
    tables = int32([9, 4, 2], [9, 7, 5], [3, 1, 1])
    blocks, places = StepBlocks(10, 16).of(tables, int32(48, 17, 1))
    assert blocks.tolist() == [2, 3, 4, 7, 9], "the second sequence has two blocks, the third has one"
    assert blocks[places[0]].tolist() == [9, 4, 2]
    assert blocks[places[1, :2]].tolist() == [9, 7]
    assert (places[1, 2], places[2, 1:].tolist()) == (0, [0, 0])
    assert (blocks.dtype, places.dtype) == (np.int32, np.int32)


def test_a_second_step_does_not_contain_blocks_of_the_first() -> None:
    listed = StepBlocks(10, 4)
    listed.of(int32([1, 2, 3]), int32(12))
    blocks, places = listed.of(int32([8, 5]), int32(5))
    assert (blocks.tolist(), places.tolist()) == ([5, 8], [[1, 0]])


def test_random_steps_read_the_blocks_of_their_tables() -> None:
    rng, listed = np.random.default_rng(0), StepBlocks(64, 8)
    for _ in range(200):
        seqs, width = rng.integers(1, 9, 2).tolist()
        tables = rng.integers(0, 64, (seqs, width)).astype(np.int32)
        lens = rng.integers(1, 8 * width + 1, seqs).astype(np.int32)
        blocks, places = listed.of(tables, lens)
        assert blocks.size == len(set(blocks.tolist())) <= listed.most
        for table, place, length in zip(tables, places, lens.tolist(), strict=True):
            used = -(-length // 8)
            assert blocks[place[:used]].tolist() == table[:used].tolist()
