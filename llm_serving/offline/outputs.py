"""The results of ``LLM``: for each prompt, choices with text, token ids and log-probabilities."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson


@dataclass(frozen=True, slots=True)
class OutputChoice:
    """One generated text of a prompt."""

    index: int
    text: str
    """Generated text. In a chat: the content of the message, without reasoning and tool calls."""
    token_ids: tuple[int, ...]
    """All generated token ids, including those of the reasoning and of tool calls."""
    finish_reason: str
    """``stop`` or ``length``. In a chat, it may also be ``tool_calls``."""
    stop_reason: str | int | None
    """The stop string or stop token id that ended the text. None if the text ended for another reason."""
    logprobs: dict[str, Any] | None
    """Log-probabilities, or None if they were not requested. For ``generate``, they have the form of
    ``/v1/completions``, and for ``chat``, the form of ``/v1/chat/completions``.
    """
    message: dict[str, Any] | None
    """Message of a chat: ``content``, ``tool_calls`` and ``reasoning_content``, as in OpenAI's API. None for
    ``generate``.
    """


@dataclass(frozen=True, slots=True)
class Output:
    """The result for one prompt or conversation."""

    prompt_token_ids: tuple[int, ...]
    choices: tuple[OutputChoice, ...]
    usage: dict[str, Any]
    """Token counts, as in OpenAI's API."""

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first choice."""
        return self.choices[0].token_ids

    @property
    def message(self) -> dict[str, Any] | None:
        """Message of the first choice of a chat. None for a continued prompt."""
        return self.choices[0].message


def output_of(response: bytes) -> Output:
    """Returns the output that the JSON response of a completion or a chat describes."""
    value = orjson.loads(response)
    choices = value["choices"]
    return Output(
        prompt_token_ids=tuple(choices[0]["prompt_token_ids"]),
        choices=tuple(map(_choice, choices)),
        usage=value["usage"],
    )


def embedding_of(response: bytes) -> npt.NDArray[np.float32]:
    """Returns the embedding in a response with one embedding as base64: float32 [width]."""
    [entry] = orjson.loads(response)["data"]
    return np.frombuffer(base64.b64decode(entry["embedding"]), "<f4").astype(np.float32)


def _choice(choice: dict[str, Any]) -> OutputChoice:
    message = choice.get("message")
    return OutputChoice(
        index=choice["index"],
        text=(message["content"] or "") if message is not None else choice["text"],
        token_ids=tuple(choice["token_ids"]),
        finish_reason=choice["finish_reason"],
        stop_reason=choice["stop_reason"],
        logprobs=choice["logprobs"],
        message=message,
    )
