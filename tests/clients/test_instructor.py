"""Tests ten calls of the client library instructor."""

import asyncio
from typing import Literal

import instructor
import openai
import pytest
from common import CITIES, KEY, MODEL
from pydantic import BaseModel, ConfigDict

ASK = [{"role": "user", "content": "Name a city."}]
FIXED = {"model": MODEL, "temperature": 0, "max_tokens": 200, "messages": ASK, "max_retries": 0}
MODES = [instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT]


class Place(BaseModel):
    """A place."""

    model_config = ConfigDict(extra="forbid")  # otherwise the tiny model adds members until its last token
    city: Literal["Paris", "Rome"]


class Trip(BaseModel):
    """A trip."""

    model_config = ConfigDict(extra="forbid")
    start: Place
    is_long: bool


def client_of(url, mode=instructor.Mode.JSON_SCHEMA, kind=openai.OpenAI):
    client = kind(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    return instructor.from_openai(client, mode=mode)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_place(url, mode):
    more = {} if mode is instructor.Mode.JSON_SCHEMA else {"parallel_tool_calls": False}
    assert client_of(url, mode).chat.completions.create(response_model=Place, **more, **FIXED).city in CITIES


def test_nested(url):
    trip = client_of(url).chat.completions.create(response_model=Trip, **{**FIXED, "temperature": 1}, seed=3)
    assert trip.start.city in CITIES


def test_with_completion(url):
    place, raw = client_of(url).chat.completions.create_with_completion(response_model=Place, **FIXED)
    assert place.city in raw.choices[0].message.content


def test_asynchronous(url):
    async def run():
        client = client_of(url, kind=openai.AsyncOpenAI)
        return await asyncio.gather(*(client.chat.completions.create(response_model=Place, **FIXED) for _ in range(4)))

    assert len({place.city for place in asyncio.run(run())}) == 1


def test_partial(url):
    pieces = list(client_of(url).chat.completions.create_partial(response_model=Place, **FIXED))
    assert pieces[-1].city in CITIES


def test_seeds_are_repeatable(url):
    def draw(seed):
        return client_of(url).chat.completions.create(response_model=Trip, **{**FIXED, "temperature": 1}, seed=seed)

    assert draw(3).model_dump() == draw(3).model_dump()


def test_plain_text(url):
    answer = client_of(url).chat.completions.create(response_model=None, **FIXED)
    assert answer.choices[0].message.content is not None


def test_error(url):
    with pytest.raises(Exception, match="temperature"):
        client_of(url).chat.completions.create(response_model=Place, **{**FIXED, "temperature": 9})
