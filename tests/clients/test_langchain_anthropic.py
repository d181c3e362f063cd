"""Ten calls of langchain-anthropic."""

import asyncio
from typing import Literal

import anthropic
import pytest
from common import CITIES, KEY, MODEL, QUESTION
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel, ConfigDict


class Place(BaseModel):
    """A place."""

    model_config = ConfigDict(extra="forbid")  # otherwise the tiny model adds members until its last token
    city: Literal["Paris", "Rome"]


@tool(args_schema=Place)
def weather(city: Literal["Paris", "Rome"]) -> str:
    """Returns the weather of a city."""
    return f"sunny in {city}"


def chat(url, **more):
    return ChatAnthropic(base_url=url, api_key=KEY, model=MODEL, temperature=0, max_retries=0,
                         **{"max_tokens": 40, **more})  # fmt: skip


def test_answer(url):
    answer = chat(url).invoke(QUESTION)
    assert "Paris" in answer.content
    assert answer.response_metadata["stop_reason"] == "end_turn"


def test_usage(url):
    usage = chat(url).invoke(QUESTION).usage_metadata
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]


def test_conversation(url):
    messages = [SystemMessage("Be short."), HumanMessage("Hello!"), AIMessage("Hello."), HumanMessage(QUESTION)]
    assert chat(url).invoke(messages).content


def test_limit(url):
    assert chat(url, max_tokens=2).invoke(QUESTION).response_metadata["stop_reason"] == "max_tokens"


def test_stream_is_the_answer(url):
    pieces = [piece.text for piece in chat(url).stream(QUESTION)]
    assert "".join(map(str, pieces)) == chat(url).invoke(QUESTION).content


def test_asynchronous_batch(url):
    answers = asyncio.run(chat(url).abatch([QUESTION] * 4))
    assert len({answer.content for answer in answers}) == 1


def test_tool_call_and_its_result(url):
    model = chat(url, max_tokens=120).bind_tools([weather], tool_choice="weather", parallel_tool_calls=False)
    answer = model.invoke(QUESTION)
    [call] = answer.tool_calls
    assert call["args"]["city"] in CITIES
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    again = chat(url).bind_tools([weather]).invoke([HumanMessage(QUESTION), answer, result])
    assert isinstance(again.content, str | list)


def test_structured_output(url):
    model = chat(url, max_tokens=200).with_structured_output(Place)
    assert model.invoke("Name a city.").city in CITIES


def test_stop_sequence(url):
    whole = chat(url).invoke(QUESTION).content
    assert chat(url).invoke(QUESTION, stop=["Paris"]).content.rstrip() == whole.split("Paris")[0].rstrip()


def test_error(url):
    with pytest.raises(anthropic.NotFoundError):
        ChatAnthropic(base_url=url, api_key=KEY, model="claude-other", max_retries=0, max_tokens=5).invoke("a")
