"""Sends requests to /v1/completions, for tests that compare answers bit by bit.

Requests run together or one by one, and are streamed or not.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import aiohttp

__all__ = ["assert_same", "count_changed", "run_alone", "run_together"]


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
    """Sends a streamed request and joins its pieces.

    Returns None if the client disconnects after ``leave_after`` pieces.
    """
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


async def run_together(
    url: str, bodies: list[dict[str, Any]], seed: int, *, leave: float = 0.1
) -> list[tuple[Any, ...] | None]:
    """Sends all requests in random order, a few at a time.

    Half of the requests stream. A fraction ``leave`` of the clients disconnects before the end.
    """
    draw = random.Random(seed)
    kinds = [draw.choice(["stream", "plain"]) if draw.random() >= leave else "leave" for _ in bodies]
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
    assert sum(kind == "leave" for kind in kinds) >= leave * len(bodies) / 2
    return answers


def assert_same(answer: tuple[Any, ...], expected: tuple[Any, ...], body: dict[str, Any]) -> None:
    """Checks that two answers have the same token ids, log-probabilities, text and finish reason."""
    text, ids, logprobs, tops, reason = answer
    assert ids == expected[1], body
    assert logprobs == expected[2], body
    assert text == expected[0], body
    assert reason == expected[4], body
    if body["logprobs"]:
        assert tops == expected[3], body


def count_changed(
    answers: list[tuple[Any, ...] | None], expected: list[tuple[Any, ...]], bodies: list[dict[str, Any]]
) -> tuple[int, int]:
    """Compares the answers of complete requests. Returns the number of answers that differ, and of all compared ones.
    """
    pairs = [
        (answer, wanted if body["logprobs"] else (*wanted[:3], answer[3], wanted[4]))
        for body, wanted, answer in zip(bodies, expected, answers, strict=True)
        if answer is not None
    ]
    return sum(answer != wanted for answer, wanted in pairs), len(pairs)
