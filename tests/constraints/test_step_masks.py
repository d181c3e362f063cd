"""Tests when the masks of a step are computed and published.

A mask states for each token whether a constraint allows the token next.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from llm_serving.constraints.step_masks import StepMasks
from llm_serving.ipc.shm import LAST_TOKEN
from llm_serving.request import ConstraintError, FinishReason, Request, RequestStatus
from llm_serving.sampling_params import SamplingParams
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepKind, StepResult
from llm_serving.scheduler.scheduler import Scheduler
from support.fake_device import FakeDevice
from support.fakes import make_limits, make_request


class TokensSoFar:
    """A constraint whose mask is the number of tokens that it has received, so that a test can read it."""

    num_words = 1

    def __init__(self, fails_at: int = 1 << 30) -> None:
        self.tokens: list[int] = []
        self._fails_at = fails_at

    def advance(self, token_id: int) -> None:
        self.tokens.append(token_id)
        if len(self.tokens) == self._fails_at:
            raise ConstraintError("too complex")

    def mask(self) -> npt.NDArray[np.uint32]:
        return np.array([len(self.tokens)], np.uint32)


class Published:
    """Receives the published masks and records them for each step."""

    def __init__(self) -> None:
        self.by_step: dict[int, list[int]] = {}

    def __call__(self, seq: int, masks: Any) -> None:
        assert seq not in self.by_step, "masks may be published once"
        self.by_step[seq] = [int(mask[0]) for mask in masks]


def constrained(name: str, **options: Any) -> Request:
    request = Request(name, [1, 2], SamplingParams(), 0.0)
    request.constraint = TokensSoFar(**options)
    return request


def decode(seq: int, *requests: Request) -> ScheduledStep:
    count = len(requests)
    return ScheduledStep(
        seq, StepKind.DECODE, requests=list(requests), rows=list(range(count)), token_ids=[LAST_TOKEN] * count,
        do_sample=[True] * count,
    )  # fmt: skip


def test_a_mask_waits_for_the_token_of_the_step_before() -> None:
    published = Published()
    masks, a, b = StepMasks(published), constrained("a"), constrained("b")
    masks.sent(decode(0, a))
    masks.sent(decode(1, a, b))
    masks.sent(decode(2, b))
    assert published.by_step == {0: [0]}
    assert masks.advance([RequestUpdate(a, 5, 0)]) == []
    masks.completed(0)
    assert published.by_step == {0: [0], 1: [1, 0]}
    masks.advance([RequestUpdate(a, 6, 0), RequestUpdate(b, 7, 1)])
    masks.completed(1)
    assert published.by_step[2] == [1]
    masks.completed(2)
    masks.sent(decode(3, a))
    assert published.by_step[3] == [2]


@pytest.mark.parametrize("ends", [True, False])
def test_masks_are_published_although_the_step_before_gave_no_token(ends: bool) -> None:
    """A step gives no token if it failed, was dropped, or ended the request.

    The mask of the following step is published in all of these cases.
    """
    published = Published()
    masks, a = StepMasks(published), constrained("a")
    masks.sent(decode(0, a))
    masks.sent(decode(1, a))
    if ends:
        a.status, a.finish_reason = RequestStatus.FINISHED, FinishReason.ABORT
    masks.completed(0)
    assert published.by_step[1] == [0xFFFFFFFF if ends else 0]


def test_a_constraint_that_fails_is_reported_with_its_update() -> None:
    masks, a, b = StepMasks(Published()), constrained("a", fails_at=1), constrained("b")
    masks.sent(decode(0, a, b))
    updates = [RequestUpdate(a, 5, 0), RequestUpdate(b, 5, 1)]
    assert masks.advance(updates) == [(updates[0], "too complex")]


def test_nothing_is_kept_after_the_agents_were_lost() -> None:
    published = Published()
    masks, a = StepMasks(published), constrained("a")
    masks.sent(decode(0, a))
    masks.sent(decode(1, a))
    masks.clear()
    masks.completed(0)
    masks.sent(decode(2, a))
    assert published.by_step == {0: [0], 2: [0]}


def test_masks_of_drafts_are_dropped_if_their_request_ends_or_moves_to_another_replica() -> None:
    masks, stays = StepMasks(Published()), constrained("stays")
    masks.prepare(stays, [TokensSoFar().mask()])
    for number in range(100):
        ends, moves = constrained(f"ends {number}"), constrained(f"moves {number}")
        masks.prepare(ends, [TokensSoFar().mask()])
        masks.prepare(moves, [TokensSoFar().mask()])
        ends.status, ends.finish_reason = RequestStatus.FINISHED, FinishReason.ABORT
        moves.output_token_ids.append(5)
        masks.advance([])
    assert list(masks._prepared) == [stays]


@pytest.mark.parametrize("seed", range(20))
def test_random_schedules_publish_every_mask_with_all_tokens_known(seed: int) -> None:
    """When a mask is published, its constraint has received all earlier tokens of the sequence.

    The schedules have preemption, aborts, dropped steps and losses of agents.
    """
    rng = random.Random(seed)
    limits = make_limits(num_blocks=20)
    scheduler, device, published = Scheduler(limits), FakeDevice(limits), Published()
    masks, positions, now = StepMasks(published), {}, 0.0
    for turn in range(400):
        now += 0.01
        if turn < 300 and rng.random() < 0.2:
            request = make_request(f"r{turn}", rng.randrange(1, 12), rng.randrange(1, 12), seed=turn)
            if rng.random() < 0.7:
                request.constraint = TokensSoFar()
            scheduler.add_request(request)
        action = rng.random()
        if action < 0.5 and (step := scheduler.schedule(now)) is not None:
            device.submit(step)
            masks.sent(step)
            positions[step.seq] = [step.sample_positions[index] for index in step.constrained]
        elif action < 0.9 and device.queue:
            take(scheduler, device, masks, device.run_next(), now)
        elif action < 0.93:
            for seq in scheduler.void_steps():
                if (dropped := device.abort(seq)) is not None:
                    take(scheduler, device, masks, dropped, now)
        elif action < 0.95:
            for request_id in rng.sample(sorted(scheduler._intake.sequences), min(1, scheduler.num_requests)):
                scheduler.finish_request(request_id, FinishReason.ABORT, now)
        elif action < 0.96:
            device.reset()
            masks.clear()
            scheduler.agent_lost(now)
    for seq, values in published.by_step.items():
        for value, position in zip(values, positions[seq], strict=True):
            assert value in (position, 0xFFFFFFFF), (seq, value, position)
    assert sum(1 for values in published.by_step.values() for value in values if value != 0xFFFFFFFF) > 20


def take(scheduler: Scheduler, device: FakeDevice, masks: StepMasks, result: StepResult, now: float) -> None:
    """Processes a result in the engine's order: the scheduler, then the constraints, then the masks of later steps."""
    updates = scheduler.update(result, now)
    device.answered(result.seq)
    assert masks.advance(updates) == []
    masks.completed(result.seq)
