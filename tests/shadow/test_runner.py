"""Tests shadow serving with models without agents: the fraction of scored requests, idle times, interruptions, and
versions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llm_serving.config.shadow_section import ShadowConfig
from llm_serving.errors import ContextLengthError, RequestError
from llm_serving.ipc.tiles import PromptTile
from llm_serving.registry.states import ModelState
from llm_serving.request import FinishReason, Request, TokenLogits
from llm_serving.sampling_params import SamplingParams
from llm_serving.shadow.comparison import ScoredAnswer
from llm_serving.shadow.runner import MAX_ATTEMPTS, POLL_S, ShadowRunner
from llm_serving.shadow.scoring import ServedAnswer, answer_of, score
from support.fake_models import Models
from support.model_scripts import play

ANSWER = ServedAnswer([1, 2], [3, 4], b"")


class Setup:
    """A shadow runner whose scores come from a script. ``requests`` has the users' requests of each model."""

    def __init__(self, models: Models, **settings: Any) -> None:
        self.models = models
        self.log: list[dict[str, Any]] = []
        self.scored: list[str] = []
        self.requests = {"main": 0, "next": 0}
        self.running = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None
        config = ShadowConfig(**{"model": "next", "share": 1.0, "min_answers": 1, **settings})
        log: Any = SimpleNamespace(event=lambda name, **fields: self.log.append(fields))
        self.runner = ShadowRunner(models.registry, config, log, self._score)
        self.equip("main")

    def equip(self, name: str, text: str = "same") -> None:
        """Adds to the engine of the version ``name`` the attributes that the runner uses."""
        version: Any = self.models[name].version
        version.engine.tokenizer = SimpleNamespace(encode=lambda probe: [text])
        version.engine.status = lambda: SimpleNamespace(
            figures=SimpleNamespace(running=self.requests[name] + (name == "main") * self.running, waiting=0, swapped=0)
        )

    async def _score(self, engine: Any, answer: ServedAnswer) -> ScoredAnswer:
        self.scored.append(engine.config.model_name)
        self.running += 1
        try:
            await self.gate.wait()
        finally:
            self.running -= 1
        if self.error is not None:
            raise self.error
        return ScoredAnswer([TokenLogits(token, -1.0, 0.0, ((token, 1.0),)) for token in answer.output], 1.0)

    def offer(self, number: int = 1) -> None:
        for _ in range(number):
            self.runner.offer(self.models.registry.main.engine, ANSWER)

    async def until(self, **counts: int) -> None:
        while any(self.runner.counts[name] != count for name, count in counts.items()):
            await asyncio.sleep(POLL_S / 4)


def run(folder: Path, script: Callable[[Setup], Awaitable[None]], loaded: bool = True, **settings: Any) -> None:
    async def whole(models: Models) -> None:
        setup = Setup(models, **settings)
        if loaded:
            await models.registry.start(models["next"])
            setup.equip("next")
        setup.runner.start()
        try:
            await script(setup)
        finally:
            await setup.runner.stop()
        assert setup.running == 0
        assert all(version.num_leases == 0 for name in ("main", "next") if (version := models[name].version))

    play(whole, folder, {"next": 3})


def test_both_models_score_an_answer_and_the_recommendation_is_logged(tmp_path):
    async def script(setup: Setup) -> None:
        setup.offer()
        await setup.until(compared=1)
        assert setup.scored == ["main", "next"]
        assert setup.runner.as_json()["recommendation"] == "promote"
        assert [event["recommendation"] for event in setup.log] == ["promote"]
        setup.runner.reset()
        assert setup.runner.as_json()["recommendation"] == "wait"

    run(tmp_path, script)


def test_only_a_share_of_the_answers_is_taken(tmp_path):
    async def script(setup: Setup) -> None:
        setup.offer(20)
        await setup.until(compared=5)
        await asyncio.sleep(0)
        assert setup.runner.counts.total() == 5

    run(tmp_path, script, share=0.25)


def test_an_answer_waits_while_users_have_requests(tmp_path):
    async def script(setup: Setup) -> None:
        setup.requests["next"] = 1
        setup.offer(3)
        await asyncio.sleep(3 * POLL_S)
        assert setup.scored == []
        setup.requests["next"] = 0
        await setup.until(compared=2, queue_full=1)

    run(tmp_path, script, max_waiting=2)


