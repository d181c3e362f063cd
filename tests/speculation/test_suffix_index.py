"""Tests drafts that are taken from a sequence's own earlier tokens."""

from __future__ import annotations

import random

import pytest

from llm_serving.speculation import suffix_index
from llm_serving.speculation.suffix_index import MAX_MATCH, MIN_MATCH, SuffixIndex


def brute_force(tokens: list[int], num_tokens: int, places: int = 6) -> tuple[list[int], int] | None:
    """Returns the draft, found by comparing all earlier places of the last two tokens."""
    found = []
    for end in range(len(tokens) - 1, MIN_MATCH - 1, -1):
        length = 0
        while length < min(MAX_MATCH, end) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= MIN_MATCH:
            found.append((length, end))
    if not found:
        return None
    length, end = max(found[:places], key=lambda pair: pair[0])
    following = list(tokens)
    draft = []
    for place in range(end, end + num_tokens):
        draft.append(following[place])
        following.append(draft[-1])
    return draft, length


def test_the_tokens_after_the_longest_match_are_proposed() -> None:
    index = SuffixIndex([1, 2, 3, 40, 9, 2, 3, 50, 7, 1, 2, 3])
    draft = index.propose(2)
    assert draft is not None
    assert (draft.token_ids, draft.length) == ([40, 9], 3)


def test_without_an_earlier_pair_there_is_no_draft() -> None:
    assert SuffixIndex([1, 2, 3, 4]).propose(3) is None
    assert SuffixIndex([]).propose(3) is None
    assert SuffixIndex([5, 5, 5]).propose(0) is None


def test_a_match_that_overlaps_the_end_repeats_its_period() -> None:
    draft = SuffixIndex([8, 1, 2, 1, 2, 1, 2]).propose(5)
    assert draft is not None
    assert draft.token_ids == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("vocabulary", [2, 3, 10])
def test_drafts_are_those_of_a_comparison_of_all_places(vocabulary: int) -> None:
    rng = random.Random(vocabulary)
    tokens = [rng.randrange(vocabulary) for _ in range(3)]
    index = SuffixIndex(tokens)
    for _ in range(300):
        draft = index.propose(4)
        assert (None if draft is None else (draft.token_ids, draft.length)) == brute_force(tokens, 4)
        tokens.append(rng.randrange(vocabulary))
        index.extend(tokens[-1:])


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_index, "MAX_INDEXED_TOKENS", 64)
    index = SuffixIndex(range(1000))
    assert len(index) == 32
    for token in range(500):
        index.extend([token % 7])
        assert len(index) <= 64
    draft = index.propose(3)
    assert draft is not None
    assert draft.token_ids == [500 % 7, 501 % 7, 502 % 7]


def test_guessed_tokens_count_as_the_last_tokens() -> None:
    index = SuffixIndex([1, 2, 3, 4, 5, 9, 9, 1, 2])
    draft = index.propose(2, [3])
    assert draft is not None
    assert (draft.token_ids, draft.length) == ([4, 5], 3)
    assert index.propose(2, [7]) is None
    assert index.propose(1, [9, 9, 1, 2]) is not None
