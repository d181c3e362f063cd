"""Tests how many drafts the draft model makes. The tests set all times, so no test depends on the machine."""

from __future__ import annotations

from itertools import pairwise

import pytest

from llm_serving.request import Request
from llm_serving.sampling_params import SamplingParams
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepKind, StepResult
from llm_serving.speculation.balance import SHARE, STAKE_STEPS, Balance
from llm_serving.speculation.costs import StepCosts
from llm_serving.speculation.draft_lengths import MAX_TRIAL_INTERVAL, TRIAL_INTERVAL, TRIAL_STEPS, DraftLengths
from llm_serving.speculation.model_track import StepUse
from llm_serving.speculation.speculator import PLAIN_STEP_INTERVAL, Speculator

STEP_MS, ENTRY_MS = 10.0, 0.5
SEQUENCE_TOKENS = 300
"""Maximum number of tokens of a sequence that the draft model has missed, because shorter sequences follow others."""


def guess_of(place: int) -> int:
    """Returns the draft model's guess of an output token. All guesses differ, so earlier tokens give no drafts."""
    return 1000 + 2 * place


class Serving:
    """Requests with a draft model that is right in a fraction of its drafts. One pass of the draft model takes
    ``pass_ms``. Each token that it has missed in steps without drafts takes ``missed_ms``. Requests with ``contexts``
    tokens or more get no drafts.
    """

    def __init__(
        self,
        pass_ms: float,
        right: float,
        count: int = 1,
        always: bool = False,
        entries: int = 32,
        missed_ms: float = 0.0,
        contexts: int = 1 << 20,
    ) -> None:
        self.pass_ms, self.right, self.missed_ms = pass_ms, right, missed_ms
        self.contexts = contexts
        self._num_missed = 0
        self.speculator = Speculator(4, entries, lambda request, masks: None, always=always, has_model=True)
        self.requests = [Request(f"r{i}", [5, 6], SamplingParams(ignore_eos=True), 0.0) for i in range(count)]
        self.seconds = 0.0
        self.tokens = 0
        self._drawn = 0

    def _is_right(self) -> bool:
        self._drawn += 1
        return int(self._drawn * self.right) > int((self._drawn - 1) * self.right)

    def step(self, offers: dict[str, list[int]]) -> tuple[dict[str, list[int]], int]:
        """Runs a decode step. Returns the new offers and the number of drafts that the step wanted."""
        requests = [request for request in self.requests for _ in range(1 + len(offers.get(request.request_id, [])))]
        num_drafts = len(requests) - len(self.requests)
        step = ScheduledStep(0, StepKind.DECODE, requests, rows=[0] * len(requests), num_drafts=num_drafts)
        step.num_wanted = self.speculator.wanted(step)
        step.is_held = self.speculator.holds(step)
        updates, drafts, index = [], [], 0
        for request in self.requests:
            draft = offers.get(request.request_id, [])
            new = []
            known = len(request.output_token_ids)
            for guess in [*draft, None]:
                new.append(guess_of(known + len(new)) + (not self._is_right()))
                if new[-1] != guess:
                    break
            for place, token in enumerate(new):
                request.output_token_ids.append(token)
                updates.append(RequestUpdate(request, token, index + place))
            known += len(new)
            num_made = step.num_wanted if request.num_tokens < self.contexts else 0
            drafts += [[guess_of(known + each) for each in range(num_made)]] * (1 + len(draft))
            index += 1 + len(draft)
        self.tokens += len(updates)
        step_ms, draft_ms = STEP_MS + ENTRY_MS * (len(requests) - 1), self.pass_ms * step.num_wanted
        draft_ms += self.missed_ms * self._num_missed if step.num_wanted else 0.0
        self._num_missed = 0 if step.num_wanted else min(self._num_missed + 1, SEQUENCE_TOKENS)
        result = StepResult(0, [0] * len(requests), graph_us=round(1e3 * step_ms))
        result.sample_us = result.draft_us = round(1e3 * draft_ms)
        result.drafts = drafts if step.num_wanted else None
        self.seconds += (step_ms + draft_ms) / 1e3
        self.speculator.completed(step, result, updates, (step_ms + draft_ms) / 1e3)
        return dict(self.speculator.take_offers()), step.num_wanted

    def run(self, num_steps: int) -> tuple[list[int], list[int]]:
        """Runs steps. Returns the drafts wanted by each step, and the drafts of the first request in each offer."""
        offers: dict[str, list[int]] = {}
        wanted, offered = [], []
        for _ in range(num_steps):
            offers, number = self.step(offers)
            wanted.append(number)
            offered.append(len(offers.get("r0", [])))
        return wanted, offered

    @property
    def gain(self) -> float:
        """The tokens per second, divided by those of steps without drafts."""
        plain_ms = STEP_MS + ENTRY_MS * (len(self.requests) - 1)
        return self.tokens / self.seconds / (len(self.requests) / (plain_ms / 1e3))


