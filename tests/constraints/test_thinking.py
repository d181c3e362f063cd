"""Tests the budget of reasoning tokens as a constraint: its masks, its copies and the tokens that it forces."""

from __future__ import annotations

import random

import numpy as np
import pytest

from llm_serving.constraints.forced import ForcedTokens
from llm_serving.constraints.thinking import ThinkingBudget
from llm_serving.constraints.token_rules import TokenRules
from llm_serving.parsing.formats import REASONING_FORMATS
from llm_serving.parsing.thinking import ThinkingWatch
from llm_serving.request import Constraint, ForkableConstraint

VOCABULARY = 256
"""Each token is one byte, so the marker at the end of the reasoning has eight tokens."""
END = list(b"</think>")
PIECES = [*map(ord, "ab<"), *"é🙂".encode(), *END]


def token_bytes(token_id: int) -> bytes:
    return bytes([token_id])


def make(
    budget: int, inner: Constraint | None = None, *, is_thinking: bool = True, name: str = "think"
) -> ThinkingBudget:
    watch = ThinkingWatch(REASONING_FORMATS[name], token_bytes, is_thinking=is_thinking)
    return ThinkingBudget(watch, budget, END, token_bytes, VOCABULARY // 32, inner)


def allowed_ids(constraint: Constraint) -> list[int]:
    bits = np.unpackbits(constraint.mask().view(np.uint8), bitorder="little")
    return [int(one) for one in bits.nonzero()[0]]


@pytest.mark.parametrize("is_thinking", [True, False])
@pytest.mark.parametrize("has_rules", [True, False])
def test_a_copy_advances_like_the_constraint_and_leaves_it_unchanged(is_thinking: bool, has_rules: bool) -> None:
    draw, rules = random.Random(5), TokenRules(VOCABULARY, forbidden=[[ord("a"), ord("b")]])
    num_forced = 0
    for _ in range(24):
        budget = draw.randrange(8)
        constraint = make(budget, rules.start(None) if has_rules else None, is_thinking=is_thinking)
        tokens = [] if is_thinking else list(b"<think>")
        for token_id in tokens:
            constraint.advance(token_id)
        for _ in range(20):
            fork, further = constraint.fork(), list[int]()
            assert fork is not None
            for _ in range(draw.randrange(12)):
                allowed = allowed_ids(fork)
                num_forced += len(allowed) == 1
                further.append(draw.choice([one for one in PIECES if one in allowed]))
                fork.advance(further[-1])
            fresh = make(budget, rules.start(None) if has_rules else None, is_thinking=is_thinking)
            for token_id in tokens:
                fresh.advance(token_id)
            assert allowed_ids(constraint) == allowed_ids(fresh), "the copy has not changed the constraint"
            assert constraint.forced_tokens() == fresh.forced_tokens()
            for token_id in further:
                fresh.advance(token_id)
            assert allowed_ids(fork) == allowed_ids(fresh)
            assert fork.forced_tokens() == fresh.forced_tokens()
            tokens.append(draw.choice([one for one in PIECES if one in allowed_ids(constraint)]))
            constraint.advance(tokens[-1])
    assert num_forced > 80


def test_the_marker_is_forced_token_by_token() -> None:
    constraint = make(2)
    assert isinstance(constraint, ForkableConstraint)
    for token_id in b"ab":
        assert constraint.forced_tokens() == []
        constraint.advance(token_id)
    for place, token_id in enumerate(END):
        assert constraint.forced_tokens() == END[place:]
        assert allowed_ids(constraint) == [token_id]
        constraint.advance(token_id)
    assert constraint.forced_tokens() == []
    assert len(allowed_ids(constraint)) == VOCABULARY


def test_the_tokens_of_a_grammar_are_forced_up_to_the_budget() -> None:
    text = list(b"abcdefgh")
    assert make(3, ForcedTokens(text, VOCABULARY)).forced_tokens() == text[:3]
    assert make(3, ForcedTokens(text, VOCABULARY), is_thinking=False).forced_tokens() == text
    constraint = make(0, ForcedTokens(END + text, VOCABULARY))
    assert constraint.forced_tokens() == END
    for token_id in END:
        constraint.advance(token_id)
    assert constraint.forced_tokens() == text


class NotCopied:
    """A constraint that cannot be copied."""

    num_words = VOCABULARY // 32
    has_failed = True

    def advance(self, token_id: int) -> None:
        pass

    def mask(self) -> np.ndarray:
        return np.full(self.num_words, 0xFFFFFFFF, np.uint32)

    def forced_tokens(self) -> list[int]:
        return []

    def fork(self) -> None:
        return None


def test_the_grammar_decides_whether_a_copy_is_possible_and_whether_it_has_failed() -> None:
    assert make(1, NotCopied()).fork() is None
    assert make(1, NotCopied()).has_failed
    assert not make(1).has_failed
