"""A scheduled step as a record, and what is read of it: what has changed since the steps before it.

    [seq, kind, batch?, starts?, sample_positions?, blocks, moves, restarts?, histories, reason]

``batch`` is None when requests, rows, query lengths and sampling are those of the last step of the kind, else
``[numbers, rows, query_lens?, do_sample?]`` (None: all ones, all true). ``starts`` is None when each sequence goes on
where that step left it, ``sample_positions`` when each samples the next. ``blocks`` has ``[index, place, ids]`` for
each block table that is not what it was in the sequence's last step: its entries from ``place`` on. ``restarts`` and
``histories`` are indices. Writer (``step_writer``) and reader
keep the same memory, so the reader knows the whole step again.

Steps that all go on from the latest, with nothing new but blocks, are one record: ``[seq of the first, kind, growths,
reason]``. A growth is ``[place of the step in the run, index, place, ids]``, for what is ``blocks`` of a step alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import add
from typing import Any

from llm_serving.scheduler.output import BlockMove, MoveKind, StepKind

__all__ = ["KIND_CODES", "Growth", "RecordedStep", "StepReader"]

_KINDS = list(StepKind)
KIND_CODES = {kind: code for code, kind in enumerate(_KINDS)}
"""What stands for the kind of a step in its record."""

Growth = tuple[int, int, int, list[int]]
"""Place of the step in its run, index, place, ids."""


@dataclass(slots=True)
class RecordedStep:
    """A step as the scheduler decided it, with its requests by number; columns as in ``ScheduledStep``."""

    seq: int
    kind: StepKind
    numbers: list[int]
    rows: list[int]
    query_lens: list[int]
    starts: list[int]
    do_sample: list[bool]
    sample_positions: list[int]
    blocks: list[tuple[int, int, list[int]]]
    """(index, place, block ids): block tables that changed, from ``place`` on."""
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
        """Tokens that the step's sequences have afterwards: what its attention reads."""
        return sum(self.starts) + sum(self.query_lens)


class StepReader:
    """Makes steps of records again. Begins anew with each segment."""

    def __init__(self) -> None:
        self._last: dict[StepKind, RecordedStep] = {}

    def step(self, record: list[Any]) -> RecordedStep:
        """The step of a record."""
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
        """Of each step of a run's record."""
        return self._last[_KINDS[run[1]]].num_seqs

    def run(self, record: list[Any], count: int) -> list[RecordedStep]:
        """The ``count`` steps of a run's record."""
        first, code, growths, reason = record
        blocks: list[list[list[Any]]] = [[] for _ in range(count)]
        for place, *growth in growths:
            blocks[place].append(growth)
        return [
            self.step([first + place, code, None, None, None, grown, [], None, [], reason])
            for place, grown in enumerate(blocks)
        ]
