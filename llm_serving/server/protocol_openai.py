"""Request bodies of ``/v1/completions``, ``/v1/chat/completions``, ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from llm_serving.server.limits import MAX_LOGPROBS, MAX_MESSAGES, MAX_NAME_CHARS
from llm_serving.server.protocol import MaxTokens, Name, SamplingFields
from llm_serving.server.validation import StrictModel, short

__all__ = ["ChatRequest", "CompletionRequest", "DetokenizeRequest", "Message", "TokenizeRequest"]

_HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
    }
)


def _join_content(value: object) -> object:
    """Text, or a list of text parts, as text."""
    if not isinstance(value, list):
        return value
    texts = []
    for i, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise PydanticCustomError(
                "content_part", f"holds a part [{i}] of type {short(kind)}, which is not supported; only text parts are"
            )
        if not isinstance(part.get("text"), str) or part.keys() - {"type", "text"}:
            raise PydanticCustomError("content_part", f"holds a part [{i}] that is not just type and text")
        texts.append(part["text"])
    return "".join(texts)


Content = Annotated[
    str,
    BeforeValidator(_join_content),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                    },
                },
            ]
        }
    ),
]


class Message(StrictModel):
    """One turn of a conversation."""

    # Clients send an earlier answer back with all its fields.
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "refusal": (None,),
        "audio": (None,),
        "function_call": (None,),
        "tool_calls": (None, []),
        "annotations": (None, []),
    }

    role: Literal["system", "developer", "user", "assistant"] = Field(description="`developer` is `system`.")
    content: Content
    name: str | None = Field(default=None, max_length=MAX_NAME_CHARS)

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it."""
        message = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        if self.name is not None:
            message["name"] = self.name
        return message


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class CompletionRequest(SamplingFields):
    """A prompt, or several, to be continued."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"suffix": (None, ""), "logit_bias": (None, {})}
    ignored = _HARMLESS

    prompt: Any = Field(
        description="Text, token ids, or a list of either.",
        json_schema_extra={
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        },
    )
    max_tokens: MaxTokens = Field(default=None, description="Most tokens to generate (default 16).")
    logprobs: int | None = Field(
        default=None, ge=0, le=MAX_LOGPROBS, description="Log-probabilities of so many best tokens."
    )
    echo: bool | None = Field(default=None, description="Put the prompt before the text.")
    best_of: int | None = Field(default=None, ge=1, description="The value of `n`, or in a beam search its beams.")


class ChatRequest(SamplingFields):
    """A conversation to be continued by the assistant."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "tools": (None, []),
        "tool_choice": (None, "none", "auto"),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "response_format": (None, {"type": "text"}),
        "logit_bias": (None, {}),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "prediction": (None,),
        "reasoning_effort": (None, "none"),
        "verbosity": (None,),
        "web_search_options": (None,),
        "moderation": (None,),
    }
    ignored = _HARMLESS | {"parallel_tool_calls"}

    messages: Messages
    max_tokens: MaxTokens = Field(
        default=None, description="Most tokens to generate (default: all the context has room for)."
    )
    max_completion_tokens: MaxTokens = Field(default=None, description="The newer name of `max_tokens`.")
    logprobs: bool | None = Field(default=None, description="Return log-probabilities.")
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS, description="Of so many best tokens each.")


class TokenizeRequest(StrictModel):
    """A text or a conversation to be cut into tokens."""

    model: Name = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(
        default=None, description="Add what starts a text (default: true for a prompt, false for messages)."
    )
    add_generation_prompt: bool = Field(default=True, description="End the conversation where the assistant speaks.")


class DetokenizeRequest(StrictModel):
    """Tokens to be turned into text."""

    model: Name = None
    tokens: Annotated[list[int], Field(fail_fast=True)]
    skip_special_tokens: bool = True
