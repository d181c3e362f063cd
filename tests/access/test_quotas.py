"""Tests the quotas of a key. The tests set the clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_serving.access.keys import KeyRights
from llm_serving.access.quotas import Allowance, KeyUsage
from llm_serving.errors import QuotaExceededError, RequestError


def refusal(call, *arguments) -> tuple[str, float]:
    with pytest.raises(QuotaExceededError) as caught:
        call("alice", *arguments)
    return caught.value.quota, caught.value.retry_after_s


def test_an_allowance_refills_evenly_up_to_a_minute():
    allowance = Allowance(60, 0.0)
    assert allowance.wait_s(60, 0.0) == 0.0
    allowance.take(60)
    assert allowance.wait_s(1, 0.0) == 1.0
    assert allowance.wait_s(30, 10.0) == 20.0
    assert allowance.wait_s(60, 1000.0) == 0.0
    assert allowance.wait_s(61, 1000.0) == 1.0


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.floats(0, 100), st.integers(1, 1000)), max_size=50),
)
def test_an_allowance_never_gives_more_than_it_has(per_minute, attempts):
    """The amount used in any T minutes is at most the allowance of T + 1 minutes.

    If an attempt is refused, the allowance returns the time to wait. After this time, the same attempt succeeds.
    """
    allowance, now, used = Allowance(per_minute, 0.0), 0.0, 0
    for pause, amount in attempts:
        now += pause
        wait_s = allowance.wait_s(amount, now)
        if amount <= per_minute:
            assert wait_s <= 60.0 + 1e-6
            now += wait_s + 1e-6  # wait_s may be rounded down
            assert allowance.wait_s(amount, now) == 0.0
            allowance.take(amount)
            used += amount
            assert used <= per_minute * (1 + now / 60) + 1e-6


def test_requests_in_flight_are_limited():
    usage, rights = KeyUsage(), KeyRights(requests_in_flight=2)
    usage.enter("alice", rights, 0.0)
    usage.enter("alice", rights, 0.0)
    assert refusal(usage.enter, rights, 0.0) == ("requests_in_flight", 1.0)
    usage.leave(0.5)
    usage.enter("alice", rights, 1.0)
    assert usage.in_flight == 2


def test_retry_after_follows_the_pace_at_which_the_keys_requests_end():
    usage, rights = KeyUsage(), KeyRights(requests_in_flight=1)
    for i in range(200):
        usage.enter("alice", rights, i * 6.0)
        usage.leave(i * 6.0 + 4.5)
    usage.enter("alice", rights, 2000.0)
    quota, seconds = refusal(usage.enter, rights, 2000.0)
    assert (quota, seconds) == ("requests_in_flight", pytest.approx(4.5))


def test_requests_per_minute_are_limited():
    usage, rights = KeyUsage(), KeyRights(requests_per_minute=3)
    for _ in range(3):
        usage.enter("alice", rights, 0.0)
    assert refusal(usage.enter, rights, 5.0) == ("requests_per_minute", 15.0)
    assert usage.in_flight == 3
    usage.enter("alice", rights, 20.0)


def test_a_refused_request_does_not_count_for_the_requests_per_minute():
    usage, rights = KeyUsage(), KeyRights(requests_per_minute=1)
    for _ in range(3):
        usage.enter("alice", rights, 0.0)
        usage.leave(0.0, was_refused=True)
    usage.enter("alice", rights, 0.0)
    usage.leave(0.0)
    assert refusal(usage.enter, rights, 0.0) == ("requests_per_minute", 60.0)


def test_tokens_are_reserved_and_what_was_not_used_comes_back():
    usage, rights = KeyUsage(), KeyRights(tokens_per_minute=600)
    assert usage.reserve("alice", rights, 100, 400, 0.0) == 500
    assert refusal(usage.reserve, rights, 50, 100, 0.0) == ("tokens_per_minute", 5.0)
    usage.settle(500, 120)
    assert usage.reserve("alice", rights, 80, 400, 0.0) == 480
    assert refusal(usage.reserve, rights, 1, 0, 0.0) == ("tokens_per_minute", 0.1)


def test_a_request_that_can_never_fit_is_not_told_to_try_again():
    usage, rights = KeyUsage(), KeyRights(tokens_per_minute=600)
    with pytest.raises(RequestError, match=r"200 prompt \+ 401 output tokens = 601 tokens; .* 600 tokens") as caught:
        usage.reserve("alice", rights, 200, 401, 0.0)
    assert (caught.value.status, caught.value.param) == (400, "max_tokens")
    assert usage.reserve("alice", rights, 200, 400, 0.0) == 600


def test_a_new_limit_applies_to_what_was_used_before():
    usage = KeyUsage()
    assert usage.reserve("alice", KeyRights(tokens_per_minute=600), 0, 500, 0.0) == 500
    assert usage.reserve("alice", KeyRights(tokens_per_minute=1200), 0, 700, 0.0) == 700
    assert refusal(usage.reserve, KeyRights(tokens_per_minute=1200), 0, 1, 0.0)[1] == pytest.approx(0.05)
    assert usage.reserve("alice", KeyRights(), 0, 10**9, 0.0) == 0


def test_without_limits_nothing_is_refused():
    usage = KeyUsage()
    for _ in range(1000):
        usage.enter("alice", KeyRights(), 0.0)
    assert usage.reserve("alice", KeyRights(), 10**6, 10**6, 0.0) == 0
