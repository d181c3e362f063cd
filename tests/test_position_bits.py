"""Tests the comparison of the bits of positions. It must detect every planted difference."""

from __future__ import annotations

import pytest

from support.position_bits import FORCED_STEPS, SHARED_TOKENS, check_position_bits, check_sharing_bits


def digests() -> dict[str, list[str]]:
    """Returns the digests of a sequence that has the same bits in each way of computing it."""
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
def test_a_missing_position_fails(way: str) -> None:
    planted = digests()
    del planted[way][-1]
    with pytest.raises(AssertionError):
        check_position_bits(planted)


def test_equal_positions_fail() -> None:
    same = digests()
    same["alone"][1] = same["batched"][1] = same["alone"][2]
    with pytest.raises(AssertionError, match="all different"):
        check_position_bits(same)


def shared_digests() -> dict[str, list[str]]:
    plain = [f"{number} digest{number}" for number in range(SHARED_TOKENS)]
    both = {"prefix of another row": plain * 2, "copied tail": plain * 2}
    return {"plain": plain, **both, **{f"way {index}": list(plain) for index in range(5)}}


def test_equal_bits_over_shared_blocks_pass() -> None:
    check_sharing_bits(shared_digests())


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("way", ["prefix of another row", "copied tail", "way 0", "way 4"])
def test_a_difference_over_shared_blocks_fails(way: str, place: int) -> None:
    planted = shared_digests()
    planted[way][place] += "!"
    with pytest.raises(AssertionError, match=way):
        check_sharing_bits(planted)


def test_a_missing_way_fails() -> None:
    planted = shared_digests()
    del planted["way 2"]
    with pytest.raises(AssertionError):
        check_sharing_bits(planted)
