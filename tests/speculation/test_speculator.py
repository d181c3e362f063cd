"""Tests which drafts are offered. The tests set the times of steps, so no test depends on the machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llm_serving.constraints.forced import ForcedTokens
from llm_serving.request import FinishReason, Request, RequestStatus
from llm_serving.sampling_params import SamplingParams
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepKind, StepResult
from llm_serving.speculation.costs import Chances, OwnChance, StepCosts
from llm_serving.speculation.look_ahead import allowed_drafts
from llm_serving.speculation.speculator import PLAIN_STEP_INTERVAL, Speculator

PERIOD = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]


class Grammar:
    """A constraint that forces some tokens of the output. It does not score a prompt."""

    has_failed = False

    def __init__(self, tokens: list[int], vocab_size: int) -> None:
        self._inner = ForcedTokens(tokens, vocab_size)
        self.num_words = self._inner.num_words
        self.advance, self.mask, self.forced_tokens = self._inner.advance, self._inner.mask, self._inner.forced_tokens

    def fork(self) -> Grammar:
        return Grammar(self._inner.forced_tokens(), 32 * self.num_words)


class Decoding:
    """Requests that repeat ``PERIOD``, and a device whose steps take ``times[entries]`` milliseconds."""

    def __init__(
        self,
        times: dict[int, float],
        count: int = 1,
        always: bool = False,
        max_drafts: int = 7,
        model: list[int] | None = None,
    ) -> None:
        """``model`` has the drafts that the draft model makes after each step. None means that there is no draft model.
        """
        self.times, self.model = times, model
        self.masks: dict[Request, list[Any]] = {}
        has_model = model is not None
        self.speculator = Speculator(max_drafts, max(times), self.masks.__setitem__, always=always, has_model=has_model)
        self.requests = [
            Request(f"r{number}", PERIOD * 3, SamplingParams(ignore_eos=True), 0.0) for number in range(count)
        ]

    def step(self, offers: dict[str, list[int]] | None = None) -> dict[str, list[int]]:
        """Runs a step with the drafts of ``offers``, all of which are right. Returns the new offers."""
        seqs, updates, num_drafts = 0, [], 0
        for request in self.requests:
            size = 1 + len((offers or {}).get(request.request_id, []))
            num_drafts += size - 1
            seqs += size
            for _ in range(size):
                token = PERIOD[len(request.output_token_ids) % len(PERIOD)]
                request.output_token_ids.append(token)
                updates.append(RequestUpdate(request, token, len(updates)))
        step = ScheduledStep(0, StepKind.DECODE, rows=[0] * seqs, num_drafts=num_drafts)
        result = StepResult(0, [0] * seqs, graph_us=round(1000 * self.times[seqs]))
        if self.model:
            step.num_wanted, result.drafts = len(self.model), [self.model] * seqs
        self.speculator.completed(step, result, updates, self.times[seqs] / 1e3)
        return dict(self.speculator.take_offers())


def flat(slope: float) -> dict[int, float]:
    """Returns the times of steps in which each further entry takes ``slope`` times the first one."""
    return {entries: 10 * (1 + slope * (entries - 1)) for entries in range(1, 33)}


def test_text_that_repeats_itself_gets_drafts() -> None:
    decoding = Decoding(flat(0.05))
    offers: dict[str, list[int]] = {}
    sizes = []
    for _ in range(20):
        offers = decoding.step(offers)
        position = len(decoding.requests[0].output_token_ids)
        draft = offers.get("r0", [])
        assert draft == [PERIOD[(position + place) % len(PERIOD)] for place in range(len(draft))]
        sizes.append(len(draft))
    assert sizes[-1] == 7
    assert sum(sizes) > 100


def test_earlier_tokens_give_drafts_while_the_draft_model_makes_none() -> None:
    decoding = Decoding(flat(0.05), model=[])
    offers: dict[str, list[int]] = {}
    for _ in range(20):
        offers = decoding.step(offers)
    assert len(offers["r0"]) == 7


def test_a_long_match_is_better_than_a_draft_model_that_is_often_wrong() -> None:
    decoding = Decoding(flat(0.05), model=[99])
    offers: dict[str, list[int]] = {}
    found = []
    for _ in range(40):
        offers = decoding.step(offers)
        found.append(offers.get("r0", []))
    assert not any(99 in draft for draft in found)
    assert min(map(len, found[20:])) == 7, "a trial of the draft model displaces no draft from the text"


def test_no_drafts_are_offered_if_each_entry_takes_as_long_as_a_step() -> None:
    decoding = Decoding(flat(1.0))
    offers: dict[str, list[int]] = {}
    numbers = []
    for _ in range(60):
        offers = decoding.step(offers)
        numbers.append(len(offers.get("r0", [])))
    assert sum(map(bool, numbers[:20])) > 0, "larger steps are tried, because their time is not known at first"
    assert sum(numbers[20:]) == 0


def test_the_number_of_drafts_stops_before_a_step_becomes_slow() -> None:
    times = flat(0.05) | dict.fromkeys(range(5, 33), 60.0)
    decoding = Decoding(times)
    offers: dict[str, list[int]] = {}
    for _ in range(40):
        offers = decoding.step(offers)
    assert len(offers["r0"]) == 3


def test_a_plain_step_comes_after_many_steps_with_drafts() -> None:
    decoding = Decoding(flat(0.05))
    offers: dict[str, list[int]] = {}
    plain = []
    for number in range(4 * PLAIN_STEP_INTERVAL):
        offers = decoding.step(offers)
        if not offers:
            plain.append(number)
    assert 3 <= len(plain) <= 8


def test_drafts_that_are_often_wrong_are_not_offered() -> None:
    chances, own = Chances(), OwnChance()
    for _ in range(30):
        chances.note(8, False)
        own.note(False)
    assert own.mixed_with(chances.of(8)) < 0.2
    for _ in range(30):
        own.note(True)
    assert own.mixed_with(chances.of(8)) > 0.5


def test_all_drafts_are_offered_if_speculation_is_forced() -> None:
    decoding = Decoding(flat(1.0), count=3, always=True)
    assert [len(draft) for draft in decoding.step().values()] == [7, 7, 7]


def test_a_finished_request_gets_no_drafts_and_is_forgotten() -> None:
    decoding = Decoding(flat(0.05), always=True)
    decoding.step()
    request = decoding.requests[0]
    request.status, request.finish_reason = RequestStatus.FINISHED, FinishReason.STOP
    assert decoding.step() == {}
    assert decoding.speculator._tracks == {}


def test_drafts_end_before_a_token_that_ends_the_request() -> None:
    decoding = Decoding(flat(0.05), always=True)
    sampling = SamplingParams(stop_token_ids=frozenset({14}))
    decoding.requests = [Request("a", PERIOD * 3, sampling, 0.0)]
    assert decoding.step() == {"a": [12, 13]}


def test_drafts_follow_a_constraint() -> None:
    decoding = Decoding(flat(0.05), always=True, max_drafts=4)
    request = decoding.requests[0]
    request.constraint = Grammar([41, 42], 64)
    assert decoding.step() == {"r0": [41, 42]}
    assert len(decoding.masks[request]) == 2


def test_drafts_of_a_constraint_continue_with_earlier_tokens() -> None:
    """After the forced tokens 11 and 12, the request's own text continues with 13 and 14."""
    decoding = Decoding(flat(0.05), always=True, max_drafts=4)
    decoding.requests[0].constraint = Grammar([11, 12], 64)
    assert decoding.step() == {"r0": [11, 12, 13, 14]}


