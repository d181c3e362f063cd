"""Turns of the engine's loop in which nothing but decoding goes on, taken down as numbers while they are looked at.

In each, answers bring every sequence of the batch a token and end none, steps of the same sequences go on from the one
sent before them, and nothing more is to send: mostly one answer and one step. What decodes in peace is nothing else,
and of such a turn only its times have to be kept. ``TurnLog`` says what is looked at; ``turn_log`` gives the same in C
where it was built (``_turn_log.c``): that touches what the scheduler has just touched, little else, and keeps no
object.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter, is_, lt
from typing import Protocol

from llm_serving.flight.counts import Counts
from llm_serving.flight.steps import Growth
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepResult

try:
    from llm_serving.flight._turn_log import TurnLog as NativeTurnLog
except ImportError:  # not built: there was no compiler, or no headers of Python
    IS_NATIVE = False
else:
    IS_NATIVE = True

__all__ = ["DUE", "IS_NATIVE", "REFUSED", "TAKEN", "TakenTurns", "TurnLog", "TurnLogLike", "turn_log"]

REFUSED, TAKEN, DUE = range(3)
"""What ``end`` gives: DUE is TAKEN, and time to take the turns."""

TakenTurns = tuple[
    ScheduledStep, int, int, list[float], list[int], list[int], list[int], list[Growth], list[tuple[int, Counts]],
    list[list[RequestUpdate]], list[tuple[int, int, int, bool]], list[int],
]  # fmt: skip
"""The latest step; seq of the first answered, and of the first that was sent; the time of each turn; queue_us,
graph_us, sample_us of each answer; growths; ``(place of the step, counts)`` where blocks were given; the updates of
each answer, where they are kept; of each turn that has not one answer, one step and an end: its place, the numbers of
its answers and steps, and whether it ended; lengths of the block tables."""


class TurnLogLike(Protocol):
    """``TurnLog``, or the same in C."""

    due: float
    """A turn that ends at that time or later is ``DUE``."""

    @property
    def num_steps(self) -> int:
        """Steps that were taken down, ever."""

    def begin(
        self, first_answer: int, latest: ScheduledStep, table_lens: list[int], endings: set[int], keeps_updates: bool
    ) -> None:
        """What follows goes on from ``latest``, whose block tables were recorded as far as ``table_lens``. The next
        answer is to step ``first_answer``. ``endings``: tokens that may end a request; ``latest`` restarts no row."""

    def answer(self, answer: StepResult, updates: list[RequestUpdate], now: float) -> bool:
        """``update`` took an answer. False: it is not taken down here, and nothing has changed; so with the others."""

    def step(self, step: ScheduledStep, now: float) -> bool:
        """``schedule`` gave a step."""

    def end(self, now: float, wakeup: float | None) -> int:
        """``schedule`` gave none."""

    def leave(self) -> None:
        """Take nothing more down until ``begin``; a turn may end in the middle."""

    def take(self) -> TakenTurns | None:
        """The turns since they were last taken, of which nothing is kept; None when there are none. Raises ValueError
        in the middle of a turn."""


_SPARE_ANSWERS = 16
"""More answers than this in the turn that makes the log full are refused."""
_SHARED = attrgetter("kind", "requests", "rows", "query_lens", "do_sample", "block_tables", "restarts", "reason")
"""The same objects in every step of a batch."""


class TurnLog:
    """See ``TurnLogLike``. ``counts``: asked when a step has more blocks. After ``max_turns`` a turn is ``DUE``, and no
    more are taken down."""

    def __init__(self, counts: Callable[[], Counts], max_turns: int) -> None:
        self.due = -math.inf
        self.num_steps = 0
        self._counts = counts
        self._max_turns = max_turns
        self._latest: ScheduledStep | None = None
        self._is_at_work = False
        self._now = 0.0
        self._turn_answers = self._turn_steps = 0
        self._empty()

    def _empty(self) -> None:
        self._times: list[float] = []
        self._answers: list[tuple[int, int, int]] = []
        self._num_sent = 0
        self._growths: list[Growth] = []
        self._states: list[tuple[int, Counts]] = []
        self._updates: list[list[RequestUpdate]] = []
        self._odd_turns: list[tuple[int, int, int, bool]] = []

    def begin(
        self, first_answer: int, latest: ScheduledStep, table_lens: list[int], endings: set[int], keeps_updates: bool
    ) -> None:
        if self._is_at_work or self._times or not len(latest.starts) == len(latest.rows) == len(table_lens):
            raise ValueError("the log is at work, or a step has columns of several sizes")
        self._latest, self._next_answer, self._blocks = latest, first_answer, table_lens
        self._endings, self._keeps_updates = endings, keeps_updates
        self._is_at_work = True

    def answer(self, answer: StepResult, updates: list[RequestUpdate], now: float) -> bool:
        if not self._is_at_work or self._turn_steps or (self._turn_answers and now != self._now):
            return False
        columns = (updates, answer.sampled_ids, answer.logits, answer.logsumexps)
        if (
            len(self._times) == self._max_turns
            or len(self._answers) == self._max_turns + _SPARE_ANSWERS
            or answer.seq != self._next_answer
            or answer.error is not None
            or answer.aborted
            or any(len(column) != len(self._blocks) for column in columns)
            or any(token < 0 or token in self._endings for token in answer.sampled_ids)
        ):
            return False
        if self._keeps_updates:
            self._updates.append(updates)
        self._now = now
        self._answers.append((answer.queue_us, answer.graph_us, answer.sample_us))
        self._turn_answers += 1
        self._next_answer += 1
        return True

    def step(self, step: ScheduledStep, now: float) -> bool:
        latest = self._latest if self._is_at_work and self._turn_answers and now == self._now else None
        if (
            latest is None
            or step.seq != latest.seq + 1
            or not all(map(is_, _SHARED(step), _SHARED(latest)))
            or step.starts != [start + 1 for start in latest.starts]
            or step.sample_positions != [position + 1 for position in latest.sample_positions]
            or step.moves
            or step.histories
        ):
            return False
        blocks = list(map(len, step.block_tables))
        if any(map(lt, blocks, self._blocks)):
            return False
        if blocks != self._blocks:
            for index, (table, told) in enumerate(zip(step.block_tables, self._blocks, strict=True)):
                if len(table) > told:
                    self._growths.append((self._num_sent, index, told, table[told:]))
            self._states.append((self._num_sent, self._counts()))
        self._latest, self._blocks = step, blocks
        self._num_sent += 1
        self._turn_steps += 1
        self.num_steps += 1
        return True

    def end(self, now: float, wakeup: float | None) -> int:
        if not self._is_at_work or not self._turn_steps or now != self._now or wakeup is not None:
            return REFUSED
        self._close_turn(has_ended=True)
        return DUE if len(self._answers) >= self._max_turns or now >= self.due else TAKEN

    def leave(self) -> None:
        if self._turn_answers:
            self._close_turn(has_ended=False)
        self._is_at_work = False

    def _close_turn(self, *, has_ended: bool) -> None:
        if not (self._turn_answers == self._turn_steps == 1 and has_ended):
            self._odd_turns.append((len(self._times), self._turn_answers, self._turn_steps, has_ended))
        self._times.append(self._now)
        self._turn_answers = self._turn_steps = 0

    def take(self) -> TakenTurns | None:
        latest = self._latest
        if not self._times or latest is None:
            return None
        if self._turn_answers:
            raise ValueError("a turn is under way")
        first_answer, first_step = self._next_answer - len(self._answers), latest.seq + 1 - self._num_sent
        queue_us, graph_us, sample_us = map(list, zip(*self._answers, strict=True))
        taken = (
            latest, first_answer, first_step, self._times, queue_us, graph_us, sample_us, self._growths, self._states,
            self._updates, self._odd_turns, list(self._blocks),
        )  # fmt: skip
        self._empty()
        return taken


def turn_log(counts: Callable[[], Counts], max_turns: int) -> TurnLogLike:
    """A log of turns, in C if it was built."""
    if IS_NATIVE:
        return NativeTurnLog(ScheduledStep, StepResult, counts, max_turns)
    return TurnLog(counts, max_turns)