def test_a_fast_and_right_draft_model_makes_as_many_drafts_as_permitted() -> None:
    serving = Serving(pass_ms=0.5, right=1.0)
    wanted, offered = serving.run(200)
    assert wanted[-1] == 4
    assert max(offered) == 4
    assert serving.gain > 2.5


def test_no_drafts_are_wanted_beyond_the_contexts_of_the_draft_model() -> None:
    """These drafts would not come, and the next step would wait for the result of each step in vain."""
    serving = Serving(pass_ms=0.5, right=1.0, contexts=300)
    wanted, _ = serving.run(200)
    assert min(wanted[30:50]) > 0
    assert not any(wanted[100:])


def test_a_trial_compares_drafts_and_verifies_none() -> None:
    wanted, offered = Serving(pass_ms=0.5, right=1.0).run(TRIAL_STEPS)
    assert set(wanted) == {0, 1}
    assert not any(offered)


def test_a_slow_or_wrong_draft_model_never_makes_serving_slower() -> None:
    for pass_ms, right in ((9.0, 1.0), (4.0, 0.2), (1.0, 0.0), (2.0, 0.05)):
        serving = Serving(pass_ms, right)
        wanted, offered = serving.run(3 * TRIAL_INTERVAL)
        assert sum(map(bool, offered[200:])) <= 3, "at most the last draft of each trial"
        assert sum(wanted[200:]) <= 4 * TRIAL_STEPS, (pass_ms, right)
        assert serving.gain > 0.98, (pass_ms, right)


def trial_starts(wanted: list[int]) -> list[int]:
    """Returns the steps at which trials begin, if no drafts are used between trials."""
    return [number for number, each in enumerate(wanted) if each and not any(wanted[max(0, number - 9) : number])]


def test_trials_of_a_losing_draft_model_become_rarer() -> None:
    serving = Serving(pass_ms=1.0, right=0.0)
    starts = trial_starts(serving.run(17 * TRIAL_INTERVAL)[0])
    gaps = [after - before for before, after in pairwise(starts)]
    assert len(gaps) >= 3
    assert gaps[0] < 2.2 * TRIAL_INTERVAL
    assert all(later > 1.8 * earlier for earlier, later in pairwise(gaps)), gaps


def test_trials_are_seldom_if_the_draft_model_has_many_tokens_to_compute_first() -> None:
    """A trial takes as long as 18 steps. So 1800 plain steps must pay for it."""
    serving = Serving(pass_ms=4.0, right=0.2, missed_ms=0.5)
    serving.run(TRIAL_INTERVAL)
    serving.seconds, serving.tokens = 0.0, 0
    wanted, _ = serving.run(8 * TRIAL_INTERVAL)
    assert serving.gain > 1 - 1.2 * SHARE
    assert sum(wanted) >= 2 * TRIAL_STEPS


def test_no_trial_begins_if_even_right_drafts_do_not_pay_for_the_missed_tokens() -> None:
    """Right drafts save at most 4 steps of 10 ms each, in 64 steps. A missed token takes 5 ms."""
    costs = StepCosts()
    costs.note(1, 0.010, 0.010)
    lengths = DraftLengths(costs, 4, 32, 1.05, always=False)
    trial = ScheduledStep(0, StepKind.DECODE, rows=[0], num_wanted=1)
    for num_missed, draft_us in ((1000, 5_000_000), (1, 1000)):
        result = StepResult(0, [0], graph_us=10_000, sample_us=draft_us, draft_us=draft_us)
        lengths.note(trial, result, StepUse(num_missed))
    assert lengths.is_trial
    assert lengths.after_decode(1, 1, 0.9, 1000) == 0
    assert lengths.after_decode(1, 1, 0.9, 100) == 1