def test_a_request_that_scores_a_prompt_has_its_drafts_from_elsewhere() -> None:
    decoding = Decoding(flat(0.05), always=True)
    decoding.requests[0].constraint = ForcedTokens([41, 42], 64)
    assert decoding.step() == {}


def test_the_masks_along_a_draft_are_those_of_the_constraint() -> None:
    constraint = ForcedTokens([5, 40, 6], 64)
    allowed, masks = allowed_drafts(constraint, [5, 40, 7, 6])
    assert allowed == [5, 40]
    for mask, token in zip(masks, [5, 40, 6], strict=True):
        assert np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist() == [token]
    assert constraint.forced_tokens() == [5, 40, 6], "the constraint is unchanged"


def test_a_slow_step_changes_the_expected_time_slowly() -> None:
    costs = StepCosts()
    for _ in range(20):
        costs.note(2, 0.010, 0.011)
    costs.note(2, 1.0, 1.0)
    for _ in range(8):
        costs.note(2, 0.010, 0.011)
    assert 0.010 <= costs.seconds(2) < 0.0111
    assert costs.seconds(1) is None
    assert costs.gap_s == pytest.approx(0.001, rel=0.3)


def test_old_measurements_are_forgotten() -> None:
    costs = StepCosts()
    costs.note(1, 0.010, 0.010)
    costs.note(4, 0.090, 0.090)
    assert costs.seconds(4) == pytest.approx(0.090)
    for _ in range(600):
        costs.note(1, 0.010, 0.010)
    assert costs.seconds(4) == pytest.approx(0.010 * 1.18)
    assert costs.seconds(1) == pytest.approx(0.010)
