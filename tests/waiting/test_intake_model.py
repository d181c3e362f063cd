"""Compares the intake's queue with a list that is sorted again for every query."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llm_serving.scheduler.sequence import Sequence
from llm_serving.waiting.queue_order import QueueOrder
from support.waiting_sequences import Arrivals, make_intake, pop, put


class Model:
    """A queue that follows the documented order, with the counters of the VTC paper."""

    def __init__(self, ageing_s: float, fairness: bool) -> None:
        self.ageing_s = ageing_s
        self.fairness = fairness
        self.new: list[Sequence] = []
        self.returned: list[Sequence] = []
        self.counters: dict[tuple[int, str], int] = {}
        self.last: dict[int, str] = {}

    def who(self, sequence: Sequence) -> tuple[int, str]:
        return sequence.request.priority, sequence.request.tenant if self.fairness else ""

    def add(self, sequence: Sequence) -> None:
        priority, tenant = who = self.who(sequence)
        waiting = {self.who(other) for other in self.new if other.request.priority == priority}
        if who not in waiting:
            last = (priority, self.last.get(priority, tenant))
            floor = min((self.counters[other] for other in waiting), default=self.counters.get(last, 0))
            self.counters[who] = max(self.counters.get(who, 0), floor)
        self.new.append(sequence)

    def first(self) -> Sequence:
        if self.returned:
            return min(self.returned, key=lambda s: s.arrival_index)
        oldest: dict[int, Sequence] = {}
        for sequence in self.new:
            oldest.setdefault(sequence.request.priority, sequence)
        chosen = min(oldest, key=lambda p: (oldest[p].request.arrival_time + self.ageing_s * p, p))
        its_class = [sequence for sequence in self.new if sequence.request.priority == chosen]
        return min(its_class, key=lambda s: (self.counters[self.who(s)], s.arrival_index))

    def remove(self, sequence: Sequence) -> None:
        if sequence in self.returned:
            self.returned.remove(sequence)
        else:
            self.new.remove(sequence)
            if self.who(sequence) not in map(self.who, self.new):
                self.last[sequence.request.priority] = self.who(sequence)[1]

    def start(self, sequence: Sequence) -> None:
        if sequence in self.new:
            self.counters[self.who(sequence)] += len(sequence.request.prompt_token_ids)
        self.remove(sequence)

    @property
    def waiting(self) -> list[Sequence]:
        return [*self.returned, *self.new]

    def expired(self, now: float) -> list[Sequence]:
        due = [s for s in self.waiting if s.request.first_token_time is None and s.request.deadline is not None]
        return sorted(
            (s for s in due if s.request.deadline <= now), key=lambda s: (s.request.deadline, s.arrival_index)
        )


class IntakeMachine(RuleBasedStateMachine):
    @initialize(ageing_s=st.sampled_from([0.0, 0.5, 2.0, 1000.0]), fairness=st.booleans())
    def start_empty(self, ageing_s: float, fairness: bool) -> None:
        self.intake = make_intake(1000, None, QueueOrder(ageing_s, fairness=fairness))
        self.model = Model(ageing_s, fairness)
        self.new = Arrivals()
        self.now = 0.0
        self.running: list[Sequence] = []

    @rule(
        priority=st.sampled_from([0, 0, 0, 1, 2, -1]),
        tenant=st.sampled_from("abc"),
        prompt=st.integers(1, 9),
        within=st.sampled_from([None, None, 0.0, 0.5, 3.0]),
    )
    def append(self, priority: int, tenant: str, prompt: int, within: float | None) -> None:
        deadline = None if within is None else self.now + within
        sequence = self.new.next(prompt, self.now, priority=priority, tenant=tenant, deadline=deadline)
        put(self.intake, sequence)
        self.model.add(sequence)

    @rule(seconds=st.sampled_from([0.25, 1.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.model.waiting)
    @rule(times=st.integers(1, 3))
    def pop(self, times: int) -> None:
        for _ in range(min(times, len(self.model.waiting))):
            expected = self.model.first()
            assert self.intake.peek(self.now) is expected
            assert pop(self.intake, self.now) is expected
            self.model.start(expected)
            self.running.append(expected)

    @precondition(lambda self: self.model.waiting)
    @rule(data=st.data(), starts=st.booleans())
    def take_any(self, data: st.DataObject, starts: bool) -> None:
        sequence = data.draw(st.sampled_from(self.model.waiting))
        if starts:
            self.intake.start(sequence, self.now)
            self.model.start(sequence)
            self.running.append(sequence)
        else:
            self.intake.remove(sequence)
            self.model.remove(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.integers(1, 9))
    def get_tokens(self, data: st.DataObject, tokens: int) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        sequence.request.first_token_time = self.now
        sequence.request.output_token_ids += [1] * tokens
        self.intake.order.charge_outputs([sequence.request] * tokens)
        self.model.counters[self.model.who(sequence)] += 2 * tokens

    @precondition(lambda self: self.running)
    @rule(data=st.data(), again=st.booleans())
    def stop(self, data: st.DataObject, again: bool) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        self.running.remove(sequence)
        if again:
            self.intake.put_back(sequence)
            self.model.returned.append(sequence)

    @rule()
    def expire(self) -> None:
        expected = self.model.expired(self.now)
        assert self.intake.expire(self.now) == expected
        for sequence in expected:
            self.model.remove(sequence)

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "model"):
            return
        intake, waiting = self.intake, self.model.waiting
        assert (len(intake), bool(intake)) == (len(waiting), bool(waiting))
        assert intake.num_tokens == sum(sequence.request.num_tokens for sequence in waiting)
        returned = sorted(self.model.returned, key=lambda sequence: sequence.arrival_index)
        assert intake.first_preempted is (returned[0] if returned else None)
        assert intake.num_preempted == len(self.model.returned)
        deadlines = [sequence.request.deadline for sequence in self.model.expired(float("inf"))]
        assert intake.next_deadline == min(deadlines, default=None)

    def teardown(self) -> None:
        while hasattr(self, "model") and self.model.waiting:
            self.pop(1)


IntakeMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestIntake = IntakeMachine.TestCase
