"""Tests which models the arbiter chooses to end, and the numbers of its refusals."""

from __future__ import annotations

import itertools
import random

import pytest

from llm_serving.errors import ModelMemoryError
from llm_serving.registry.arbiter import Arbiter, Claim

GIB = 1024**3


def claim(name: str, size: int, last_used: float = 0.0, *, may_sleep: bool = True, pool: str = "host") -> Claim:
    return Claim(name, {pool: size}, last_used, may_sleep)


def chosen(arbiter: Arbiter, need: dict[str, int], *claims: Claim) -> list[str]:
    return sorted(each.name for each in arbiter.make_room("new", need, claims))


def test_nothing_ends_if_the_model_fits() -> None:
    assert chosen(Arbiter({"host": 10}), {"host": 4}, claim("a", 6)) == []


def test_the_model_that_was_not_used_for_the_longest_time_ends() -> None:
    claims = claim("a", 3, 5.0), claim("b", 3, 1.0), claim("c", 3, 9.0)
    assert chosen(Arbiter({"host": 10}), {"host": 3}, *claims) == ["b"]
    assert chosen(Arbiter({"host": 10}), {"host": 6}, *claims) == ["a", "b"]


def test_no_more_models_end_than_necessary() -> None:
    """The small model was used longest ago. If only the large model ends, the small one and the new one both fit."""
    assert chosen(Arbiter({"host": 10}), {"host": 8}, claim("small", 1, 1.0), claim("large", 9, 2.0)) == ["large"]


def test_pinned_and_busy_models_stay() -> None:
    claims = claim("pinned", 5, 1.0, may_sleep=False), claim("idle", 4, 2.0)
    assert chosen(Arbiter({"host": 10}), {"host": 5}, *claims) == ["idle"]


def test_a_refusal_has_the_numbers() -> None:
    arbiter = Arbiter({"host": 10 * GIB})
    with pytest.raises(ModelMemoryError) as refused:
        chosen(arbiter, {"host": 8 * GIB}, claim("a", 3 * GIB, may_sleep=False), claim("idle", 1 * GIB))
    for part in ("'new' needs 8.0 GiB of host memory", "may have 10.0 GiB", "memory_limit", "a 3.0 GiB"):
        assert part in str(refused.value)
    assert "idle" not in str(refused.value)


def test_only_models_of_a_full_pool_end() -> None:
    arbiter = Arbiter({"host": 100, "device 0": 10, "device 1": 10})
    claims = claim("a", 8, 1.0, pool="device 0"), claim("b", 8, 2.0, pool="device 1")
    assert chosen(arbiter, {"host": 1, "device 1": 5}, *claims) == ["b"]


def test_a_pool_without_a_limit_is_never_full() -> None:
    assert chosen(Arbiter({}), {"device 3": 1 << 60}, claim("a", 1 << 60, pool="device 3")) == []


def test_random_claims_against_all_subsets() -> None:
    """The chosen models free enough memory, and a part of them would not. If the arbiter refuses, no choice frees
    enough.
    """
    draw = random.Random(5)
    for _ in range(300):
        limit = draw.randint(5, 30)
        claims = [claim(str(n), draw.randint(1, 10), draw.random(), may_sleep=draw.random() < 0.7) for n in range(5)]
        need = draw.randint(1, 20)

        def fits(ended: tuple[Claim, ...] | list[Claim], claims=claims, need=need, limit=limit) -> bool:  # type: ignore[no-untyped-def]
            return sum(each.need["host"] for each in claims if each not in ended) + need <= limit

        sleepers = [each for each in claims if each.may_sleep]
        try:
            ended = Arbiter({"host": limit}).make_room("new", {"host": need}, claims)
        except ModelMemoryError:
            assert not fits(sleepers)
            continue
        assert fits(ended)
        assert all(each in sleepers for each in ended)
        smaller = (part for size in range(len(ended)) for part in itertools.combinations(ended, size))
        assert not any(fits(part) for part in smaller)
