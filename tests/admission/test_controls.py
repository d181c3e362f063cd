"""Tests admission control, which limits the tokens that the running requests will hold together.

The tests cover the estimate of the largest number of tokens, a fixed limit, and a limit that is learnt.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_serving.admission.controls import (
    AimdAdmission,
    OutputLengthPredictor,
    RouterAdmission,
    peak_tokens,
)
from llm_serving.admission.starter import Admission
from llm_serving.scheduler.sequence import Sequence
from support.fakes import make_request


def make_sequence(prompt: int, generated: int, max_tokens: int, *, inflight: int = 0) -> Sequence:
    request = make_request(f"{prompt}-{generated}-{max_tokens}", prompt, max_tokens)
    request.output_token_ids = [1] * generated
    request.num_inflight_tokens = inflight
    return Sequence(request, 0, max_tokens)


def simulated_peak(entries: list[tuple[int, int]], block_size: int = 1) -> int:
    """Returns the largest number of tokens, in whole blocks, of a simulated batch.

    Each step adds a token to every sequence. ``entries`` are (present tokens, remaining tokens) of each sequence.
    """
    peak, alive = 0, entries
    while alive:
        peak = max(peak, sum(-(-current // block_size) * block_size for current, _ in alive))
        alive = [(current + 1, remaining - 1) for current, remaining in alive if remaining > 0]
    return peak


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12), st.integers(1, 9), st.integers(0, 300))
def test_the_peak_equals_that_of_a_simulation(entries: list[tuple[int, int]], block_size: int, at_least: int) -> None:
    assert peak_tokens(entries) == simulated_peak(entries)
    peak = simulated_peak(entries, block_size)
    assert peak_tokens(entries, block_size) == peak
    assert peak_tokens(entries, block_size, at_least) == max(peak, at_least)


def test_the_peak_of_small_cases() -> None:
    # The second sequence ends after 4 steps. Then there are 10 + 4 and 20 + 4 tokens, together 38. Later, the first
    # alone grows to 30.
    assert peak_tokens([(10, 20), (20, 4)]) == 38
    assert peak_tokens([(10, 40), (20, 4)]) == 50


def test_no_admission_control_admits_every_request() -> None:
    admission = Admission()
    assert admission.may_start(make_sequence(10**6, 0, 10**6), [make_sequence(10, 0, 10)], 1.0)


def test_the_router_counts_tokens_in_flight() -> None:
    running = [make_sequence(10, 3, 20, inflight=2)]
    # The running sequence has 15 tokens and may get 15 more. The new one has 5 and may get 10. When the new one ends,
    # both have 15 + 10 + 5 + 10 = 40 tokens. The first alone ends with 30.
    assert RouterAdmission(40).may_start(make_sequence(5, 0, 10), running, 0.5)
    assert not RouterAdmission(39).may_start(make_sequence(5, 0, 10), running, 0.5)


def test_any_request_may_start_alone() -> None:
    assert RouterAdmission(1).may_start(make_sequence(50, 0, 50), [], 0.0)


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 9), st.integers(10, 30)), min_size=2, max_size=8),
    st.integers(1, 300),
    st.integers(1, 9),
)
def test_the_router_admits_exactly_if_the_simulation_stays_within_the_limit(
    sizes: list[tuple[int, int, int]], limit: int, block_size: int
) -> None:
    candidate, *running = [make_sequence(*size) for size in sizes]
    peak = simulated_peak([(prompt + generated, most - generated) for prompt, generated, most in sizes], block_size)
    assert RouterAdmission(limit, block_size=block_size).may_start(candidate, running, 0.5) == (peak <= limit)


def test_a_refusal_holds_until_a_sequence_starts_or_stops() -> None:
    admission, candidate = RouterAdmission(30), make_sequence(10, 0, 10)
    assert not admission.may_start(candidate, [make_sequence(10, 0, 20)], 0.5, version=7)
    assert not admission.may_start(candidate, [], 0.5, version=7)
    assert admission.may_start(candidate, [], 0.5, version=8)
    assert not admission.may_start(candidate, [make_sequence(10, 0, 20)], 0.5, version=9)
    assert admission.may_start(candidate, [], 0.5)


def test_the_router_expects_the_lengths_of_recent_outputs() -> None:
    admission = RouterAdmission(60, OutputLengthPredictor(quantile=1.0, min_samples=2))
    running, candidate = [make_sequence(10, 0, 30)], make_sequence(10, 0, 30)
    assert not admission.may_start(candidate, running, 0.5)
    for length in (15, 20):
        admission.finished(make_sequence(5, length, 30))
    assert admission.may_start(candidate, running, 0.5)  # 2 * (10 + 20)
    assert not admission.may_start(make_sequence(11, 0, 30), running, 0.5)
    # The running output is longer than all recent outputs, so it is expected to reach its limit of 30. The peak is 31 +
    # 9 tokens of this sequence plus 10 + 9 of the new one.
    assert admission.may_start(candidate, [make_sequence(10, 21, 30)], 0.5)
    assert not admission.may_start(make_sequence(12, 0, 30), [make_sequence(10, 21, 30)], 0.5)


def crowded(admission: AimdAdmission, page_use: float) -> bool:
    """Returns whether a request of a million tokens may start, which is more than every token limit.

    ``page_use`` is the fraction of the blocks that are in use.
    """
    return admission.may_start(make_sequence(10**6, 0, 10), [make_sequence(10, 0, 10)], page_use)


def test_aimd_rises_by_100_per_step_in_which_only_the_limit_refuses() -> None:
    admission = AimdAdmission(5000, 1000, 5250)
    limits = []
    for _ in range(4):
        assert not crowded(admission, 0.5)
        assert not crowded(admission, 0.5), "a second call in the same step"
        limits.append(admission.max_total_tokens)
        admission.step_completed()
    assert limits == [5100, 5200, 5250, 5250]


def test_aimd_does_not_rise_with_nine_tenths_of_the_blocks_in_use_or_without_need() -> None:
    admission = AimdAdmission(5000, 1000, 9000)
    assert not crowded(admission, 0.9)
    assert admission.may_start(make_sequence(10, 0, 10), [make_sequence(10, 0, 10)], 0.0)
    assert admission.max_total_tokens == 5000
    assert not crowded(admission, 0.89)
    assert admission.max_total_tokens == 5100


def test_aimd_falls_by_1000_with_each_preemption() -> None:
    admission = AimdAdmission(5000, 2500, 9000)
    limits = []
    for _ in range(4):
        admission.preempted()
        limits.append(admission.max_total_tokens)
    assert limits == [4000, 3000, 2500, 2500]


def test_aimd_admits_at_the_raised_limit() -> None:
    admission = AimdAdmission(50, 10, 400)
    running, candidate = [make_sequence(50, 0, 30)], make_sequence(20, 0, 30)
    assert not admission.may_start(candidate, running, 0.5, version=1)  # the need is 130
    assert admission.max_total_tokens == 150
    assert admission.may_start(candidate, running, 0.5, version=1)


@pytest.mark.parametrize(("floor", "ceiling"), [(101, 200), (10, 99)])
def test_aimd_starts_within_its_bounds(floor: int, ceiling: int) -> None:
    with pytest.raises(ValueError, match=f"the limit starts at 100; it must be within {floor} and {ceiling}"):
        AimdAdmission(100, floor, ceiling)
