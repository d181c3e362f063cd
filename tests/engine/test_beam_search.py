"""Compares beam search with brute force over small models, and runs it in the engine with the fake device."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import pytest

from llm_serving.engine.beam_search import MAX_BEAM_WIDTH, Beam, BeamSearchParams, SearchResult, search_beams
from llm_serving.errors import ContextLengthError, DeadlineExceededError, EngineFailedError, QueueFullError
from llm_serving.request import FinishReason, SchedulingParams, TokenLogits
from llm_serving.sampling_params import MAX_TOP_LOGITS
from support.fakes import make_request
from support.served_engine import served

END = 0


class Model:
    """A model whose logits are hashes of the seed, the output so far and the token.

    With ``coarse``, many logits are equal.
    """

    def __init__(self, vocabulary: int, seed: int, *, coarse: bool = False) -> None:
        self.vocabulary, self._seed, self._coarse = vocabulary, seed, coarse
        self.steps: list[list[tuple[int, ...]]] = []

    def logits(self, output: Sequence[int]) -> list[float]:
        values = []
        for token in range(self.vocabulary):
            digest = blake2b(repr((self._seed, tuple(output), token)).encode(), digest_size=4).digest()
            value = int.from_bytes(digest, "little") / 2**32 * 6
            values.append(float(round(value / 3)) if self._coarse else value)
        return values

    def entry(self, output: Sequence[int]) -> TokenLogits:
        logits = self.logits(output)
        logsumexp = math.log(sum(math.exp(value) for value in logits))
        ranked = sorted(enumerate(logits), key=lambda pair: (-pair[1], pair[0]))
        token, logit = ranked[0]
        return TokenLogits(token, logit - logsumexp, logsumexp, tuple(ranked[:MAX_TOP_LOGITS]))

    async def expand(self, outputs: Sequence[tuple[int, ...]]) -> list[TokenLogits]:
        self.steps.append(list(outputs))
        return [self.entry(output) for output in outputs]

    def logprob(self, output: Sequence[int], token: int) -> float:
        entry = self.entry(output)
        return self.logits(output)[token] - entry.logsumexp


def plain_search(model: Model, params: BeamSearchParams) -> list[tuple[tuple[int, ...], float]]:
    """Runs a textbook beam search without early stop. Returns (output, score) of each beam, best first."""
    live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    finished: list[tuple[tuple[int, ...], float]] = []
    for length in range(1, params.max_tokens + 1):
        candidates = [
            ((*output, token), total + model.logprob(output, token), logit)
            for output, total in live
            for token, logit in model.entry(output).top[: params.num_candidates]
        ]
        candidates.sort(key=lambda candidate: -candidate[1])
        is_end = [candidate[0][-1] in params.end_token_ids for candidate in candidates]
        going = [(output, total) for (output, total, _), ends in zip(candidates, is_end, strict=True) if not ends]
        finished += [(output, params.score(total, length)) for (output, total, _), ends in
                     zip(candidates, is_end, strict=True) if ends]  # fmt: skip
        live = going[: params.width]
    finished += [(output, params.score(total, params.max_tokens)) for output, total in live]
    return sorted(finished, key=lambda entry: -entry[1])[: params.width]


def search(model: Model, params: BeamSearchParams) -> list[Beam]:
    return asyncio.run(search_beams(model.expand, params))


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("ends", [frozenset(), frozenset({END}), frozenset({END, 3, 4})])
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("coarse", [False, True])
def test_the_search_equals_a_textbook_search(width: int, ends: frozenset[int], penalty: float, coarse: bool) -> None:
    params = BeamSearchParams(width, 6, penalty, ends)
    for seed in range(8):
        model = Model(7, seed, coarse=coarse)
        found = [(beam.token_ids, params.score(beam.logprob, len(beam.token_ids))) for beam in search(model, params)]
        assert found == plain_search(model, params), seed


@pytest.mark.parametrize("seed", range(10))
def test_a_wide_search_finds_the_best_sequence(seed: int) -> None:
    """The search covers all sequences of three tokens and three steps. One of the tokens ends the output."""
    model = Model(3, seed)
    params = BeamSearchParams(MAX_BEAM_WIDTH, 3, 1.0, frozenset({END}))
    complete = [
        output
        for length in (1, 2, 3)
        for output in itertools.product(range(3), repeat=length)
        if END not in output[:-1] and (output[-1] == END or length == 3)
    ]

    def score(output: tuple[int, ...]) -> float:
        return params.score(sum(model.logprob(output[:i], output[i]) for i in range(len(output))), len(output))

    best = sorted(complete, key=score, reverse=True)
    assert [beam.token_ids for beam in search(model, params)] == best[:MAX_BEAM_WIDTH]


def test_one_beam_is_greedy() -> None:
    model = Model(20, 5)
    [beam] = search(model, BeamSearchParams(1, 12))
    greedy: list[int] = []
    while len(greedy) < 12:
        greedy.append(model.entry(greedy).token_id)
    assert beam.token_ids == tuple(greedy)
    assert beam.finish_reason is FinishReason.LENGTH


def test_a_beam_carries_what_its_tokens_were_worth() -> None:
    model = Model(9, 3)
    for beam in search(model, BeamSearchParams(3, 5, end_token_ids=frozenset({END}))):
        assert tuple(entry.token_id for entry in beam.logits) == beam.token_ids
        assert [entry.logprob for entry in beam.logits] == [
            model.logprob(beam.token_ids[:i], token) for i, token in enumerate(beam.token_ids)
        ]
        assert (beam.token_ids[-1] == END) == (beam.finish_reason is FinishReason.STOP)


@pytest.mark.parametrize("num_top", [0, 2, MAX_TOP_LOGITS])
def test_each_token_of_a_beam_keeps_the_wanted_number_of_alternatives(num_top: int) -> None:
    model = Model(9, 4)
    beams = search(model, BeamSearchParams(3, 5, end_token_ids=frozenset({END}), num_top=num_top))
    for beam in beams:
        expected = [model.entry(beam.token_ids[:place]).top[:num_top] for place in range(len(beam.token_ids))]
        assert [entry.top for entry in beam.logits] == expected
        assert [entry.top for entry in beam.logits[1:]] == expected[1:]
        assert beam.logits[-1].top == expected[-1]
        assert len(beam.logits) == len(beam.token_ids)


def test_the_logits_of_beams_are_few_objects() -> None:
    """Many objects would be freed in one call, and the event loop would be blocked meanwhile."""
    entries = Model(9, 4).entry(())

    async def expand(outputs: Sequence[tuple[int, ...]]) -> list[TokenLogits]:
        return [entries for _ in outputs]

    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        beams = asyncio.run(search_beams(expand, BeamSearchParams(4, 200, num_top=9)))
        gc.collect()
        assert len(gc.get_objects()) - before < 200
    finally:
        gc.enable()
    assert sum(len(entry.top) for beam in beams for entry in beam.logits) == 4 * 200 * 9


def test_the_search_ends_as_soon_as_its_result_is_certain() -> None:
    """The end token is nearly certain after two tokens. No other beam can become better, so the search ends before 100
    steps.
    """

    class Ending(Model):
        def logits(self, output: Sequence[int]) -> list[float]:
            values = super().logits(output)
            return [
                (40.0 if len(output) >= 2 else -40.0) if token == END else value for token, value in enumerate(values)
            ]

    model = Ending(6, 1)
    params = BeamSearchParams(2, 100, 0.0, frozenset({END}))
    beams = search(model, params)
    assert [len(beam.token_ids) for beam in beams] == [3, 3]
    assert len(model.steps) == 3
    short = BeamSearchParams(2, 6, 0.0, frozenset({END}))
    assert [beam.token_ids for beam in beams] == [output for output, _ in plain_search(Ending(6, 1), short)]


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"width": 0}, "width is 0; it must be 1 to 16"),
        ({"width": 17}, "width is 17; it must be 1 to 16"),
        ({"width": 16, "end_token_ids": frozenset(range(17))}, "16 beams and 17 end tokens need 33 candidates"),
    ],
)
def test_the_bounds_of_a_search_are_checked(params: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        BeamSearchParams(max_tokens=4, **params)


# The following tests run beam search in the engine.


def outputs(result: SearchResult) -> list[tuple[int, ...]]:
    return [beam.token_ids for beam in result.beams]


def test_a_search_finds_the_same_beams_alone_and_among_other_requests() -> None:
    async def run() -> None:
        prompt = list(make_request("a", 9).prompt_token_ids)
        params = BeamSearchParams(4, 6, end_token_ids=frozenset({1}))
        async with served(num_blocks=200) as serving:
            alone = await serving.engine.search("alone", prompt, params)
        async with served(num_blocks=24, max_waiting_requests=1000, prefill_batch_size=3) as serving:
            crowd = [asyncio.create_task(serving.whole(make_request(f"r{i}", 5 + i, 20))) for i in range(8)]
            searches = await asyncio.gather(*(serving.engine.search(f"s{i}", prompt, params) for i in range(3)))
            await asyncio.gather(*crowd)
            assert serving.log.named("error") == []
        assert len(set(outputs(alone))) == 4
        assert [outputs(found) for found in searches] == [outputs(alone)] * 3
        scores = [params.score(beam.logprob, len(beam.token_ids)) for beam in alone.beams]
        assert scores == sorted(scores, reverse=True)

    asyncio.run(run())


def test_the_log_and_the_receipt_speak_of_one_request() -> None:
    async def run() -> None:
        async with served() as serving:
            engine = serving.engine
            task = asyncio.create_task(
                engine.search("s", [5, 6, 7], BeamSearchParams(3, 4), engine._clock() - 1.0,
                              scheduling=SchedulingParams(tenant="t"))
            )  # fmt: skip
            await serving.until(lambda: engine.receipt("s") is not None or task.done())
            result = await task
            (line,) = serving.log.named("request_end")
            assert (line["request_id"], line["tenant"], line["finish_reason"]) == ("s", "t", "length")
            assert (line["prompt_tokens"], line["output_tokens"]) == (3, 4)
            receipt = engine.receipt("s")
            assert receipt is not None
            assert (receipt.state, receipt.num_output_tokens) == ("done", 4)
            assert receipt.timings.tokenise >= 1.0
            assert receipt.timings.e2e == pytest.approx(sum(receipt.timings.parts.values()))
            assert engine.receipt("s.0.0") is None
            assert result.num_cached_tokens == 0
            assert serving.log.named("first_token") == []

    asyncio.run(run())


def test_a_cancelled_search_leaves_nothing_behind() -> None:
    async def run() -> None:
        async with served() as serving:
            serving.executor.hold(True)
            task = asyncio.create_task(serving.engine.search("s", [5, 6, 7], BeamSearchParams(3, 4)))
            await serving.until(lambda: serving.engine.status().figures.running == 1)
            assert serving.engine.receipt("s") is not None
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            serving.executor.hold(False)
            await serving.until(serving.is_idle)
            (line,) = serving.log.named("request_end")
            assert (line["request_id"], line["finish_reason"]) == ("s", "abort")

    asyncio.run(run())


def test_stop_conditions_end_the_search() -> None:
    async def run() -> None:
        async with served(max_num_seqs=1, max_waiting_requests=1) as serving:
            engine = serving.engine
            with pytest.raises(QueueFullError):
                await engine.search("wide", [5, 6, 7], BeamSearchParams(4, 4))
            with pytest.raises(ContextLengthError):
                await engine.search("long", [5] * 48, BeamSearchParams(1, 4))
            with pytest.raises(DeadlineExceededError):
                await engine.search("late", [5], BeamSearchParams(1, 4), engine._clock() - 1.0,
                                    scheduling=SchedulingParams(deadline=0.5))  # fmt: skip
            serving.executor.step_error = "the device failed"
            with pytest.raises(EngineFailedError, match="the device failed"):
                await engine.search("broken", [5, 6], BeamSearchParams(1, 4))
            await serving.until(serving.is_idle)
            assert [(line["request_id"], line["finish_reason"]) for line in serving.log.named("request_end")] == [
                ("wide", "abort"), ("long", "abort"), ("broken", "error"),
            ]  # fmt: skip

    asyncio.run(run())
