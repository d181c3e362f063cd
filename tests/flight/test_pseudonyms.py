"""Tests that the pseudonyms of a recording reveal only which prefixes of prompts are equal."""

from __future__ import annotations

import random

from llm_serving.flight.pseudonyms import FIRST_PSEUDONYM, Pseudonyms


def names(pseudonyms, tokens, salt=b""):
    return pseudonyms.chain(salt).extend(tokens)


def common(one, other):
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_pseudonyms_are_equal_as_far_as_the_tokens_are():
    pseudonyms, rng = Pseudonyms(), random.Random(3)
    for _ in range(300):
        one = [rng.randrange(3) for _ in range(12)]
        other = one[: rng.randrange(12)] + [rng.randrange(3) for _ in range(5)]
        assert common(names(pseudonyms, one), names(pseudonyms, other)) == common(one, other)


def test_a_pseudonym_depends_on_all_tokens_before_it():
    pseudonyms = Pseudonyms()
    assert len(set(names(pseudonyms, [7] * 200))) == 200
    assert not set(names(pseudonyms, [1, 5, 6])) & set(names(pseudonyms, [2, 5, 6]))


def test_another_salt_or_key_gives_other_pseudonyms():
    pseudonyms = Pseudonyms(b"k" * 32)
    tokens = list(range(50))
    assert names(pseudonyms, tokens) == names(Pseudonyms(b"k" * 32), tokens)
    assert not set(names(pseudonyms, tokens)) & set(names(pseudonyms, tokens, b"salt"))
    assert not set(names(pseudonyms, tokens)) & set(names(Pseudonyms(), tokens))


def test_a_chain_can_be_extended_in_pieces_and_copied():
    pseudonyms = Pseudonyms()
    chain = pseudonyms.chain(b"s")
    first = chain.extend([1, 2, 3])
    copy = chain.copy()
    assert first + chain.extend([4]) + chain.extend([5, 6]) == names(pseudonyms, [1, 2, 3, 4, 5, 6], b"s")
    assert first + copy.extend([9]) == names(pseudonyms, [1, 2, 3, 9], b"s")


def test_pseudonyms_are_positive_and_not_reserved():
    assert all(FIRST_PSEUDONYM <= name < 2**31 for name in names(Pseudonyms(), range(5000)))
