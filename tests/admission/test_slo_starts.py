"""Tests when requests that are already late start under policy ``slo``.

Many late requests must not start at the same time, because new requests, which are still on time, would then wait.
"""

from __future__ import annotations

from llm_serving.admission.slo_starts import STEPS_FOR_ONE_MORE, SloStarts
from llm_serving.scheduler.limits import Policy
from llm_serving.scheduler.scheduler import Scheduler
from llm_serving.waiting.slo_order import LATE_SHARE, SloOrder
from support.fakes import make_limits
from support.waiting_sequences import Arrivals

OBJECTIVE_S = 10.0


class Line:
    """A scheduler with running sequences and waiting requests. The first ``num_late`` waiting requests are late."""

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
        """Returns how many requests start in ``steps`` steps. Before each step, ``ending`` running requests end."""
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


def test_about_one_late_request_starts_per_ended_request() -> None:
    line = Line(100)
    assert line.order.num_late == 100
    assert line.started_in(1) == 1  # the started request is the one that is on time
    assert line.started_in(STEPS_FOR_ONE_MORE - 1) == 0
    assert line.started_in(12, ending=2) in (24, 25)
    assert line.started_in(10 * STEPS_FOR_ONE_MORE) in (9, 10)


def test_unused_starts_expire() -> None:
    line = Line(100)
    line.started_in(1)
    for _ in range(20):
        line.state.num_started -= 1 if line.state.num_started > 1 else 0
        line.starts.begin_step(None, line.now)
    assert line.started_in(1) == 1


def test_requests_on_time_always_start_and_are_counted() -> None:
    line = Line(100)
    for _ in range(4):
        line.add_on_time()
    assert line.started_in(1) == 5
    # Late requests wait, because five requests have started and only three have ended.
    assert line.started_in(3, ending=1) == 0


def test_late_requests_start_without_limit_with_free_capacity_or_without_arrivals() -> None:
    assert Line(5, running=4).started_in(1) == 6
    alone = Line(5)
    alone.now = OBJECTIVE_S - 0.001
    assert alone.started_in(1) == 1
    alone.now = OBJECTIVE_S
    assert alone.started_in(1) == 5


def test_the_reserved_start_of_late_requests_is_not_held_back() -> None:
    line = Line(3)
    for _ in range(2 * LATE_SHARE - 3):
        line.add_on_time()
    assert line.started_in(1) == 2 * LATE_SHARE
    assert len(line.order) == line.order.num_late == 1


def test_the_pace_of_decoding_sequences_limits_all_starts() -> None:
    line = Line(0)
    line.add_on_time()
    line.starts.begin_step(1, line.now)
    first = line.order.first(line.now)
    assert line.starts.may_start(first)
    line.starts.started(first)
    assert not line.starts.may_start(first)


def test_free_capacity_counts_batch_rows_that_keep_their_pace() -> None:
    """Four of ten batch rows are in use. The pace of the running sequences permits only two more."""
    line = Line(5, running=4)
    line.starts.begin_step(2, line.now)
    first_late = line.late[0]
    line.starts.started(line.order.first(line.now))
    assert not line.starts.may_start(first_late)
