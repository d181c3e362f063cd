"""The comparison of positions sees every difference, wherever it is planted."""

from __future__ import annotations

import pytest
from position_bits import FORCED_STEPS, check_position_bits


def digests() -> dict[str, list[str]]:
    """Of a sequence whose positions are the same however they are computed."""
    alone = [f"digest{step}" for step in range(FORCED_STEPS + 1)]
    by_step = [f"{step} {alone[step]}" for step in (0, 1, 7, FORCED_STEPS)]
    return {
        "alone": alone,
        "batched": list(alone),
        "together": alone[:1],
        "chunked": list(by_step),
        "prefilled": list(by_step),
    }


def test_equal_bits_pass() -> None:
    check_position_bits(digests())


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("way", ["alone", "batched", "together", "chunked", "prefilled"])
def test_a_difference_fails(way: str, last: bool) -> None:
    planted = digests()
    planted[way][-1 if last else 0] += "!"
    with pytest.raises(AssertionError):
        check_position_bits(planted)


@pytest.mark.parametrize("way", ["alone", "batched", "together", "chunked", "prefilled"])
def test_a_position_left_out_fails(way: str) -> None:
    planted = digests()
    del planted[way][-1]
    with pytest.raises(AssertionError):
        check_position_bits(planted)


def test_positions_that_cannot_be_told_apart_fail() -> None:
    same = digests()
    same["alone"][1] = same["batched"][1] = same["alone"][2]
    with pytest.raises(AssertionError, match="all different"):
        check_position_bits(same)
