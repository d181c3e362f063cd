"""Drives a Scheduler and a FakeDevice through random or chosen interleavings, checking everything on the way."""

from __future__ import annotations

import random
from collections import deque

from fakes import FakeDevice, expected_tokens

from llm_serving.request import FinishReason, Request
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepResult
from llm_serving.scheduler.scheduler import Scheduler


class Simulation:
    """One server's worth of scheduler and device on a clock that is turned by hand."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.scheduler = Scheduler(limits)
        self.device = FakeDevice(limits)
        self.now = 0.0
        self.steps: list[ScheduledStep] = []
        self.answers: deque[StepResult] = deque()
        self.requests: dict[str, Request] = {}
        self.streams: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.cut: set[str] = set()
        """Requests that something else than their own text ended."""

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add_request(request)
            self.requests[request.request_id] = request
            self.streams[request.request_id] = []

    def schedule(self) -> list[ScheduledStep]:
        """Everything that can be scheduled now. The oldest is not preempted, and nothing idles while there is work."""
        steps: list[ScheduledStep] = []
        oldest = min(
            (r for r in self.requests.values() if r.row >= 0 and not r.is_finished), key=self._age, default=None
        )
        before = oldest.num_preemptions if oldest is not None else 0
        while (step := self.scheduler.schedule(self.now)) is not None:
            assert step.seq == len(self.steps)
            self.device.submit(step)
            self.steps.append(step)
            steps.append(step)
        self._take_ended()
        assert oldest is None or oldest.num_preemptions == before
        if self.scheduler.num_steps_in_flight == 0:
            assert self.scheduler.is_idle or self.scheduler.next_wakeup(self.now) is not None
        self.check()
        return steps

    def _take_ended(self) -> None:
        updates = self.scheduler.take_ended()
        for update in updates:
            assert update.error is not None
            assert update.request.deadline is not None
            assert update.request.deadline <= self.now
            self.cut.add(update.request.request_id)
        self.take(updates)

    def run(self) -> bool:
        """The device runs one step; its answer waits for ``answer``."""
        if self.device.queue:
            result = self.device.run_next()
            result.graph_us = 500 + 20 * len(result.sampled_ids) + 37 * result.seq % 300
            self.answers.append(result)
            return True
        return False

    def answer(self) -> list[RequestUpdate]:
        """The oldest answer reaches the scheduler."""
        if not self.answers:
            self.run()
        result = self.answers.popleft()
        updates = self.scheduler.update(result, self.now)
        self.device.answered(result.seq)
        self.take(updates)
        self.check()
        return updates

    def step(self) -> list[RequestUpdate]:
        """Schedule, let the device run a step, answer it."""
        self.schedule()
        return self.answer()

    def finish(self, max_steps: int = 100_000) -> None:
        """Run until idle. No idle moment may come while there is work."""
        for _ in range(max_steps):
            self.schedule()
            if self.answers or self.device.queue:
                self.answer()
            elif (wakeup := self.scheduler.next_wakeup(self.now)) is not None:
                assert wakeup > self.now
                self.now = wakeup
            else:
                break
        assert self.scheduler.is_idle, "the device is idle while requests are waiting"
        self.check_quiet()

    def end(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request from outside."""
        update = self.scheduler.finish_request(request_id, reason, self.now)
        assert (update is None) == (request_id in self.ended)
        if update is not None:
            self.cut.add(request_id)
            self.take([update])
        self.check()

    def fail_step(self, error: str) -> list[RequestUpdate]:
        """The step that would run next fails."""
        result = self.device.run_next()
        updates = self.scheduler.update(StepResult(result.seq, error=error), self.now)
        self.device.answered(result.seq)
        self.cut.update(update.request.request_id for update in updates)
        self.take(updates)
        self.check()
        return updates

    def drop_void_steps(self) -> None:
        """What the engine does after an abort: drop steps nobody wants any more, if they have not begun."""
        for seq in self.scheduler.void_steps():
            result = self.device.abort(seq)
            if result is not None:
                self.answers.append(result)

    def lose_agent(self) -> None:
        self.device.reset()
        self.answers.clear()
        self.scheduler.agent_lost(self.now)
        assert self.scheduler.num_steps_in_flight == 0
        assert self.scheduler.num_free_blocks == self.scheduler.num_blocks
        self.check()

    def take(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            request = update.request
            assert request.request_id not in self.ended, "an update after the last one"
            if update.token_id is not None:
                self.streams[request.request_id].append(update.token_id)
            if request.is_finished:
                assert request.finish_reason is not None
                self.ended[request.request_id] = request.finish_reason

    def _age(self, request: Request) -> int:
        return list(self.requests).index(request.request_id)

    def check(self) -> None:
        self.scheduler.check_integrity()

    def check_quiet(self) -> None:
        """Idle: everything is free, every request ended, and with the text it has when run alone."""
        scheduler = self.scheduler
        assert scheduler.is_idle
        assert scheduler.num_free_blocks == scheduler.num_blocks
        assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_steps_in_flight) == (0, 0, 0)
        assert self.ended.keys() == self.requests.keys()
        for name, request in self.requests.items():
            expected = expected_tokens(request, self.limits.max_model_len)
            if name in self.cut:
                expected = expected[: len(self.streams[name])]
            assert self.streams[name] == expected, name
            assert self.streams[name] == request.output_token_ids


def random_run(simulation: Simulation, requests: list[Request], rng: random.Random, *, aborts: float = 0.0) -> None:
    """Let the requests arrive at random while steps run and are answered at random; abort some."""
    todo = deque(requests)
    while todo or not simulation.scheduler.is_idle:
        choice = rng.random()
        if todo and choice < 0.3:
            simulation.add(todo.popleft())
        elif simulation.requests and choice < 0.3 + aborts:
            simulation.end(rng.choice(list(simulation.requests)))
            if rng.random() < 0.5:
                simulation.drop_void_steps()
        elif choice < 0.6:
            simulation.schedule()
        elif choice < 0.8:
            simulation.run()
        elif simulation.answers:
            simulation.answer()
        else:
            simulation.now += 0.001
        if not todo and rng.random() < 0.02:
            simulation.finish()
    simulation.finish()
