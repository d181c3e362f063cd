"""A scheduled step as a record: what has changed since the steps before it.

    [seq, kind, batch?, starts?, sample_positions?, blocks, moves, restarts?, histories, reason]

``batch`` is None when requests, rows, query lengths and sampling are those of the last step of the kind, else
``[numbers, rows, query_lens?, do_sample?]`` (None: all ones, all true). ``starts`` is None when each sequence goes on
where that step left it, ``sample_positions`` when each samples the next. ``blocks`` has ``[index, place, ids]`` for
each block table that is not what it was in the sequence's last step: its entries from ``place`` on. ``restarts`` and
``histories`` are indices. Writer and reader keep the same memory, so the reader knows the whole step again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import add, is_
from typing import Any

from llm_serving.request import Request
from llm_serving.scheduler.output import BlockMove, MoveKind, ScheduledStep, StepKind

__all__ = ["RecordedStep", "StepReader", "StepWriter"]

_KINDS = list(StepKind)
_KIND_CODES = {kind: code for code, kind in enumerate(_KINDS)}


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


@dataclass(slots=True)
class _Last:
    """The last step of a kind."""

    requests: list[Request]
    rows: list[int]
    query_lens: list[int]
    do_sample: list[bool]
    block_tables: list[list[int]]
    starts: list[int]
    sample_positions: list[int]
    table_lens: list[int]


class StepWriter:
    """Makes records of steps. Begins anew with each segment."""

    def __init__(self) -> None:
        self._last: dict[StepKind, _Last] = {}
        self._tables: dict[int, tuple[list[int], int]] = {}

    def forget(self, number: int) -> None:
        """A request has ended."""
        self._tables.pop(number, None)

    def renumber(self) -> None:
        """Requests may have other numbers from now on: what comes is told whole."""
        self._last.clear()

    def record(self, step: ScheduledStep, number_of: Callable[[Request], int]) -> list[object]:
        """The step as a record."""
        last = self._last.get(step.kind)
        same = (
            last is not None
            and step.requests == last.requests
            and step.rows == last.rows
            and step.query_lens == last.query_lens
            and step.do_sample == last.do_sample
        )
        starts: list[int] | None = step.starts
        positions: list[int] | None = step.sample_positions
        table_lens = list(map(len, step.block_tables))
        if same and last is not None:
            if starts == list(map(add, last.starts, last.query_lens)):
                starts = None
            if positions == [position + 1 for position in last.sample_positions]:
                positions = None
            blocks = self._grown_blocks(step, last, table_lens, number_of)
        else:
            blocks = self._new_blocks(step, range(step.num_seqs), number_of)
        self._last[step.kind] = _Last(
            step.requests,
            step.rows,
            step.query_lens,
            step.do_sample,
            step.block_tables,
            step.starts,
            step.sample_positions,
            table_lens,
        )
        return [
            step.seq,
            _KIND_CODES[step.kind],
            None if same else _batch(step, number_of),
            starts,
            positions,
            blocks,
            [(move.kind.value, move.source, move.destination) for move in step.moves],
            [index for index, restarts in enumerate(step.restarts) if restarts] if any(step.restarts) else None,
            [history.index for history in step.histories],
            step.reason.name,
        ]

    def _grown_blocks(
        self, step: ScheduledStep, last: _Last, table_lens: list[int], number_of: Callable[[Request], int]
    ) -> list[object]:
        """Of a step with the sequences of the last: looked at only where a table is longer, or another."""
        if not all(map(is_, step.block_tables, last.block_tables)):
            return self._new_blocks(step, range(step.num_seqs), number_of)
        if table_lens == last.table_lens:
            return []
        changed = [index for index, length in enumerate(table_lens) if length != last.table_lens[index]]
        return self._new_blocks(step, changed, number_of)

    def _new_blocks(
        self, step: ScheduledStep, indices: range | list[int], number_of: Callable[[Request], int]
    ) -> list[object]:
        tables, blocks = self._tables, []
        for index in indices:
            table, number = step.block_tables[index], number_of(step.requests[index])
            known = tables.get(number)
            place = known[1] if known is not None and known[0] is table else 0
            if len(table) > place or known is None or known[0] is not table:
                blocks.append((index, place, table[place:]))
                tables[number] = (table, len(table))
        return list(blocks)


def _batch(step: ScheduledStep, number_of: Callable[[Request], int]) -> list[object]:
    return [
        [number_of(request) for request in step.requests],
        step.rows,
        None if step.query_lens.count(1) == len(step.query_lens) else step.query_lens,
        None if all(step.do_sample) else step.do_sample,
    ]


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
