"""Tests ten calls of the client library langchain-openai, and ten of langchain-anthropic."""

import asyncio
from typing import Literal

import anthropic
import openai
import pytest
from common import CITIES, KEY, MODEL, QUESTION
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict


class Place(BaseModel):
    """A place."""

    model_config = ConfigDict(extra="forbid")  # otherwise the tiny model adds members until its last token
    city: Literal["Paris", "Rome"]


@tool(args_schema=Place)
def weather(city: Literal["Paris", "Rome"]) -> str:
    """Returns the weather of a city."""
    return f"sunny in {city}"


def openai_chat(url, **more):
    return ChatOpenAI(base_url=f"{url}/v1", api_key=KEY, model=MODEL, temperature=0, max_retries=0,
                      **{"max_tokens": 40, **more})  # fmt: skip


def anthropic_chat(url, **more):
    return ChatAnthropic(base_url=url, api_key=KEY, model=MODEL, temperature=0, max_retries=0,
                         **{"max_tokens": 40, **more})  # fmt: skip


both = pytest.mark.parametrize("chat", [openai_chat, anthropic_chat], ids=["openai", "anthropic"])


@pytest.mark.parametrize(("chat", "reason", "end"), [(openai_chat, "finish_reason", "stop"),
                                                     (anthropic_chat, "stop_reason", "end_turn")])  # fmt: skip
def test_answer(url, chat, reason, end):
    answer = chat(url).invoke(QUESTION)
    assert "Paris" in answer.content
    assert answer.response_metadata[reason] == end


@both
def test_usage(url, chat):
    usage = chat(url).invoke(QUESTION).usage_metadata
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]


@both
def test_conversation(url, chat):
    messages = [SystemMessage("Be short."), HumanMessage("Hello!"), AIMessage("Hello."), HumanMessage(QUESTION)]
    assert chat(url).invoke(messages).content


def test_limit(url):
    assert anthropic_chat(url, max_tokens=2).invoke(QUESTION).response_metadata["stop_reason"] == "max_tokens"


@both
def test_stream_is_the_answer(url, chat):
    pieces = [str(piece.text) for piece in chat(url).stream(QUESTION)]
    assert "".join(pieces) == chat(url).invoke(QUESTION).content
    assert len(pieces) > 3


@both
def test_asynchronous_batch(url, chat):
    answers = asyncio.run(chat(url).abatch([QUESTION] * 4))
    assert len({answer.content for answer in answers}) == 1


@pytest.mark.parametrize(("chat", "choice"), [(openai_chat, {"strict": True}), (anthropic_chat, {})])
def test_tool_call_and_its_result(url, chat, choice):
    model = chat(url, max_tokens=200).bind_tools([weather], tool_choice="weather", parallel_tool_calls=False, **choice)
    answer = model.invoke("Name a city.")
    [call] = answer.tool_calls
    assert call["args"]["city"] in CITIES
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    again = chat(url).bind_tools([weather]).invoke([HumanMessage(QUESTION), answer, result])
    assert isinstance(again.content, str | list)


@pytest.mark.parametrize(("chat", "method"), [(openai_chat, "json_schema"), (openai_chat, "function_calling"),
                                              (anthropic_chat, "function_calling")])  # fmt: skip
def test_structured_output(url, chat, method):
    model = chat(url, max_tokens=200).with_structured_output(Place, method=method)
    assert model.invoke("Name a city.").city in CITIES


def test_stop_sequence(url):
    whole = anthropic_chat(url).invoke(QUESTION).content
    assert anthropic_chat(url).invoke(QUESTION, stop=["Paris"]).content.rstrip() == whole.split("Paris")[0].rstrip()


def test_completion(url):
    model = OpenAI(base_url=f"{url}/v1", api_key=KEY, model=MODEL, temperature=0, max_tokens=5, max_retries=0)
    assert model.invoke("Once upon a time")


def test_error_of_openai(url):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        openai_chat(url, model_kwargs={}).bind(temperature=9).invoke(QUESTION)


def test_error_of_anthropic(url):
    with pytest.raises(anthropic.NotFoundError):
        ChatAnthropic(base_url=url, api_key=KEY, model="claude-other", max_retries=0, max_tokens=5).invoke("a")
