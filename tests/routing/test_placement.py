"""Tests the choice of a replica for a request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_serving.routing.placement import Candidate, Placed, Routing, choose, is_balanced


def replica(index: int, load: int, cached: int = 0, *, fits: bool = True, is_open: bool = True) -> Candidate:
    return Candidate(index, load, cached, fits, is_open and fits)


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        # No replica has cached tokens: the replica with the least load gets the request. If loads are equal, the first
        # replica gets it.
        ([replica(0, 70), replica(1, 50)], (1, Placed.LOAD)),
        ([replica(0, 50), replica(1, 50)], (0, Placed.LOAD)),
        # The longest cached prefix decides between replicas with similar loads. A similar load exceeds the least load
        # by at most 100 tokens or half of the least load.
        ([replica(0, 0, 16), replica(1, 100, 64)], (1, Placed.PREFIX)),
        ([replica(0, 0, 16), replica(1, 101, 64)], (0, Placed.LOAD)),
        ([replica(0, 1000, 16), replica(1, 1500, 64)], (1, Placed.PREFIX)),
        ([replica(0, 1000), replica(1, 1501, 64)], (0, Placed.LOAD)),
        # The replica with the longest prefix has too much load, so the replica with the second longest prefix gets the
        # request.
        ([replica(0, 0), replica(1, 101, 64), replica(2, 50, 32)], (2, Placed.PREFIX)),
        # Both replicas have an equal prefix, so the one with less load gets the request.
        ([replica(0, 70, 64), replica(1, 50, 64)], (1, Placed.LOAD)),
        # A request may wait behind other requests at a replica that has its prefix. It may not wait at a replica
        # without capacity.
        ([replica(0, 0), replica(1, 50, 64, is_open=False)], (1, Placed.PREFIX)),
        ([replica(0, 0), replica(1, 50, 64, fits=False)], (0, Placed.LOAD)),
        # Both replicas have an equal prefix, so the one whose next step can take the request gets it.
        ([replica(0, 0, 64, is_open=False), replica(1, 50, 64)], (1, Placed.LOAD)),
        # No replica can start the request.
        ([replica(0, 0, is_open=False), replica(1, 50, is_open=False)], None),
        ([replica(0, 0, is_open=False), replica(1, 50, 64, fits=False)], None),
    ],
)
def test_choice_by_prefix(candidates: list[Candidate], chosen: tuple[int, Placed] | None) -> None:
    assert choose(candidates, Routing.PREFIX, 100) == chosen


def test_choice_by_load() -> None:
    candidates = [replica(0, 60, 64), replica(1, 50), replica(2, 10, is_open=False)]
    assert choose(candidates, Routing.LEAST_LOADED, 100) == (1, Placed.LOAD)


def test_round_robin_choice() -> None:
    candidates = [replica(0, 60, 64), replica(1, 50), replica(2, 10, is_open=False)]
    turns = [choose(candidates, Routing.ROUND_ROBIN, 100, turn) for turn in range(3)]
    assert turns == [(0, Placed.TURN), (1, Placed.TURN), (0, Placed.TURN)]


@st.composite
def some_candidates(draw: st.DrawFn) -> list[Candidate]:
    number = draw(st.integers(1, 5))
    return [
        replica(index, draw(st.integers(0, 400)), 16 * draw(st.integers(0, 4)), fits=draw(st.booleans()),
                is_open=draw(st.booleans()))
        for index in range(number)
    ]  # fmt: skip


@given(some_candidates(), st.sampled_from(Routing), st.integers(0, 200), st.integers(0, 4))
def test_properties_of_every_choice(
    candidates: list[Candidate], routing: Routing, balance_tokens: int, turn: int
) -> None:
    choice = choose(candidates, routing, balance_tokens, turn)
    if choice is None:
        assert not any(one.is_open for one in candidates), "a replica could have started it"
        return
    chosen, why = candidates[choice[0]], choice[1]
    assert chosen.fits
    assert chosen.is_open or (routing is Routing.PREFIX and chosen.cached_tokens)
    least = min(one.load for one in candidates)
    if not is_balanced(chosen.load, least, balance_tokens) and routing is not Routing.ROUND_ROBIN:
        assert all(chosen.load <= one.load for one in candidates if one.is_open), "a higher load without need"
    if why is Placed.PREFIX:
        better = [one for one in candidates if one.cached_tokens > chosen.cached_tokens and one.is_open]
        assert not any(is_balanced(one.load, least, balance_tokens) for one in better)
