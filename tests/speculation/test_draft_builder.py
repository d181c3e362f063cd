"""Counts the masks that drafts of requests with a constraint need. A given clock measures the time of the masks."""

from __future__ import annotations

import random

import numpy as np
import pytest

from llm_serving.request import Request
from llm_serving.sampling_params import SamplingParams
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepKind, StepResult
from llm_serving.speculation.budget import MAX_CREDIT, MAX_REST, SHARE, BuildBudget
from llm_serving.speculation.costs import StepCosts
from llm_serving.speculation.gains import Gains
from llm_serving.speculation.look_ahead import Mask
from llm_serving.speculation.speculator import MIN_GAIN, Speculator

NUM_WORDS = 64
STEP_S = 0.010
MAX_DRAFTS = 15
PROMPT = list(range(500, 2000))


class Work:
    """Counts masks. Each mask takes ``mask_s`` of the clock's time."""

    def __init__(self, mask_s: float) -> None:
        self.mask_s = mask_s
        self.num_masks = 0

    def clock(self) -> float:
        return self.mask_s * self.num_masks


class FreeText:
    """A constraint that first forces some tokens, and then allows all tokens."""

    has_failed = False
    num_words = NUM_WORDS

    def __init__(self, work: Work, forced: list[int]) -> None:
        self._work, self._forced = work, forced

    def fork(self) -> FreeText:
        return FreeText(self._work, list(self._forced))

    def advance(self, token_id: int) -> None:
        self._forced = self._forced[1:]

    def forced_tokens(self) -> list[int]:
        return list(self._forced)

    def mask(self) -> Mask:
        self._work.num_masks += 1
        return np.full(NUM_WORDS, 0xFFFFFFFF, np.uint32)


class Serving:
    """Decode steps of requests whose text the test gives. Each further entry of a step takes 5 % more time."""

    def __init__(self, mask_s: float = 0.0, forced: list[int] | None = None, count: int = 1) -> None:
        self.work = Work(mask_s)
        self.masks: dict[str, list[Mask]] = {}
        self.speculator = Speculator(
            MAX_DRAFTS, 32, lambda request, masks: self.masks.update({request.request_id: masks}), clock=self.work.clock
        )
        sampling = SamplingParams(ignore_eos=True)
        self.requests = [Request(f"r{number}", PROMPT, sampling, 0.0) for number in range(count)]
        for request in self.requests:
            request.constraint = FreeText(self.work, forced or [])

    def step(self, token_id: int) -> tuple[int, dict[str, list[int]]]:
        """Runs a plain step that gives each request this token. Returns the number of masks that were computed for
        drafts, and the offers.
        """
        updates = []
        for request in self.requests:
            assert request.constraint is not None
            request.constraint.advance(token_id)
            request.output_token_ids.append(token_id)
            updates.append(RequestUpdate(request, token_id, len(updates)))
        seconds = STEP_S * (1 + 0.05 * (len(updates) - 1))
        step = ScheduledStep(0, StepKind.DECODE, list(self.requests), rows=[0] * len(updates))
        result = StepResult(0, [0] * len(updates), graph_us=round(1e6 * seconds))
        before = self.work.num_masks
        self.speculator.completed(step, result, updates, seconds)
        return self.work.num_masks - before, dict(self.speculator.take_offers())


def short_matches(count: int) -> list[int]:
    """Returns a text that repeats pairs of the prompt between new tokens. Each pair suggests the prompt's next token,
    which is wrong.
    """
    return [token for place in range(count) for token in (place, *PROMPT[3 * place : 3 * place + 2])]


def test_no_mask_is_computed_after_a_guess_that_is_not_worth_a_place_in_the_step() -> None:
    serving = Serving()
    track_sizes = []
    for token in short_matches(30):
        num_masks, offers = serving.step(token)
        assert num_masks <= 1
        assert offers == {}
        track_sizes.append(len(serving.speculator._tracks[serving.requests[0]].draft.token_ids))
    assert track_sizes.count(1) >= 20, "guesses without a mask are still compared with the sampled tokens"


def test_a_draft_ends_where_its_chance_is_too_small() -> None:
    """Three tokens are forced. The pair at their end suggests the prompt's next tokens, which are seldom right."""
    forced = [5, *PROMPT[:2]]
    serving = Serving(forced=[4, *forced])
    num_masks, offers = serving.step(4)
    assert offers == {"r0": forced}
    assert len(serving.masks["r0"]) == num_masks == len(forced)


def test_requests_that_get_no_place_in_a_step_compute_no_masks() -> None:
    serving = Serving(forced=[4, *range(100, 140)], count=4)
    num_masks, offers = serving.step(4)
    assert len(offers) == 4
    assert num_masks == sum(map(len, offers.values())) <= 32 - 4


@pytest.mark.parametrize(("cost", "share"), [(0.2, SHARE / 0.2), (0.01, 1.0)])
def test_a_slow_grammar_gets_drafts_less_often_if_they_are_not_right(cost: float, share: float) -> None:
    """A mask takes ``cost`` times as long as a step. ``share`` of the steps have a mask for drafts."""
    serving = Serving(cost * STEP_S)
    built = [serving.step(token)[0] for token in short_matches(100)]
    assert sum(built) == pytest.approx(share * len(built), abs=2)


def test_right_drafts_pay_for_the_time_of_their_masks() -> None:
    budget = BuildBudget()
    for _ in range(20):
        budget.earn(STEP_S, 2)
        assert budget.is_open
        budget.spend(2 * STEP_S)
    budget.earn(STEP_S, 1000)
    budget.spend((MAX_CREDIT + 0.01) * STEP_S)
    assert not budget.is_open


def test_a_stall_while_drafts_are_built_has_a_limited_effect() -> None:
    budget = BuildBudget()
    budget.spend(30.0)
    num_steps = 0
    while not budget.is_open:
        budget.earn(STEP_S, 0)
        num_steps += 1
    assert MAX_REST <= num_steps <= MAX_REST + 1


def test_the_search_for_the_best_number_of_drafts_ends_early_and_finds_it() -> None:
    drawn = random.Random(5)
    num_skipped = 0
    for _ in range(500):
        costs, count = StepCosts(), drawn.randint(1, 4)
        for entries in sorted({count, *drawn.sample(range(1, 33), drawn.randint(1, 8))}):
            seconds = STEP_S * (1 + drawn.random() * entries / 10)
            costs.note(entries, seconds, seconds + drawn.choice((0.0, 0.001)))
        gains = Gains(costs, count, 16)
        chances = sorted((drawn.random() ** drawn.choice((1, 4)) for _ in range(20)), reverse=True)
        assert gains.largest == max([1.0, *(gains.of(size, count + size) for size in range(1, 17))])
        totals = [count + sum(chances[:size]) for size in range(17)]
        best = max(range(17), key=lambda size: (gains.of(size, totals[size]), -size))
        best = best if gains.of(best, totals[best]) > MIN_GAIN else 0
        size, found, best_gain = 0, 0, MIN_GAIN
        while gains.may_rise(size, chances[size], best_gain):
            size += 1
            if gains.of(size, totals[size]) > best_gain:
                found, best_gain = size, gains.of(size, totals[size])
        assert found == best
        num_skipped += 16 - size
    assert num_skipped > 500


def test_without_a_measured_plain_step_no_drafts_gain() -> None:
    gains = Gains(StepCosts(), 4, 16)
    assert gains.largest == 1.0
    assert not gains.may_rise(0, 1.0, MIN_GAIN)
