"""Drives a Scheduler and a FakeDevice in random or chosen order, and checks every operation."""

from __future__ import annotations

import random
from collections import deque

from llm_serving.request import FinishReason, Request
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.output import MoveKind, RequestUpdate, ScheduledStep, StepKind, StepResult
from llm_serving.scheduler.scheduler import Scheduler
from llm_serving.scheduler.sequence import SequenceState
from support.cache_check import check_cache
from support.fakes import VOCABULARY, FakeDevice, next_token
from support.queue_watch import QueueWatch
from support.salt_watch import SaltWatch
from support.simulated_clients import SimulatedClients


class Simulation(SimulatedClients):
    """One scheduler with one device. The test sets the clock."""

    def __init__(self, limits: SchedulerLimits) -> None:
        super().__init__(Scheduler(limits))
        self.limits = limits
        self.device = FakeDevice(limits)
        self.steps: list[ScheduledStep] = []
        self.tables: list[list[list[int]]] = []
        """The block tables of each step when it was scheduled."""
        self.answers: deque[StepResult] = deque()
        self._queue_watch = QueueWatch(limits)
        self._salt_watch = SaltWatch(limits.block_size)
        self._unanswered: dict[int, frozenset[int]] = {}
        self._idle_until: float | None = None
        self.drafts: random.Random | None = None
        """Draws the drafts that are offered before each call of ``schedule``. If it is None, no drafts are offered."""
        self.checks_texts = True
        """If it is False, ``finish`` accepts wrong texts. The test then calls ``wrong_texts`` itself, to count them."""
        self.share_of_allowed_steps = 0.0
        """The largest share of the allowed steps that a call of ``finish`` needed. See ``finish``."""

    @property
    def num_held_blocks(self) -> int:
        """The number of blocks that are not free. 0 if the scheduler is idle and has lost none."""
        figures = self.scheduler.figures
        return int(figures.total_blocks - figures.free_blocks)

    def add(self, *requests: Request) -> None:
        for request in requests:
            super().add(request)
            self._queue_watch.arrived(request, self.now)
        self._idle_until = None

    def schedule(self) -> list[ScheduledStep]:
        """Schedules all possible steps and returns them. Checks that the device is not idle while requests wait."""
        steps: list[ScheduledStep] = []
        if self.drafts is not None:
            self._offer_drafts(self.drafts)
        while (step := self._next_step()) is not None:
            assert step.seq == len(self.steps)
            self._watch(step)
            self.steps.append(step)
            self.tables.append([list(table) for table in step.block_tables])
            steps.append(step)
            assert len(steps) < 100, "there is always one more step"
        self.take_ended()
        self._check_busy()
        self.check()
        return steps

    def _offer_drafts(self, rng: random.Random) -> None:
        """Offers drafts for some requests. Drafts are the tokens that the model will generate, often with one wrong
        token.
        """
        offers = []
        for name, request in self.requests.items():
            if name in self.ended or rng.random() < 0.3:
                continue
            text = [*request.prompt_token_ids, *request.output_token_ids]
            known = len(text)
            for _ in range(rng.choice([0, 1, 1, 2, 3, 6])):
                wrong = rng.random() < 0.25
                truth = next_token(text, len(request.prompt_token_ids), request.sampling)
                text.append(rng.randrange(VOCABULARY) if wrong else truth)
            offers.append((name, text[known:]))
        self.scheduler.offer_drafts(offers)

    def _next_step(self) -> ScheduledStep | None:
        """Returns the scheduler's next step. Checks that the oldest running sequence is not preempted for this step."""
        oldest = min(self.scheduler._running, key=lambda sequence: sequence.arrival_index, default=None)
        before = oldest.request.num_preemptions if oldest is not None else 0
        coming_back = [sequence for sequence in self.scheduler._running if sequence.on_host]
        step = self.scheduler.schedule(self.now)
        self.seen["preemptions on the way back"] += sum(s.state is not SequenceState.RUNNING for s in coming_back)
        assert oldest is None or oldest.request.num_preemptions == before, "the oldest was preempted"
        return step

    def _watch(self, step: ScheduledStep) -> None:
        self.device.submit(step)
        self._queue_watch.scheduled(step, self.now)
        self._salt_watch.scheduled(step)
        touched = {block for table in step.block_tables for block in table}
        touched |= {move.source for move in step.moves if move.kind is not MoveKind.SWAP_IN}
        touched |= {move.destination for move in step.moves if move.kind is not MoveKind.SWAP_OUT}
        self._unanswered[step.seq] = frozenset(touched)
        self.seen[f"{step.kind.value} steps"] += 1
        self.seen.update(f"{move.kind.name} moves" for move in step.moves)
        self.seen["drafts"] += step.num_drafts
        self.seen.update("saved states" if after else "resumed states" for _, after, _ in step.state_moves)
        self.seen["chunks"] += step.kind is not StepKind.MOVE and step.do_sample.count(False)
        self.seen["cached starts"] += sum(
            restart and start > 0 for restart, start in zip(step.restarts, step.starts, strict=False)
        )

    def _check_busy(self) -> None:
        """Checks that the device is not idle without a reason.

        It may be idle if the scheduler has no requests. It may also be idle while a batch waits for more requests.
        """
        scheduler, limits = self.scheduler, self.limits
        if scheduler.figures.steps_in_flight or scheduler.is_idle:
            self._idle_until = None
            return
        patience = limits.batch_waiting_time + limits.decode_batch_waiting_time
        assert patience > 0.0, "the device is idle while requests are waiting"
        if self._idle_until is None:
            self._idle_until = self.now + patience
        assert self.now <= self._idle_until, "a batch waits for longer than it is told to"
        wakeup = scheduler.next_wakeup(self.now)
        assert wakeup is not None, "the device is idle and nobody knows until when"
        assert wakeup <= self._idle_until + 1e-9

    def run(self) -> bool:
        """Makes the device run one step. ``answer`` later passes the result to the scheduler."""
        if self.device.queue:
            result = self.device.run_next()
            result.graph_us = 500 + 20 * len(result.sampled_ids) + 37 * result.seq % 300
            self.answers.append(result)
            return True
        return False

    def answer(self) -> list[RequestUpdate]:
        """Passes the oldest result to the scheduler."""
        if not self.answers:
            self.run()
        result = self.answers.popleft()
        return self.update(result)

    def update(self, result: StepResult) -> list[RequestUpdate]:
        """Passes a result to the scheduler."""
        updates = self.scheduler.update(result, self.now)
        self.seen["tokens of drafts"] += sum(update.num_later > 0 for update in updates)
        self.device.answered(result.seq)
        del self._unanswered[result.seq]
        self._idle_until = None
        self.take(updates, result)
        self.check()
        return updates

    def step(self) -> list[RequestUpdate]:
        """Schedules steps, makes the device run one step, and passes its result to the scheduler."""
        self.schedule()
        return self.answer()

    def finish(self, max_steps: int = 100_000) -> None:
        """Runs until the scheduler is idle. Checks that the device is never idle while requests wait.

        Requests that have not ended may need as many steps as they have tokens at their end: prompt and output. A step
        then computes at least one of these tokens on average, also if some tokens are computed again.
        """
        unfinished = [request for name, request in self.requests.items() if name not in self.ended]
        num_earlier = len(self.steps)
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
        if unfinished:
            allowed = sum(request.num_tokens for request in unfinished)
            self.share_of_allowed_steps = max(self.share_of_allowed_steps, (len(self.steps) - num_earlier) / allowed)
        self.check_quiet()

    def end(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        super().end(request_id, reason)
        self._idle_until = None

    def fail_step(self, error: str) -> list[RequestUpdate]:
        """Makes the next step fail halfway, so that its blocks have unknown content.

        Returns the updates of the scheduler.
        """
        seq = self.device.fail_next()
        updates = self.update(StepResult(seq, error=error))
        self.cut.update(update.request.request_id for update in updates)
        self.seen["failed steps"] += 1
        return updates

    def drop_void_steps(self) -> None:
        """Drops void steps that have not begun, as the engine does after an abort."""
        for seq in self.scheduler.void_steps():
            result = self.device.abort(seq)
            if result is not None:
                self.answers.append(result)
                self.seen["void steps"] += 1

    def skip_step(self) -> None:
        """Aborts the latest step in the queue, if the device has not begun it."""
        result = self.device.abort(max(slot.seq for slot in self.device.queue))
        if result is not None:
            self.update(result)
            self.seen["skipped steps"] += 1

    def fail_all(self) -> None:
        super().fail_all()
        self._idle_until = None

    def lose_agent(self, *, blameless: bool = False) -> None:
        self.device.reset()
        self._unanswered.clear()
        self._idle_until = None
        self.seen["agents lost"] += 1
        self.answers.clear()
        self.scheduler.agent_lost(self.now, blameless=blameless)
        assert self.scheduler.figures.steps_in_flight == 0
        assert self.scheduler.figures.free_blocks == self.scheduler.figures.total_blocks
        self.take_ended()
        self.check()

    def take(self, updates: list[RequestUpdate], result: StepResult | None = None) -> None:
        super().take(updates, result)
        for update in updates:
            if update.token_id is not None:
                self._queue_watch.got_token(update.request)
            if update.request.is_finished:
                self._queue_watch.ended(update.request)

    def check(self) -> None:
        """Checks the invariants: no block or batch row is lost, and no block of a step in flight is free."""
        super().check()
        figures = self.scheduler.figures
        assert 0.0 <= figures.kv_waste <= 1.0
        assert 0 <= figures.prefix_hit_tokens <= figures.prefix_query_tokens
        for seq, blocks in self._unanswered.items():
            free = [block for block in blocks if not self._is_held(block)]
            assert not free, f"blocks {free} are free while step {seq} is in flight"

    def _is_held(self, block: int) -> bool:
        kv_cache = self.scheduler._kv_cache
        contiguous = kv_cache._contiguous
        return kv_cache._pool.ref_count(block) > 0 if contiguous is None else bool(contiguous._taken[block])

    def check_quiet(self) -> None:
        """Checks an idle scheduler.

        All blocks and batch rows must be free. Every request must have ended with the text that it has when it runs
        alone, unless ``checks_texts`` is False.
        """
        scheduler, figures = self.scheduler, self.scheduler.figures
        assert scheduler.is_idle
        assert figures.free_blocks == figures.total_blocks
        assert len(scheduler._kv_cache.host_pool._free) == self.limits.num_host_blocks
        check_cache(scheduler._kv_cache)
        assert (figures.running, figures.waiting, figures.swapped) == (0, 0, 0)
        assert figures.steps_in_flight == 0
        assert scheduler.next_wakeup(self.now) is None
        if self.checks_texts:
            self.check_texts(self.limits.max_model_len)


def names(step: ScheduledStep) -> str:
    """Returns the first letter of the kind of step and the names of its requests, for example ``p:ab`` for a prefill of
    a and b.
    """
    return step.kind.value[0] + ":" + "".join(request.request_id for request in step.requests)


def order(simulation: Simulation) -> list[str]:
    """Returns the names of the steps in the order in which the device ran them."""
    return [names(simulation.steps[seq]) for seq in simulation.device.ran]


def random_run(simulation: Simulation, requests: list[Request], rng: random.Random, *, aborts: float = 0.0) -> None:
    """Lets requests arrive, steps run and steps complete at random times. Aborts a fraction of the requests."""
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
