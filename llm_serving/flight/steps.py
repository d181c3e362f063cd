"""Decodes the records of scheduled steps in a flight recording. A record has only the differences from earlier steps.

    [seq, kind, batch?, starts?, sample_positions?, blocks, moves, restarts?, histories, reason]

A field that is marked with ``?`` may be None. The *base* of a step is the latest earlier step of the same kind.

``batch`` is None if the step has the same requests, batch rows, query lengths and sampling flags as its base. Otherwise
it is ``[numbers, rows, query_lens?, do_sample?]``. In this list, ``query_lens`` is None if all query lengths are 1, and
``do_sample`` is None if every sequence samples. ``starts`` is None if each sequence continues where the base ended.
``sample_positions`` is None if each sequence samples the position after its position in the base. ``blocks`` has
``[index, place, ids]`` for each block table that has changed since its last record. ``index`` is the sequence, and
``ids`` are the table's entries from index ``place`` on. ``moves`` has ``[kind, source, destination]`` for each copy of
a block. ``restarts`` lists the indices of the sequences that are new on their batch row. ``histories`` lists the
indices of the sequences whose known tokens the step sends to the agent. ``StepWriter`` and ``StepReader`` remember the
same earlier steps, so the reader restores the whole step.

A run of consecutive steps of one batch is a single record: ``[seq of the first step, kind, growths, reason]``. A growth
is ``[index of the step in the run, index, place, ids]`` and replaces an entry of the step's ``blocks``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import add
from typing import Any

from llm_serving.ipc.shm import MoveKind
from llm_serving.scheduler.output import BlockMove, StepKind

_KINDS = list(StepKind)
KIND_CODES = {kind: code for code, kind in enumerate(_KINDS)}
"""Code of each kind of step in records, from 0."""

Growth = tuple[int, int, int, list[int]]
"""New blocks of one block table in a run of steps: ``(step, index, place, ids)``. ``step`` is the index of the step in
the run, and ``index`` the sequence of the block table. ``place`` is the index of the first new block in the table, and
``ids`` are the new blocks."""


@dataclass(slots=True)
class RecordedStep:
    """A scheduled step from a recording.

    It has the columns of ``ScheduledStep``, with recorded numbers instead of requests.
    """

    seq: int
    kind: StepKind
    numbers: list[int]
    rows: list[int]
    query_lens: list[int]
    starts: list[int]
    do_sample: list[bool]
    sample_positions: list[int]
    blocks: list[tuple[int, int, list[int]]]
    """For each changed block table: (index of the sequence, index of the first new block in the table, new blocks)."""
    moves: list[BlockMove] = field(default_factory=list)
    restarts: list[int] = field(default_factory=list)
    histories: list[int] = field(default_factory=list)
    reason: str = ""

    @property
    def num_seqs(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def num_context_tokens(self) -> int:
        """Total context length of all sequences after the step, in tokens."""
        return sum(self.starts) + sum(self.query_lens)


class StepReader:
    """Restores steps from the records of one segment. The records of other segments need another reader."""

    def __init__(self) -> None:
        self._last: dict[StepKind, RecordedStep] = {}

    def step(self, record: list[Any]) -> RecordedStep:
        """Returns the step that a record describes."""
        seq, code, batch, starts, positions, blocks, moves, restarts, histories, reason = record
        kind = _KINDS[code]
        last = self._last.get(kind)
        if batch is None:
            assert last is not None
            numbers, rows, query_lens, do_sample = last.numbers, last.rows, last.query_lens, last.do_sample
        else:
            numbers, rows, query_lens, do_sample = batch
            query_lens = [1] * len(rows) if query_lens is None else query_lens
            do_sample = [True] * len(rows) if do_sample is None else do_sample
        if starts is None:
            assert last is not None
            starts = list(map(add, last.starts, last.query_lens))
        if positions is None:
            assert last is not None
            positions = [position + 1 for position in last.sample_positions]
        step = RecordedStep(
            seq, kind, numbers, rows, query_lens, starts, do_sample, positions,
            [(index, place, ids) for index, place, ids in blocks],
            [BlockMove(MoveKind(code), source, destination) for code, source, destination in moves],
            restarts or [], histories, reason,
        )  # fmt: skip
        self._last[kind] = step
        return step

    def num_seqs_of(self, run: list[Any]) -> int:
        """Returns the number of sequences in each step of a run."""
        return self._last[_KINDS[run[1]]].num_seqs

    def run(self, record: list[Any], count: int) -> list[RecordedStep]:
        """Returns the ``count`` steps of a run, which is one record for consecutive steps of the same batch."""
        first, code, growths, reason = record
        blocks: list[list[list[Any]]] = [[] for _ in range(count)]
        for place, *growth in growths:
            blocks[place].append(growth)
        return [
            self.step([first + place, code, None, None, None, grown, [], None, [], reason])
            for place, grown in enumerate(blocks)
        ]
