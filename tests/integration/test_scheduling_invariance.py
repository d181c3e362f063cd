"""Text never depends on scheduling: 200 mixed concurrent requests equal the same requests run alone, bit for bit."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import aiohttp
import pytest
from server_process import running_server

NUM_REQUESTS = 200
VOCAB = 1900
PROMPTS = [
    "Once upon a time",
    "The capital of France is",
    "What is 2 + 3?",
    "A fox and a river",
    "The sea is",
    "My name is Tiny and",
]

# Small enough that blocks run out and sequences are preempted.
PRESSED = ["model_config.max_generate_length=256", "pa_config.num_blocks=18", "model_config.decode_batch_size=[24]"]


def make_requests(seed: int) -> list[dict[str, Any]]:
    """Bodies for /v1/completions: greedy and sampled, with and without penalties, short and long."""
    draw = random.Random(seed)
    return [make_request(draw, index) for index in range(NUM_REQUESTS)]


def make_request(draw: random.Random, index: int) -> dict[str, Any]:
    if draw.random() < 0.5:
        prompt: object = draw.choice(PROMPTS)
    else:
        prompt = [draw.randrange(300, VOCAB) for _ in range(draw.choice([1, 2, 15, 16, 17, 40, 120]))]
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": draw.choice([1, 2, 16, 33, 64]),
        "temperature": 0.0,
        "logprobs": draw.choice([0, 3]),
        "return_token_ids": True,
        "ignore_eos": draw.random() < 0.7,
    }
    if draw.random() < 0.6:
        body |= {"temperature": draw.choice([0.7, 1.0, 1.3]), "seed": index, "top_p": draw.choice([1.0, 0.9])}
        body |= {"top_k": draw.choice([0, 20]), "min_p": draw.choice([0.0, 0.05])}
    if draw.random() < 0.3:
        body |= {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    return body


async def complete(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[Any, ...]:
    async with session.post(f"{url}/v1/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        choice = answer["choices"][0]
        logprobs = choice["logprobs"]
        return (
            choice["text"],
            choice["token_ids"],
            logprobs["token_logprobs"],
            logprobs["top_logprobs"],
            choice["finish_reason"],
        )


async def stream(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], leave_after: int | None = None
) -> tuple[Any, ...] | None:
    """The whole answer put together from its pieces; None when left after so many pieces."""
    text, ids, logprobs, tops, reason, pieces = "", [], [], [], None, 0
    async with session.post(f"{url}/v1/completions", json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            choice = json.loads(line[6:])["choices"][0]
            text += choice["text"]
            ids += choice["token_ids"]
            if choice["logprobs"] is not None:
                logprobs += choice["logprobs"]["token_logprobs"]
                tops += choice["logprobs"]["top_logprobs"] or []
            reason = choice["finish_reason"] or reason
            pieces += 1
            if leave_after is not None and pieces >= leave_after:
                response.close()
                return None
    return text, ids, logprobs, tops or None, reason


async def run_alone(url: str, bodies: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    async with aiohttp.ClientSession() as session:
        return [await complete(session, url, body) for body in bodies]


async def run_together(url: str, bodies: list[dict[str, Any]], seed: int) -> list[tuple[Any, ...] | None]:
    """All at once, in random order, in small waves; half of them streaming, one in ten left early."""
    draw = random.Random(seed)
    kinds = [draw.choice(["stream", "plain"]) if draw.random() > 0.1 else "leave" for _ in bodies]
    answers: list[tuple[Any, ...] | None] = [None] * len(bodies)

    async def one(index: int, session: aiohttp.ClientSession, delay: float) -> None:
        await asyncio.sleep(delay)
        if kinds[index] == "plain":
            answers[index] = await complete(session, url, bodies[index])
        else:
            leave_after = draw.randrange(1, 6) if kinds[index] == "leave" else None
            answers[index] = await stream(session, url, bodies[index], leave_after)

    order = draw.sample(range(len(bodies)), len(bodies))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(one(index, session, place * 0.002) for place, index in enumerate(order)))
    assert sum(kind == "leave" for kind in kinds) >= 10
    return answers


@pytest.fixture(scope="module")
def bodies():
    return make_requests(seed=7)


@pytest.fixture(scope="module")
def alone(bodies, tmp_path_factory):
    """Every request by itself on a server that is not pressed for memory."""
    with running_server(tmp_path_factory.mktemp("alone"), ["pa_config.num_blocks=2048"]) as server:
        return asyncio.run(run_alone(server.url, bodies))


@pytest.mark.parametrize("policy", ["fcfs", "prefill_first"])
@pytest.mark.parametrize("ahead", [0, 2])
def test_concurrent_answers_equal_lone_ones(policy, ahead, bodies, alone, tmp_path):
    overrides = [*PRESSED, f"scheduler_config.policy={policy}", f"scheduler_config.decode_steps_ahead={ahead}"]
    with running_server(tmp_path, overrides) as server:
        together = asyncio.run(run_together(server.url, bodies, seed=ahead))
        engine = server.wait_until_idle()
    compared = 0
    for body, expected, answer in zip(bodies, alone, together, strict=True):
        if answer is not None:
            assert_same(answer, expected, body)
            compared += 1
    assert compared >= 150
    assert engine["preemptions"] > 0, "the pool was meant to be too small"


def assert_same(answer, expected, body):
    text, ids, logprobs, tops, reason = answer
    assert ids == expected[1], body
    assert logprobs == expected[2], body
    assert text == expected[0], body
    assert reason == expected[4], body
    if body["logprobs"]:
        assert tops == expected[3], body
