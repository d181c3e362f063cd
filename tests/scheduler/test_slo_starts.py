"""Which requests ``slo`` lets start: late ones not in waves, where others who can be on time keep coming."""

from __future__ import annotations

from llm_serving.scheduler.limits import Policy
from llm_serving.scheduler.scheduler import Scheduler
from llm_serving.scheduler.slo_order import LATE_SHARE, STEPS_FOR_ONE_MORE, SloOrder, SloStarts
from support.fakes import make_limits
from support.waiting_sequences import Arrivals

OBJECTIVE_S = 10.0


class Line:
    """Requests by arrival, the first ``num_late`` of them late, on a scheduler whose rows are in use."""

    def __init__(self, num_late: int, *, running: int = 8, rows: int = 10) -> None:
        self._new = Arrivals()
        self.order = SloOrder(OBJECTIVE_S, margin=0.0)
        self.late = [self._new.next(ttft_objective=0.5) for _ in range(num_late)]
        for sequence in self.late:
            self.order.add(sequence)
        self.add_on_time()
        self.now = 1.0
        self.order.first(self.now)
        scheduler = Scheduler(make_limits(policy=Policy.SLO, max_num_seqs=rows, num_blocks=1000))
        self.state = scheduler._state
        for _ in range(running):
            sequence = self._new.next()
            self.state.running.start(sequence)
        self.state.num_started = running
        self.starts = SloStarts(self.state, self.order)
        self.starts.begin_step(None, self.now)

    def add_on_time(self) -> None:
        self.order.add(self._new.next())

    def started_in(self, steps: int, *, ending: int = 0) -> int:
        """How many start in so many steps, where ``ending`` requests end before each."""
        started = 0
        for _ in range(steps):
            self.state.num_started -= ending
            self.starts.begin_step(None, self.now)
            while len(self.order) and self.starts.may_start(sequence := self.order.first(self.now)):
                self.starts.started(sequence)
                self.order.start(sequence)
                self.state.num_started += 1
                started += 1
        return started


def test_late_ones_replace_those_that_ended_and_hardly_more() -> None:
    line = Line(100)
    assert line.order.num_late == 100
    assert line.started_in(1) == 1  # who is on time
    assert line.started_in(STEPS_FOR_ONE_MORE - 1) == 0
    assert line.started_in(12, ending=2) in (24, 25)
    assert line.started_in(10 * STEPS_FOR_ONE_MORE) in (9, 10)


def test_what_ended_while_nobody_could_start_is_not_made_up_for() -> None:
    line = Line(100)
    line.started_in(1)
    for _ in range(20):
        line.state.num_started -= 1 if line.state.num_started > 1 else 0
        line.starts.begin_step(None, line.now)
    assert line.started_in(1) == 1


def test_those_on_time_always_may_and_are_counted() -> None:
    line = Line(100)
    for _ in range(4):
        line.add_on_time()
    assert line.started_in(1) == 5
    assert line.started_in(3, ending=1) == 0  # five started, three ended


def test_late_ones_start_as_they_like_where_there_is_plenty_or_nobody_else_comes() -> None:
    assert Line(5, running=4).started_in(1) == 6
    alone = Line(5)
    alone.now = OBJECTIVE_S - 0.001
    assert alone.started_in(1) == 1
    alone.now = OBJECTIVE_S
    assert alone.started_in(1) == 5


def test_the_turn_of_late_ones_is_theirs() -> None:
    line = Line(3)
    for _ in range(2 * LATE_SHARE - 3):
        line.add_on_time()
    assert line.started_in(1) == 2 * LATE_SHARE
    assert len(line.order) == line.order.num_late == 1


def test_the_pace_of_rows_bounds_all_starts() -> None:
    line = Line(0)
    line.add_on_time()
    line.starts.begin_step(1, line.now)
    first = line.order.first(line.now)
    assert line.starts.may_start(first)
    line.starts.started(first)
    assert not line.starts.may_start(first)


def test_plenty_is_told_by_the_rows_that_keep_their_pace() -> None:
    """Four of ten rows run, but their pace allows no more than two beside them."""
    line = Line(5, running=4)
    line.starts.begin_step(2, line.now)
    first_late = line.late[0]
    line.starts.started(line.order.first(line.now))
    assert not line.starts.may_start(first_late)
