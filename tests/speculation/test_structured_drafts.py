"""Counts the decode steps of JSON that fits a schema. The grammar library and a tokenizer are real, the text is given.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import numpy as np
import pytest

from llm_serving.config import load_config
from llm_serving.constraints.compiler import CompiledGrammar, GrammarCompiler
from llm_serving.constraints.grammar import schema_grammar
from llm_serving.engine.tokenizer import Tokenizer
from llm_serving.engine.tokenizer_backends import load_tokenizer
from llm_serving.request import FinishReason, Request, RequestStatus
from llm_serving.sampling_params import SamplingParams
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepKind, StepResult
from llm_serving.speculation.constrained import Draft
from llm_serving.speculation.costs import FORCED, REPEATED, SEEN
from llm_serving.speculation.look_ahead import Mask
from llm_serving.speculation.places import MAX_ALLOWED, MAX_PLACES, Places, place_of
from llm_serving.speculation.speculator import MAX_SALTS, Speculator, _Track
from llm_serving.speculation.suffix_index import MAX_MATCH, SuffixIndex

KEYS = ["customer_name", "delivery_address", "payment_method", "contact_phone"]
SCHEMA = {
    "type": "object",
    "properties": {key: {"type": "string"} for key in KEYS},
    "required": KEYS,
    "additionalProperties": False,
}
COMPACT = '{"customer_name": "%s", "delivery_address": "%s", "payment_method": "%s", "contact_phone": "%s"}'
INDENTED = '{\n "customer_name": "%s",\n "delivery_address": "%s",\n "payment_method": "%s",\n "contact_phone": "%s"\n}'
FIRST, SECOND = ("Ann", "Oslo", "card", "0199"), ("Bob", "Rome", "bill", "4711")
MAX_DRAFTS = 15


@functools.cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(load_config("llama_tiny_cpu.yaml"))


@functools.cache
def grammar() -> CompiledGrammar:
    compiler = GrammarCompiler(tokenizer(), tokenizer().vocab_size, tokenizer().eos_token_ids)
    return asyncio.run(compiler.compile(schema_grammar(SCHEMA), "schema"))


class Model:
    """Generates given texts, one request after the other. Each further entry of a step takes 3 % more time."""

    def __init__(self) -> None:
        self.masks: list[Mask] = []
        self.speculator = Speculator(MAX_DRAFTS, 32, self._prepare, clock=lambda: 0.0)
        self.offered: list[list[int]] = []
        self.last_place: int | None = None
        """The place before the last token of a text."""

    def _prepare(self, _: Request, masks: list[Mask]) -> None:
        self.masks = masks

    def steps(self, text: str, salt: bytes = b"", *, is_whole: bool = True) -> int:
        """Generates a text in the grammar. Returns the number of its decode steps. The request ends with the last token
        if ``is_whole`` is True.

        Checks the mask after each draft against a grammar that follows the text.
        """
        tokens = tokenizer().encode(text, add_special_tokens=False)
        request = Request("a", [1, 2, 3], SamplingParams(), 0.0, cache_salt=salt)
        request.constraint = checked = grammar().start()
        draft: list[int] = []
        self.offered.clear()
        num_steps = 0
        while len(request.output_token_ids) < len(tokens):
            left = tokens[len(request.output_token_ids) :]
            right = next((at for at, token in enumerate(draft) if [token] != left[at : at + 1]), len(draft))
            new = left[: right + 1]
            updates = []
            for place, token in enumerate(new):
                if place and right:
                    assert checked.mask().tolist() == self.masks[place - 1].tolist()
                self.last_place = place_of(checked.mask())
                checked.advance(token)
                request.output_token_ids.append(token)
                updates.append(RequestUpdate(request, token, place, num_later=len(new) - 1 - place))
            if is_whole and len(new) == len(left):
                request.status, request.finish_reason = RequestStatus.FINISHED, FinishReason.STOP
            entries = 1 + len(draft)
            step = ScheduledStep(0, StepKind.DECODE, [request] * entries, rows=[0] * entries, num_drafts=len(draft))
            seconds = 0.01 * (1 + 0.03 * len(draft))
            result = StepResult(0, [0] * entries, graph_us=round(1e6 * seconds))
            self.speculator.completed(step, result, updates, seconds)
            draft = dict(self.speculator.take_offers()).get("a", [])
            self.offered.append(draft)
            num_steps += 1
        return num_steps


def num_tokens(text: str) -> int:
    return len(tokenizer().encode(text, add_special_tokens=False))


@pytest.mark.parametrize("form", [COMPACT, INDENTED])
def test_the_parts_between_forced_keys_and_free_values_take_no_step_of_their_own(form: str) -> None:
    """Only the tokens of the four values need steps, and few others."""
    model = Model()
    first, second = model.steps(form % FIRST), model.steps(form % SECOND)
    values = sum(num_tokens(f'"{value}"') for value in SECOND)
    assert second <= values + 4
    assert first < num_tokens(form % FIRST) / 2


def test_the_last_token_of_a_request_is_remembered() -> None:
    model = Model()
    model.steps(COMPACT % FIRST)
    assert model.speculator._tracks == {}
    assert model.last_place is not None
    last = model.speculator._places[b""].guess(model.last_place)
    assert last is not None
    assert tokenizer().token_bytes(last.token_id) == b"}"


def test_requests_share_places_only_within_their_cache_salt() -> None:
    """After its first token, a new request only knows the places of earlier requests."""
    model = Model()
    model.steps(COMPACT % FIRST, salt=b"one")
    known = len(model.offered[0])
    for salt, is_shared in ((b"two", False), (b"one", True)):
        model.steps(COMPACT % SECOND, salt=salt)
        assert (len(model.offered[0]) > known) is is_shared, salt


def test_the_text_of_a_request_counts_more_than_that_of_others() -> None:
    track = _Track(Request("a", [1], SamplingParams(), 0.0), SuffixIndex(), Places())
    track.note_place(7, 5)
    for _ in range(2):
        track.shared.note(7, 6)
        track.shared.note(8, 6)
    assert track.guess_at(7) == [(5, SEEN)]
    assert track.guess_at(8) == [(6, REPEATED)]
    assert track.guess_at(9) == track.guess_at(None) == []


def test_wrong_guesses_make_forced_tokens_no_less_probable() -> None:
    speculator = Model().speculator
    track = _Track(Request("a", [1], SamplingParams(), 0.0), SuffixIndex(), Places())
    track.draft = Draft([5, 6], [FORCED, MAX_MATCH])
    before = speculator._chance(track, 0), speculator._chance(track, 1)
    for _ in range(10):
        track.chance.note(False)
    assert speculator._chance(track, 0) == before[0] >= 0.9
    assert speculator._chance(track, 1) < 0.7 * before[1]


def mask_of(*token_ids: int, size: int = 4096) -> Mask:
    bits = np.zeros(size, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def test_a_place_is_a_set_of_few_allowed_tokens() -> None:
    assert place_of(mask_of(3, 70)) == place_of(mask_of(3, 70))
    assert place_of(mask_of(3, 70)) != place_of(mask_of(3, 71))
    assert place_of(mask_of(*range(MAX_ALLOWED))) is not None
    assert place_of(mask_of(*range(MAX_ALLOWED + 1))) is None
    assert place_of(mask_of(*range(0, 64 * (MAX_ALLOWED + 1), 64), size=64 * 2 * MAX_ALLOWED)) is None


def test_the_last_token_at_a_place_is_guessed() -> None:
    places = Places()
    assert places.guess(7) is None
    found: list[Any] = []
    for token_id in (5, 5, 6, 6):
        places.note(7, token_id)
        guess = places.guess(7)
        assert guess is not None
        found.append((guess.token_id, guess.is_repeated))
    assert found == [(5, False), (5, True), (6, False), (6, True)]


def test_places_and_salts_that_are_not_used_are_forgotten() -> None:
    places = Places()
    for place in range(MAX_PLACES + 2):
        places.note(place, 1)
        places.note(0, 1)
    assert places.guess(0) is not None
    assert places.guess(1) is places.guess(2) is None
    assert places.guess(3) is not None
    model = Model()
    for number in range(MAX_SALTS + 5):
        model.steps('{"', salt=b"%d" % number, is_whole=False)
    assert len(model.speculator._places) == MAX_SALTS
    assert b"4" not in model.speculator._places