def test_the_candidate_can_be_unloaded_while_an_answer_waits(tmp_path):
    async def script(setup: Setup) -> None:
        setup.requests["main"] = 1
        setup.offer()
        await asyncio.sleep(2 * POLL_S)
        candidate: Any = setup.models["next"].version
        assert candidate.num_leases == 0
        await setup.models.registry.end(setup.models["next"], ModelState.COLD)
        await setup.until(candidate_not_ready=1)
        assert setup.scored == []

    run(tmp_path, script)


def test_an_answer_that_waited_is_scored_by_the_present_version(tmp_path):
    async def script(setup: Setup) -> None:
        setup.requests["main"] = 1
        setup.offer()
        await asyncio.sleep(2 * POLL_S)
        await setup.models.registry.reload(setup.models["next"], None, drain_first=False)
        setup.equip("next")
        setup.requests["main"] = 0
        await setup.until(compared=1)
        assert setup.runner._versions == (0, setup.models["next"].version.number)

    run(tmp_path, script)


@pytest.mark.parametrize("number", [0, 1])
def test_answers_with_images_are_not_scored(number):
    tiles = (PromptTile(0, 1, 0, b""),) * number
    request = Request("r", [1, 2], SamplingParams(max_tokens=2), 0.0, output_token_ids=[3, 4], tiles=tiles)
    request.finish_reason = FinishReason.LENGTH
    answer = answer_of(request)
    assert (answer.output, answer.has_images) == (((), True) if number else ([3, 4], False))
    if number:
        engine: Any = None
        with pytest.raises(RequestError, match="without its images"):
            asyncio.run(score(engine, answer))


def test_a_request_of_a_user_interrupts_and_the_answer_is_computed_later(tmp_path):
    async def script(setup: Setup) -> None:
        setup.gate.clear()
        setup.offer()
        while not setup.running:
            await asyncio.sleep(0)
        setup.requests["main"] = 1
        while setup.running:
            await asyncio.sleep(0)
        assert setup.runner.comparison.answers == 0
        setup.requests["main"] = 0
        setup.gate.set()
        await setup.until(compared=1)
        assert setup.scored == ["main", "main", "next"]

    run(tmp_path, script)


def test_an_answer_is_given_up_after_many_interruptions(tmp_path):
    async def script(setup: Setup) -> None:
        setup.gate.clear()
        setup.offer()
        for _ in range(MAX_ATTEMPTS):
            while not setup.running:
                await asyncio.sleep(0)
            setup.requests["main"] = 1
            while setup.running:
                await asyncio.sleep(0)
            setup.requests["main"] = 0
        await setup.until(interrupted=1)

    run(tmp_path, script)


@pytest.mark.parametrize(
    ("change", "outcome"),
    [("cold", "candidate_not_ready"), ("tokenizer", "other_tokenizer"), ("refused", "failed")],
)
def test_answers_that_cannot_be_compared_are_counted(tmp_path, change, outcome):
    async def script(setup: Setup) -> None:
        if change == "tokenizer":
            setup.equip("next", "other")
        if change == "refused":
            setup.error = ContextLengthError("too long")
        setup.offer()
        await setup.until(**{outcome: 1})
        assert setup.runner.comparison.answers == 0
        assert setup.models.starter.started == ([] if change == "cold" else ["next"]), "the runner starts no model"

    run(tmp_path, script, loaded=change != "cold")


def test_a_reload_begins_a_new_comparison(tmp_path):
    async def script(setup: Setup) -> None:
        setup.offer()
        await setup.until(compared=1)
        await setup.models.registry.reload(setup.models["next"], None, drain_first=False)
        setup.equip("next")
        setup.offer()
        while setup.scored != ["main", "next"] * 2 or setup.running:
            await asyncio.sleep(0)
        await setup.until(compared=1)
        assert setup.runner.comparison.answers == 1

    run(tmp_path, script)


def test_answers_of_other_models_are_not_taken(tmp_path):
    async def script(setup: Setup) -> None:
        other: Any = setup.models["next"].version
        setup.runner.offer(other.engine, ANSWER)
        setup.runner.offer(setup.models.registry.main.engine, ServedAnswer([1], [], b""))
        await asyncio.sleep(2 * POLL_S)
        assert setup.runner.counts.total() == 0

    run(tmp_path, script)
