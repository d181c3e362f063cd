"""Encodes scheduled steps for a flight recording, as differences from earlier steps.

``steps.py`` describes the format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import is_, ne, sub

from llm_serving.flight.steps import KIND_CODES, Growth
from llm_serving.request import Request
from llm_serving.scheduler.output import ScheduledStep, StepKind, StepReason


@dataclass(slots=True)
class _Last:
    """The latest recorded step of a kind (prefill, decode, ...).

    The next step of the kind is recorded as differences from it.
    """

    kind: StepKind
    requests: list[Request]
    numbers: list[int]
    rows: list[int]
    query_lens: list[int]
    do_sample: list[bool]
    block_tables: list[list[int]]
    table_lens: list[int]
    starts: list[int]
    sample_positions: list[int]
    reason: StepReason
    reason_name: str
    is_plain: bool
    """True if the step computes one token of every sequence, samples the next token of every sequence, and has no
    drafts.
    """


class StepWriter:
    """Encodes the steps of one segment.

    The writer keeps references to the columns of a step, to compare them with the columns of the next step. The
    scheduler must therefore not change a column of a scheduled step, except that block tables may grow at the end.
    """

    def __init__(self) -> None:
        self._last: dict[StepKind, _Last] = {}
        self._latest: _Last | None = None
        self._has_grown = False
        self._tables: dict[int, tuple[list[int], int]] = {}
        """For each request number: the block table, and the number of its blocks that are already recorded.

        If ``_has_grown`` is True, this number is out of date for the sequences of the latest step. Their present
        numbers are then in ``_latest.table_lens``.
        """

    def forget(self, number: int) -> None:
        """Forgets a request that has ended."""
        self._tables.pop(number, None)

    def renumber(self) -> None:
        """Forgets the earlier steps, because request numbers may change.

        The next step of each kind is recorded in full.
        """
        self._note_growth()
        self._latest = None
        self._last.clear()

    def record(
        self, step: ScheduledStep, number_of: Callable[[Request], int], table_lens: list[int] | None = None
    ) -> list[object]:
        """Returns the record of a step. ``table_lens`` are the lengths of its block tables when it was scheduled."""
        if table_lens is None:
            table_lens = list(map(len, step.block_tables))
        last = self._latest
        if last is None or last.kind is not step.kind:
            self._note_growth()
            last = self._last.get(step.kind)
        if last is None or not _same_batch(step, last):
            return self._new_batch(step, number_of, table_lens)
        tables, starts, positions = step.block_tables, step.starts, step.sample_positions
        # Compares the small differences ``start - last start`` instead of large sums, because Python allocates no
        # objects for small integers.
        goes_on = list(map(sub, starts, last.starts)) == last.query_lens
        samples_next = list(map(sub, positions, last.sample_positions)).count(1) == len(positions)
        blocks: list[object] = []
        if tables is not last.block_tables or table_lens != last.table_lens:
            blocks = self._grown(tables, last, table_lens)
        last.requests, last.rows, last.query_lens = step.requests, step.rows, step.query_lens
        last.do_sample = step.do_sample
        last.block_tables, last.table_lens = tables, table_lens
        last.starts, last.sample_positions = starts, positions
        if step.reason is not last.reason:
            last.reason, last.reason_name = step.reason, step.reason.name
        self._latest = last
        return _record(step, last, None, None if goes_on else starts, None if samples_next else positions, blocks)

    def table_lens_of(self, sent: Sequence[ScheduledStep]) -> list[int] | None:
        """Checks whether the steps in flight ``sent`` are undisturbed decode steps of one batch. If so, returns the
        recorded lengths of their block tables.

        Otherwise returns None. This is the case if the last step in ``sent`` is not the latest recorded step, or if the
        steps have different sequences. It is also the case if a sequence has several tokens, does not sample, or is new
        on its batch row.
        """
        last = self._latest
        if (
            last is None
            or not last.is_plain
            or not sent
            or sent[-1].starts is not last.starts
            or True in sent[-1].restarts
            or not all(_same_batch(step, last) for step in sent)
        ):
            return None
        return last.table_lens

    def record_run(self, first_seq: int, growths: Sequence[Growth]) -> list[object]:
        """Returns the record of a run: consecutive steps that decode the batch of the latest step.

        The caller must call ``go_to`` next.
        """
        last = self._latest
        assert last is not None
        return [first_seq, KIND_CODES[last.kind], growths, last.reason_name]

    def go_to(self, latest: ScheduledStep, table_lens: list[int]) -> None:
        """Makes ``latest`` the base of the next record, which has only the differences from the base.

        ``latest`` is the last step of a run with the same batch. ``table_lens`` are the recorded lengths of its block
        tables.
        """
        last = self._latest
        assert last is not None
        last.starts, last.sample_positions = latest.starts, latest.sample_positions
        self._has_grown = self._has_grown or table_lens != last.table_lens
        last.table_lens = table_lens

    def _new_batch(
        self, step: ScheduledStep, number_of: Callable[[Request], int], table_lens: list[int]
    ) -> list[object]:
        """Returns the record of a step that does not have the same sequences as the latest step of the same kind."""
        self._note_growth()
        numbers = [number_of(request) for request in step.requests]
        last = self._latest = self._last[step.kind] = _Last(
            step.kind,
            step.requests,
            numbers,
            step.rows,
            step.query_lens,
            step.do_sample,
            step.block_tables,
            table_lens,
            step.starts,
            step.sample_positions,
            step.reason,
            step.reason.name,
            False,
        )
        ones, all_sample = step.query_lens.count(1) == len(step.query_lens), all(step.do_sample)
        last.is_plain = ones and all_sample and bool(numbers) and not step.num_drafts
        batch: list[object] = [
            numbers,
            step.rows,
            None if ones else step.query_lens,
            None if all_sample else step.do_sample,
        ]
        blocks = self._new_blocks(last, range(step.num_seqs))
        return _record(step, last, batch, step.starts, step.sample_positions, blocks)

    def _grown(self, tables: list[list[int]], last: _Last, table_lens: list[int]) -> list[object]:
        """Returns ``(index, place, ids)`` for each block table that has grown. ``index`` is the sequence, ``place`` the
        index of the first new block in the table, and ``ids`` are the new blocks.

        The step has the same sequences as ``last``.
        """
        if tables is not last.block_tables and not all(map(is_, tables, last.block_tables)):
            self._note_growth()
            changed = list(range(len(tables)))
        else:
            changed = list(compress(range(len(tables)), map(ne, table_lens, last.table_lens)))
            # If ``last`` is the latest step, no other step can have recorded the new blocks of these sequences.
            if last is self._latest:
                self._has_grown = self._has_grown or bool(changed)
                known = last.table_lens
                return [(index, known[index], tables[index][known[index] : table_lens[index]]) for index in changed]
        last.block_tables, last.table_lens = tables, table_lens
        return self._new_blocks(last, changed)

    def _new_blocks(self, of: _Last, indices: range | list[int]) -> list[object]:
        known_tables, blocks = self._tables, []
        for index in indices:
            table, length, number = of.block_tables[index], of.table_lens[index], of.numbers[index]
            known = known_tables.get(number)
            place = known[1] if known is not None and known[0] is table else 0
            if length > place or known is None or known[0] is not table:
                blocks.append((index, place, table[place:length]))
                known_tables[number] = (table, length)
        return list(blocks)

    def _note_growth(self) -> None:
        """Copies the recorded block table lengths of the latest step to ``_tables``. Must be called before ``_latest``
        changes to a step of another batch or another kind.
        """
        latest = self._latest
        if self._has_grown and latest is not None:
            known_tables = self._tables
            for number, table, length in zip(latest.numbers, latest.block_tables, latest.table_lens, strict=True):
                if number in known_tables:  # else the request has ended
                    known_tables[number] = (table, length)
        self._has_grown = False


def _same_batch(step: ScheduledStep, last: _Last) -> bool:
    return (
        (step.requests is last.requests or step.requests == last.requests)
        and (step.rows is last.rows or step.rows == last.rows)
        and (step.query_lens is last.query_lens or step.query_lens == last.query_lens)
        and (step.do_sample is last.do_sample or step.do_sample == last.do_sample)
    )


def _record(
    step: ScheduledStep,
    last: _Last,
    batch: list[object] | None,
    starts: list[int] | None,
    positions: list[int] | None,
    blocks: list[object],
) -> list[object]:
    return [
        step.seq,
        KIND_CODES[step.kind],
        batch,
        starts,
        positions,
        blocks,
        [(move.kind.value, move.source, move.destination) for move in step.moves] if step.moves else [],
        [index for index, restarts in enumerate(step.restarts) if restarts] if True in step.restarts else None,
        [history.index for history in step.histories] if step.histories else [],
        last.reason_name,
    ]
