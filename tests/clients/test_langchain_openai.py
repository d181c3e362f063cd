"""Ten calls of langchain-openai."""

import asyncio
from typing import Literal

import openai
import pytest
from common import CITIES, KEY, MODEL, QUESTION
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


def chat(url, **more):
    return ChatOpenAI(base_url=f"{url}/v1", api_key=KEY, model=MODEL, temperature=0, max_retries=0,
                      **{"max_tokens": 40, **more})  # fmt: skip


def test_answer(url):
    answer = chat(url).invoke(QUESTION)
    assert "Paris" in answer.content
    assert answer.response_metadata["finish_reason"] == "stop"


def test_usage(url):
    usage = chat(url).invoke(QUESTION).usage_metadata
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]


def test_conversation(url):
    messages = [SystemMessage("Be short."), HumanMessage("Hello!"), AIMessage("Hello."), HumanMessage(QUESTION)]
    assert chat(url).invoke(messages).content


def test_stream_is_the_answer(url):
    pieces = [piece.content for piece in chat(url).stream(QUESTION)]
    assert "".join(pieces) == chat(url).invoke(QUESTION).content
    assert len(pieces) > 3


def test_asynchronous_batch(url):
    answers = asyncio.run(chat(url).abatch([QUESTION] * 4))
    assert len({answer.content for answer in answers}) == 1


def test_tool_call_and_its_result(url):
    choice = {"tool_choice": "weather", "parallel_tool_calls": False, "strict": True}
    model = chat(url, max_tokens=200).bind_tools([weather], **choice)
    answer = model.invoke("Name a city.")
    [call] = answer.tool_calls
    assert call["args"]["city"] in CITIES
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    assert isinstance(chat(url).invoke([HumanMessage(QUESTION), answer, result]).content, str)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(url, method):
    model = chat(url, max_tokens=200).with_structured_output(Place, method=method)
    assert model.invoke("Name a city.").city in CITIES


def test_completion(url):
    model = OpenAI(base_url=f"{url}/v1", api_key=KEY, model=MODEL, temperature=0, max_tokens=5, max_retries=0)
    assert model.invoke("Once upon a time")


def test_error(url):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat(url, model_kwargs={}).bind(temperature=9).invoke(QUESTION)
