"""Detects conflicting uses of cache blocks by steps in flight, whatever the order in which they run.

A real device hides most of these mistakes, because it runs the steps in one order. The watch compares each new step
with all steps in flight, in every order that an agent may choose.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from llm_serving.scheduler.output import BlockMove, MoveKind, ScheduledStep, StepKind


@dataclass
class _Touches:
    """The blocks that a step reads and writes, each with the batch rows of the sequences that use it."""

    kind: StepKind
    writes: dict[tuple[int, int], int] = field(default_factory=dict)
    """The batch row of every token that the step writes, by its (block, offset)."""
    reads: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """The blocks with tokens of earlier steps that the step reads. For each block: (batch row, number of these tokens).
    """
    copied: dict[int, int] = field(default_factory=dict)
    """The blocks that a move reads, and how many of their tokens the destination needs."""
    moved_to: dict[int, int | None] = field(default_factory=dict)
    """The blocks that a move writes, each with the batch row that needs it."""
    host_reads: set[int] = field(default_factory=set)
    host_writes: set[int] = field(default_factory=set)
    state_reads: dict[int, int] = field(default_factory=dict)
    """The snapshots of states that sequences resume from, each with a batch row that reads it."""
    state_writes: dict[int, int] = field(default_factory=dict)
    """The snapshots of states that the step saves, each with its batch row."""

    @property
    def written_blocks(self) -> dict[int, int]:
        return {block: row for (block, _), row in self.writes.items()}

    @property
    def touched_blocks(self) -> set[int]:
        return {*self.written_blocks, *self.reads, *self.copied, *self.moved_to}


class BlockWatch:
    """Compares each step with all steps in flight. Raises AssertionError for every conflict."""

    def __init__(self, block_size: int, num_blocks: int, num_host_blocks: int, num_handed_blocks: int = 0) -> None:
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._num_host_blocks = num_host_blocks
        self._num_handed_blocks = num_handed_blocks
        self._unanswered: dict[int, _Touches] = {}

    def clear(self) -> None:
        self._unanswered.clear()

    def answered(self, seq: int) -> None:
        """Removes step ``seq`` from the steps in flight. The caller has processed its result."""
        self._unanswered.pop(seq, None)

    def submit(self, step: ScheduledStep) -> None:
        """Checks a step when it is sent to the agent."""
        touches = self._touches(step)
        _check_alone(touches)
        for seq, earlier in self._unanswered.items():
            _check_tokens(touches, earlier, f"step {step.seq}, step {seq} being unanswered:")
            _check_moves(touches, earlier, f"step {step.seq}, step {seq} being unanswered:")
            _check_states(touches, earlier, f"step {step.seq}, step {seq} being unanswered:")
        self._unanswered[step.seq] = touches

    def _touches(self, step: ScheduledStep) -> _Touches:
        size, touches = self._block_size, _Touches(step.kind)
        for row, start, query_len, table in zip(
            step.rows, step.starts, step.query_lens, step.block_tables, strict=True
        ):
            for position in range(start, start + query_len):
                where = (table[position // size], position % size)
                assert where not in touches.writes, f"two tokens of step {step.seq} are written to {where}"
                touches.writes[where] = row
            for place in range(-(-start // size)):
                touches.reads.setdefault(table[place], []).append((row, min(start - place * size, size)))
        for move in step.moves:
            self._add_move(touches, move)
        for index, after, snapshot in step.state_moves:
            assert not (after and snapshot in touches.state_writes), f"snapshot {snapshot} is written twice"
            (touches.state_writes if after else touches.state_reads)[snapshot] = step.rows[index]
        assert not touches.state_reads.keys() & touches.state_writes.keys(), "a step overwrites a state that it reads"
        return touches

    def _add_move(self, touches: _Touches, move: BlockMove) -> None:
        handed = move.kind in (MoveKind.HAND_OUT, MoveKind.HAND_IN)
        comes = move.kind in (MoveKind.SWAP_IN, MoveKind.HAND_IN)
        goes = move.kind in (MoveKind.SWAP_OUT, MoveKind.HAND_OUT)
        self._check_block(move, move.source, on_host=comes, handed=handed)
        self._check_block(move, move.destination, on_host=goes, handed=handed)
        readers = touches.reads.get(move.destination, [])
        if comes:
            touches.host_reads.add(_host_number(move.source, handed=handed))
        elif move.source not in touches.moved_to:
            used = readers[0][1] if move.kind is MoveKind.COPY and readers else self._block_size
            touches.copied[move.source] = max(used, touches.copied.get(move.source, 0))
        if goes:
            host = _host_number(move.destination, handed=handed)
            assert host not in touches.host_writes, f"{move} writes a host block for the second time"
            touches.host_writes.add(host)
        else:
            assert move.destination not in touches.moved_to, f"{move} writes a block for the second time"
            touches.moved_to[move.destination] = readers[0][0] if readers else None

    def _check_block(self, move: BlockMove, block: int, *, on_host: bool, handed: bool) -> None:
        """Checks that the index ``block`` is valid: in a pool in host memory if ``on_host`` is true, and otherwise in
        the cache.

        The null block 0 of the cache is not valid.
        """
        first, limit = (0, self._num_host_blocks) if on_host else (1, self._num_blocks)
        if on_host and handed:
            limit = self._num_handed_blocks
        assert first <= block < limit, f"{move}: block {block} is not in {first} .. {limit - 1}"


def _host_number(block: int, *, handed: bool) -> int:
    """Returns a number that is unique among the blocks of both pools in host memory."""
    return -1 - block if handed else block


def _check_alone(touches: _Touches) -> None:
    """Checks one step without regard to other steps.

    Only one sequence may use a block that is written, and no token may be written to a block that the step copies.
    """
    for block, row in touches.written_blocks.items():
        rows = {reader for reader, _ in touches.reads.get(block, [])} - {row}
        assert not rows, f"row {row} writes block {block}, which rows {rows} read in the same step"
    for block in touches.moved_to:
        assert len(touches.reads.get(block, [])) <= 1, f"a move writes block {block}, which several rows have"
    for block, used in touches.copied.items():
        assert not any((block, offset) in touches.writes for offset in range(used)), (
            f"a move reads tokens of block {block} that its own step computes afterwards"
        )


def _check_tokens(new: _Touches, earlier: _Touches, when: str) -> None:
    """Checks the tokens of a new step against an earlier step in flight.

    A batch row may read blocks that its own earlier steps write. It may also read blocks that earlier MOVE steps write,
    because an agent runs MOVE steps before all other steps.
    """
    written, read_by = earlier.written_blocks, earlier.reads
    for block, row in new.written_blocks.items():
        assert written.get(block, row) == row, f"{when} row {row} writes block {block} of row {written[block]}"
        assert all(reader == row for reader, _ in read_by.get(block, [])), (
            f"{when} row {row} writes block {block}, which another row reads"
        )
    for (block, offset), row in new.writes.items():
        assert offset >= earlier.copied.get(block, 0), f"{when} row {row} writes to block {block}, which a move reads"
    for (block, offset), row in earlier.writes.items():
        for reader, used in new.reads.get(block, []):
            assert reader == row or offset >= used, f"{when} row {reader} reads block {block}, not written yet"
    if earlier.kind is not StepKind.MOVE:
        for block, owner in earlier.moved_to.items():
            rows = {row for row, _ in new.reads.get(block, [])}
            rows |= {new.written_blocks[block]} if block in new.written_blocks else set()
            assert rows <= {owner}, f"{when} rows {rows} have block {block}, which a move for row {owner} writes"


def _check_states(new: _Touches, earlier: _Touches, when: str) -> None:
    """Checks the snapshots of a new step against an earlier step in flight. Only the batch row that saves a snapshot
    may save it again.
    """
    for snapshot, row in new.state_writes.items():
        assert earlier.state_writes.get(snapshot, row) == row, f"{when} snapshot {snapshot} is written by two rows"
        assert snapshot not in earlier.state_reads, f"{when} snapshot {snapshot} is written, which it reads"
    for snapshot in new.state_reads:
        assert snapshot not in earlier.state_writes, f"{when} snapshot {snapshot} is read, not written yet"


def _check_moves(new: _Touches, earlier: _Touches, when: str) -> None:
    """Checks the moves of a new step against an earlier step in flight. The moves may run before or after that step."""
    for block, used in new.copied.items():
        assert block not in earlier.moved_to, f"{when} a move reads block {block}, which a move writes"
        assert not any((block, offset) in earlier.writes for offset in range(used)), (
            f"{when} a move reads block {block}, which has tokens that are not written yet"
        )
    for block in new.moved_to:
        assert block not in earlier.touched_blocks, f"{when} a move writes block {block}, which it touches"
    assert not new.host_reads & earlier.host_writes, f"{when} host blocks are read that it writes"
    assert not new.host_writes & (earlier.host_writes | earlier.host_reads), f"{when} host blocks are written it uses"