def test_a_stall_of_the_machine_in_a_trial_delays_no_trial() -> None:
    """The draft model takes 1 ms for each step of a trial, except for one step with a stall of 30 seconds."""
    for stall_at in (None, 0, 3):
        costs = StepCosts()
        lengths = DraftLengths(costs, 4, 32, 1.05, always=False)
        step, plain = ScheduledStep(0, StepKind.DECODE, rows=[0]), StepResult(0, [0], graph_us=10_000)
        costs.note(1, 0.010, 0.010)
        for number in range(TRIAL_STEPS):
            trial = ScheduledStep(0, StepKind.DECODE, rows=[0], num_wanted=1)
            draft_us = 1000 + 30_000_000 * (number == stall_at)
            result = StepResult(0, [0], graph_us=10_000, sample_us=draft_us, draft_us=draft_us)
            lengths.note(trial, result, StepUse(num_missed=1))
        num_steps = 0
        while not lengths.is_trial and num_steps < MAX_TRIAL_INTERVAL:
            lengths.note(step, plain, StepUse())
            num_steps += 1
        assert TRIAL_INTERVAL <= num_steps < 3 * TRIAL_INTERVAL, stall_at
        assert lengths.after_decode(1, 1, 0.9, 1) == 1, "the next trial begins"


def test_only_a_step_that_was_held_costs_the_time_between_steps() -> None:
    """The last steps of a trial are sent ahead, and some of their results arrive after the end of the trial."""
    costs = StepCosts()
    costs.note(1, 0.010, 0.030)
    lengths = DraftLengths(costs, 4, 32, 1.05, always=False)
    result = StepResult(0, [0], graph_us=10_000, sample_us=1000, draft_us=1000)
    steps = [ScheduledStep(0, StepKind.DECODE, rows=[0], num_wanted=1) for _ in range(TRIAL_STEPS + 1)]
    for step in steps:
        step.is_held = lengths.holds(step)
    for step in steps[:-1]:
        lengths.note(step, result, StepUse(1))
    assert not lengths.is_trial
    assert lengths._loss(steps[-1], 0.001, StepUse(1), 0.010) == pytest.approx(0.001)
    held = ScheduledStep(0, StepKind.DECODE, rows=[0], num_wanted=1, is_held=True)
    assert lengths._loss(held, 0.001, StepUse(1), 0.010) == pytest.approx(0.001 + costs.gap_s)
    assert costs.gap_s > 0


def test_gains_pay_for_earlier_losses_only() -> None:
    balance = Balance()
    balance.renew_stake(1.0)
    balance.add(5.0, 1.0)
    assert not balance.is_paid
    balance.add(-1000.0, 1.0)
    assert balance.is_paid
    balance.add(STAKE_STEPS + 0.5, 1.0)
    assert balance.is_lost
    assert not balance.is_paid
    for _ in range(round((STAKE_STEPS + 0.5) / SHARE) - 1):
        balance.pay(1.0)
    assert not balance.is_paid
    balance.pay(1.1)
    assert balance.is_paid
    assert balance.is_lost


def test_a_draft_model_that_becomes_right_is_used_after_a_trial() -> None:
    serving = Serving(pass_ms=0.5, right=0.0)
    _, offered = serving.run(500)
    assert offered[-1] == 0
    serving.right = 1.0
    _, offered = serving.run(4 * TRIAL_INTERVAL)
    assert offered[-1] > 0


def test_a_draft_model_that_becomes_wrong_rests_soon() -> None:
    serving = Serving(pass_ms=2.0, right=1.0)
    assert serving.run(2000)[0][-1] > 0
    serving.right, serving.seconds, serving.tokens = 0.0, 0.0, 0
    wanted, _ = serving.run(500)
    assert not any(wanted[100:])
    assert serving.gain > 1 - 2 * STAKE_STEPS / 500


def test_full_batches_make_no_drafts() -> None:
    serving = Serving(pass_ms=0.1, right=1.0, count=17, entries=32)
    wanted, _ = serving.run(100)
    assert not any(wanted)


def test_drafts_that_are_always_made_fit_the_step() -> None:
    wanted, offered = Serving(pass_ms=50.0, right=0.0, count=10, always=True, entries=32).run(20)
    assert set(wanted) == {2}
    assert offered[0] == 2


def test_steps_with_prompts_make_one_draft_while_drafts_pay() -> None:
    serving = Serving(pass_ms=0.5, right=1.0)
    prompts = ScheduledStep(0, StepKind.PREFILL, [], rows=[])
    assert serving.speculator.wanted(prompts) == 0
    serving.run(100)
    assert serving.speculator.wanted(prompts) == 1
    assert serving.speculator.wanted(ScheduledStep(0, StepKind.MOVE)) == 0


def test_a_plain_step_still_measures_the_time_without_drafts() -> None:
    _, offered = Serving(pass_ms=0.5, right=1.0).run(5 * PLAIN_STEP_INTERVAL)
    assert 3 <= offered[TRIAL_STEPS + 8 :].count(0) <= 8
