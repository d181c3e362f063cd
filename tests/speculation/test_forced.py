"""Tests the drafts of sequences with forced tokens."""

from __future__ import annotations

from typing import Any

import pytest

from llm_serving.constraints.forced import ForcedTokens
from llm_serving.constraints.token_rules import TokenRules
from llm_serving.request import FinishReason, Request, RequestStatus
from llm_serving.sampling_params import SamplingParams
from llm_serving.scheduler.output import RequestUpdate
from llm_serving.speculation.forced import TILE, forced_offers

VOCABULARY = 320


def request(constraint: Any) -> Request:
    made = Request("a", [1], SamplingParams(), 0.0)
    made.constraint = constraint
    return made


def offers(update: RequestUpdate) -> tuple[list[Any], list[Any]]:
    """Returns the offers after an update, and the allowed tokens of the masks that were prepared."""
    masks: list[Any] = []
    found = forced_offers([update], lambda _, prepared: masks.extend(prepared))
    allowed = [[token for token in range(VOCABULARY) if mask[token // 32] >> token % 32 & 1] for mask in masks]
    return found, allowed


def test_the_next_tokens_are_offered_with_the_masks_after_each_of_them() -> None:
    tokens = list(range(5, 205))
    constraint = ForcedTokens(tokens, VOCABULARY)
    constraint.advance(5)
    found, allowed = offers(RequestUpdate(request(constraint), 5))
    assert found == [("a", tokens[1:TILE])]
    assert allowed == [[token] for token in tokens[2 : TILE + 1]]
    assert constraint.forced_tokens() == tokens[1:]


def test_the_last_tokens_leave_every_token_free() -> None:
    found, allowed = offers(RequestUpdate(request(ForcedTokens([7, 8], VOCABULARY)), 5))
    assert found == [("a", [7, 8])]
    assert allowed == [[8], list(range(VOCABULARY))]


@pytest.mark.parametrize("kind", ["free", "other constraint", "more tokens follow", "finished", "no token left"])
def test_other_updates_give_no_offer(kind: str) -> None:
    constraint = TokenRules(VOCABULARY).start(None) if kind == "other constraint" else ForcedTokens([7], VOCABULARY)
    made = request(None if kind == "free" else constraint)
    if kind == "finished":
        made.status, made.finish_reason = RequestStatus.FINISHED, FinishReason.LENGTH
    if kind == "no token left":
        made.constraint = ForcedTokens([], VOCABULARY)
    update = RequestUpdate(made, 5, num_later=int(kind == "more tokens follow"))
    assert offers(update) == ([], [])
