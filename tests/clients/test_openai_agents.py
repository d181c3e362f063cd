"""Tests ten runs of the client library openai-agents, with chats and with responses."""

import asyncio
from typing import Literal

import openai
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)  # fmt: skip
from common import CITIES, KEY, MODEL, QUESTION
from pydantic import BaseModel

set_tracing_disabled(True)
KINDS = [OpenAIChatCompletionsModel, OpenAIResponsesModel]


class Place(BaseModel):
    """A place."""

    city: Literal["Paris", "Rome"]


def agent_of(url, kind, **more):
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    settings = more.pop("settings", ModelSettings(temperature=0, max_tokens=60))
    return Agent(name="Helper", model=kind(model=MODEL, openai_client=client), model_settings=settings, **more)


@pytest.mark.parametrize("kind", KINDS)
def test_answer(url, kind):
    result = Runner.run_sync(agent_of(url, kind), QUESTION)
    assert "Paris" in result.final_output


@pytest.mark.parametrize("kind", KINDS)
def test_stream_is_the_answer(url, kind):
    async def run():
        streamed = Runner.run_streamed(agent_of(url, kind), QUESTION)
        texts = [event.data.delta async for event in streamed.stream_events()
                 if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"]  # fmt: skip
        return "".join(texts), streamed.final_output

    text, final = asyncio.run(run())
    assert text == final != ""


@pytest.mark.parametrize("kind", KINDS)
def test_structured_output(url, kind):
    agent = agent_of(url, kind, output_type=Place, settings=ModelSettings(temperature=0, max_tokens=200))
    assert Runner.run_sync(agent, "Name a city.").final_output.city in CITIES


@pytest.mark.parametrize("kind", KINDS)
def test_tool_call(url, kind):
    called = []

    @function_tool
    def weather(city: Literal["Paris", "Rome"]) -> str:
        """Returns the weather of a city."""
        called.append(city)
        return f"sunny in {city}"

    settings = ModelSettings(temperature=0, max_tokens=120, tool_choice="weather", parallel_tool_calls=False)
    agent = agent_of(url, kind, tools=[weather], settings=settings, tool_use_behavior="stop_on_first_tool")
    assert Runner.run_sync(agent, QUESTION).final_output == f"sunny in {called[0]}"


@pytest.mark.parametrize("kind", KINDS)
def test_error(url, kind):
    agent = agent_of(url, kind, settings=ModelSettings(temperature=9))
    with pytest.raises(openai.BadRequestError, match="temperature"):
        Runner.run_sync(agent, QUESTION)
