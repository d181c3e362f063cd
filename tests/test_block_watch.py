"""Tests that the block watch detects each misuse of blocks, and accepts correct steps in any order."""

from __future__ import annotations

import pytest

from llm_serving.scheduler.output import BlockMove, MoveKind, ScheduledStep, StepKind
from support.block_watch import BlockWatch

COPY, OUT, IN = MoveKind.COPY, MoveKind.SWAP_OUT, MoveKind.SWAP_IN

Part = tuple[int, int, int, list[int]]
"""Row, start, tokens and block table of a sequence's part."""


def make(seq: int, *parts: Part, moves: list[BlockMove] | None = None) -> ScheduledStep:
    """Makes a prefill step of these parts, or a move step if there are no parts."""
    rows, starts, query_lens, tables = ([part[place] for part in parts] for place in range(4))
    kind = StepKind.PREFILL if parts else StepKind.MOVE
    tokens = [5] * sum(query_lens)
    return ScheduledStep(
        seq,
        kind,
        rows=rows,
        starts=starts,
        query_lens=query_lens,
        block_tables=tables,
        token_ids=tokens,
        moves=moves or [],
    )


def watch() -> BlockWatch:
    return BlockWatch(block_size=4, num_blocks=10, num_host_blocks=3)


RIGHT = {
    "a row goes on": [make(0, (0, 0, 6, [1, 2])), make(1, (0, 6, 1, [1, 2])), make(2, (0, 7, 1, [1, 2]))],
    "rows apart": [make(0, (0, 0, 6, [1, 2])), make(1, (1, 0, 6, [3, 4]))],
    "a shared prefix is read by two": [make(0, (0, 4, 2, [1, 2]), (1, 4, 2, [1, 3])), make(1, (2, 4, 1, [1, 4]))],
    "a tail is copied while its owner goes on behind it": [
        make(0, (0, 6, 1, [1, 2])),
        make(1, (1, 6, 2, [1, 3]), moves=[BlockMove(COPY, 2, 3)]),
        make(2, (0, 7, 1, [1, 2]), (1, 8, 1, [1, 3, 4])),
    ],
    "a swapped-in row goes on at once": [
        make(0, moves=[BlockMove(IN, 0, 1), BlockMove(IN, 2, 2)]),
        make(1, (0, 6, 1, [1, 2])),
    ],
    "a block goes out and another takes its place, in one step": [
        make(0, moves=[BlockMove(OUT, 1, 0), BlockMove(IN, 1, 1)])
    ],
}


@pytest.mark.parametrize("steps", RIGHT.values(), ids=RIGHT.keys())
def test_steps_that_are_right_in_any_order_pass(steps: list[ScheduledStep]) -> None:
    blocks = watch()
    for step in steps:
        blocks.submit(step)


WRONG = {
    "a block of two sequences is written": (
        [make(0, (0, 6, 1, [1, 2]), (1, 6, 1, [1, 2]))],
        "two tokens of step 0 are written to",
    ),
    "a shared block is written": (
        [make(0, (0, 6, 1, [1, 2]), (1, 7, 1, [1, 2]))],
        "writes block 2, which rows",
    ),
    "a block another row reads is written": (
        [make(0, (0, 4, 1, [1, 2])), make(1, (1, 0, 1, [1]))],
        "row 1 writes block 1, which another row reads",
    ),
    "a block another row writes is written": (
        [make(0, (0, 0, 1, [1])), make(1, (1, 0, 1, [1]))],
        "row 1 writes block 1 of row 0",
    ),
    "a prefix is read before it is written": (
        [make(0, (0, 0, 4, [1])), make(1, (1, 4, 1, [1, 2]))],
        "row 1 reads block 1, not written yet",
    ),
    "a tail is copied before it is written": (
        [make(0, (0, 4, 2, [1, 2])), make(1, (1, 6, 1, [1, 3]), moves=[BlockMove(COPY, 2, 3)])],
        "a move reads block 2, which has tokens that are not written yet",
    ),
    "a tail is copied that its own step computes": (
        [make(0, (0, 4, 2, [1, 2]), (1, 6, 1, [1, 3]), moves=[BlockMove(COPY, 2, 3)])],
        "a move reads tokens of block 2 that its own step computes afterwards",
    ),
    "a block goes out before it is written": (
        [make(0, (0, 0, 4, [1])), make(1, moves=[BlockMove(OUT, 1, 0)])],
        "a move reads block 1, which has tokens that are not written yet",
    ),
    "a block comes in where a step reads": (
        [make(0, (0, 4, 1, [1, 2])), make(1, moves=[BlockMove(IN, 0, 1)])],
        "a move writes block 1, which it touches",
    ),
    "a block that goes out is written too early": (
        [make(0, moves=[BlockMove(OUT, 1, 0)]), make(1, (0, 0, 1, [1]))],
        "row 0 writes to block 1, which a move reads",
    ),
    "a copied block is read by another row too early": (
        [make(0, (1, 8, 1, [1, 3, 4]), moves=[BlockMove(COPY, 2, 3)]), make(1, (2, 8, 1, [1, 3, 5]))],
        "rows {2} have block 3, which a move for row 1 writes",
    ),
    "a host block is read before it is written": (
        [make(0, moves=[BlockMove(OUT, 1, 0)]), make(1, moves=[BlockMove(IN, 0, 2)])],
        "host blocks are read that it writes",
    ),
    "a host block is written before it is read": (
        [make(0, moves=[BlockMove(IN, 0, 1)]), make(1, moves=[BlockMove(OUT, 2, 0)])],
        "host blocks are written it uses",
    ),
    "a block is written twice": (
        [make(0, moves=[BlockMove(IN, 0, 1), BlockMove(IN, 1, 1)])],
        "writes a block for the second time",
    ),
    "the null block goes out": ([make(0, moves=[BlockMove(OUT, 0, 0)])], "block 0 is not in 1 .. 9"),
    "the null block is written": ([make(0, moves=[BlockMove(COPY, 1, 0)])], "block 0 is not in 1 .. 9"),
    "there is no such block": ([make(0, moves=[BlockMove(COPY, 1, 10)])], "block 10 is not in 1 .. 9"),
    "there is no such host block": ([make(0, moves=[BlockMove(OUT, 1, 3)])], "block 3 is not in 0 .. 2"),
}


@pytest.mark.parametrize(("steps", "error"), WRONG.values(), ids=WRONG.keys())
def test_a_conflict_is_found(steps: list[ScheduledStep], error: str) -> None:
    blocks = watch()
    for step in steps[:-1]:
        blocks.submit(step)
    with pytest.raises(AssertionError) as caught:
        blocks.submit(steps[-1])
    assert error in str(caught.value)


@pytest.mark.parametrize("name", [name for name, (steps, _) in WRONG.items() if len(steps) == 2])
def test_a_step_is_right_once_the_earlier_step_completed(name: str) -> None:
    blocks, (earlier, later) = watch(), WRONG[name][0]
    blocks.submit(earlier)
    blocks.answered(earlier.seq)
    blocks.submit(later)
