"""Records of the turns that a ``TurnLog`` took down: one for all that are alike, single ones of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llm_serving.flight.format import Tag
from llm_serving.flight.step_writer import StepWriter
from llm_serving.flight.turn_log import TakenTurns

__all__ = ["turn_records"]

_TIME, _SCHEDULE, _UPDATE, _TURNS = int(Tag.TIME), int(Tag.SCHEDULE), int(Tag.UPDATE), int(Tag.TURNS)


def turn_records(turns: TakenTurns, writer: StepWriter, names: list[list[int]] | None) -> list[object]:
    """Their records, in order. ``names``: pseudonyms of each answer's tokens, where the recording has them."""
    latest, answered, sent, times, queue_us, graph_us, sample_us, growths, states, _, odd_turns, table_lens = turns
    if odd_turns:
        records = _TurnByTurn(turns, writer, names).records()
    else:
        run = writer.record_run(sent, growths)
        records = [(_TURNS, run, answered, times, queue_us, graph_us, sample_us, states, names)]
    writer.go_to(latest, table_lens)
    return records


class _TurnByTurn:
    """Goes through turns of which some do not have one answer, one step and an end."""

    def __init__(self, turns: TakenTurns, writer: StepWriter, names: list[list[int]] | None) -> None:
        _, self._answered, self._sent, self._times, *columns, growths, states, _, odd_turns, table_lens = turns
        self._us: list[list[int]] = columns
        self._growths, self._states, self._odd_turns = growths, states, odd_turns
        self._num_seqs = len(table_lens)
        self._writer, self._names = writer, names
        self._answer = self._step = 0
        """The next ones."""

    def records(self) -> list[object]:
        records: list[object] = []
        done = 0
        for place, num_answers, num_steps, has_ended in self._odd_turns:
            records += self._alike(self._times[done:place])
            records.append((_TIME, self._times[place]))
            records += [self._next_answer() for _ in range(num_answers)]
            records += [self._next_step() for _ in range(num_steps)]
            if has_ended:
                records.append((_SCHEDULE, None, None, None))
            done = place + 1
        return records + self._alike(self._times[done:])

    def _alike(self, times: list[float]) -> list[object]:
        """One record of turns at these times, if there are any."""
        count, begin, step = len(times), self._answer, self._step
        if not count:
            return []
        end = self._answer = begin + count
        self._step += count
        run = self._writer.record_run(self._sent + step, _between(self._growths, step, step + count))
        states = _between(self._states, step, step + count)
        names = None if self._names is None else self._names[begin:end]
        return [(_TURNS, run, self._answered + begin, times, *(us[begin:end] for us in self._us), states, names)]

    def _next_answer(self) -> object:
        place = self._answer
        self._answer += 1
        names = None if self._names is None else self._names[place]
        return (_UPDATE, self._answered + place, None, [], names, *(us[place] for us in self._us), self._num_seqs, None)

    def _next_step(self) -> object:
        place = self._step
        self._step += 1
        record = self._writer.record_next(self._sent + place, _between(self._growths, place, place + 1))
        states = _between(self._states, place, place + 1)
        return (_SCHEDULE, record, None, states[0][1] if states else None)


def _between(noted: Sequence[tuple[Any, ...]], begin: int, end: int) -> list[Any]:
    """What was noted of steps ``begin`` to ``end``, whose places are counted from ``begin``."""
    return [(place - begin, *what) for place, *what in noted if begin <= place < end]
