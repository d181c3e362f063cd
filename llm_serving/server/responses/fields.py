"""The request body of ``/v1/responses``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from llm_serving.server.fields.shared import IGNORED, MaxTokens, Name, Temperature, TopP
from llm_serving.server.fields.tools import ToolName
from llm_serving.server.fields.validation import StrictModel, short
from llm_serving.server.generation.scheduling import SchedulingFields
from llm_serving.server.limits import MAX_LOGPROBS, MAX_MESSAGES, MAX_NAME_CHARS, MAX_TOOLS

LOGPROBS = "message.output_text.logprobs"
"""The member of ``include`` that asks for log-probabilities."""

_KINDS = ("message", "function_call", "function_call_output", "reasoning")
_Id = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


_PARTS = ("input_text", "output_text", "input_image")


def _parts(value: object) -> object:
    """Returns the content of a message as a list of parts. Refuses parts that are neither text nor images."""
    if isinstance(value, str):
        return [{"type": "input_text", "text": value}]
    for i, part in enumerate(value if isinstance(value, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else part
        if kind not in _PARTS:
            raise PydanticCustomError(
                "content_part",
                "holds a part [{index}] of type {kind}, which is not supported; the types are {kinds}",
                {"index": i, "kind": short(kind), "kinds": ", ".join(_PARTS)},
            )
    return value


class TextPart(StrictModel):
    """A part of a text."""

    ignored = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})

    type: Literal["input_text", "output_text"]
    text: str


class ImagePart(StrictModel):
    """An image in a message of the user or in the result of a tool, for models that read images."""

    ignored = frozenset({"prompt_cache_breakpoint"})
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"file_id": (None,)}

    type: Literal["input_image"]
    image_url: str = Field(description="A data URL, or a URL of a host or folder that the operator has allowed.")
    detail: Literal["auto", "low", "high"] | None = Field(
        default=None, description="`low` takes fewer tokens, see `docs/images.md`."
    )


Part = TextPart | ImagePart
Parts = Annotated[
    list[Annotated[Part, Field(discriminator="type")]],
    Field(fail_fast=True),
    BeforeValidator(_parts, json_schema_input_type=str | list[Part]),
]


class MessageItem(StrictModel):
    """A message of the conversation."""

    ignored = frozenset({"id", "status", "phase"})

    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts


class CallItem(StrictModel):
    """A tool call of an earlier response."""

    ignored = frozenset({"id", "status"})
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "namespace": (None,),
        "caller": (None, {"type": "direct"}),
        "async": (None, False),
    }

    type: Literal["function_call"]
    call_id: _Id
    name: _Id
    arguments: str


class ResultItem(StrictModel):
    """The result of a tool call."""

    ignored = frozenset({"id", "status"})

    type: Literal["function_call_output"]
    call_id: _Id
    output: Parts


class ReasoningText(StrictModel):
    """A part of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(StrictModel):
    """The reasoning of an earlier response."""

    ignored = frozenset({"id", "status", "summary"})
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"encrypted_content": (None,)}

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None


def _items(value: object) -> object:
    """Returns the input as a list of items. An item without a type is a message."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise PydanticCustomError("list_type", "should be a string or a list of items")
    items = [{"type": "message", **one} if isinstance(one, dict) and "role" in one else one for one in value]
    for i, item in enumerate(items):
        kind = item.get("type") if isinstance(item, dict) else item
        if kind not in _KINDS:
            raise PydanticCustomError(
                "item_type",
                "holds an item [{index}] of type {kind}, which is not supported; the types are {kinds}",
                {"index": i, "kind": short(kind), "kinds": ", ".join(_KINDS)},
            )
    return items


Item = Annotated[MessageItem | CallItem | ResultItem | ReasoningItem, Field(discriminator="type")]


class ResponseTool(StrictModel):
    """A function that the model may call."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "defer_loading": (None, False),
        "async": (None, False),
        "allowed_callers": (None, ["direct"]),
        "output_schema": (None,),
    }

    type: Literal["function"]
    name: ToolName = Field(description="Name of the function: letters, digits, `_` and `-`.")
    description: str | None = Field(default=None, description="What the function does, for the model.")
    parameters: dict[str, Any] | None = Field(default=None, description="JSON schema of the arguments.")
    strict: bool | None = Field(
        default=None,
        description="False: do not enforce the schema. Otherwise the arguments always fit, except for keywords that "
        "the formats `qwen3_coder` and `pythonic` cannot enforce. True: refuse such keywords.",
    )


class NamedFunction(StrictModel):
    """The value of ``tool_choice`` that names one function."""

    type: Literal["function"]
    name: _Id


class TextForm(StrictModel):
    """The form of the response's text: any text, any JSON object, or JSON that fits a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(default=None, max_length=MAX_NAME_CHARS, description="Name of the schema; has no effect.")
    description: str | None = Field(default=None, description="Description of the schema; has no effect.")
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema", description="The schema of `json_schema`.")
    strict: bool | None = Field(default=None, description="Has no effect: the schema is always enforced.")


class TextOptions(StrictModel):
    """Options of the text."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"verbosity": (None, "medium")}

    format: TextForm | None = None


class ReasoningOptions(StrictModel):
    """Options of the reasoning."""

    ignored = frozenset({"summary", "generate_summary"})

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class StreamSettings(StrictModel):
    """Options of a stream."""

    ignored = frozenset({"include_obfuscation"})


_MAX_PAIRS = 16
"""Maximum number of pairs in ``metadata``."""


def _few_pairs(value: object) -> object:
    """Refuses ``metadata`` with too many pairs before they are checked, because each wrong pair makes an error."""
    if isinstance(value, dict) and len(value) > _MAX_PAIRS:
        raise PydanticCustomError("too_long", f"should hold at most {_MAX_PAIRS} pairs, not {len(value)}")
    return value


class ResponsesRequest(SchedulingFields, StrictModel):
    """Request body of ``/v1/responses``."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "background": (None, False),
        "context_management": (None, []),
        "conversation": (None,),
        "max_tool_calls": (None,),
        "moderation": (None,),
        "prompt": (None,),
        "truncation": (None, "disabled"),
    }
    ignored = IGNORED - {"store", "metadata"}

    model: Name = Field(default=None, description="Name of the served model; may be left out.")
    input: Annotated[
        list[Item],
        Field(fail_fast=True),
        BeforeValidator(_items, json_schema_input_type=str | list[Item]),
        Field(min_length=1, max_length=MAX_MESSAGES),
    ] = Field(description="A text, or a list of items: messages, tool calls, their results, reasoning.")
    instructions: str | None = Field(default=None, description="The system prompt of this response only.")
    previous_response_id: _Id | None = Field(default=None, description="Continue the conversation of this response.")
    store: bool | None = Field(default=None, description="False: do not keep the response (default: keep).")
    metadata: Annotated[dict[str, str], Field(max_length=_MAX_PAIRS), BeforeValidator(_few_pairs)] | None = Field(
        default=None, description="Returned with the response."
    )
    max_output_tokens: MaxTokens = Field(
        default=None, description="Maximum number of tokens to generate (default: the rest of the context)."
    )
    stream: bool | None = Field(default=None, description="Send the response as events while it is generated.")
    stream_options: StreamSettings | None = None
    include: (
        Annotated[
            list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]], Field(fail_fast=True)
        ]
        | None
    ) = Field(
        default=None,
        description=f"`{LOGPROBS}`: add the log-probabilities of the message's tokens. "
        "`reasoning.encrypted_content` has no effect.",
    )
    top_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_LOGPROBS,
        description=f"Number of best tokens with log-probabilities, for each token. Needs `{LOGPROBS}` in `include`.",
    )
    temperature: Temperature = None
    top_p: TopP = None
    tools: Annotated[list[ResponseTool] | None, Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
        default=None, description="Functions that the model may call."
    )
    tool_choice: Literal["auto", "none", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = Field(
        default=None, description="False: at most one tool call (default: any number)."
    )
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Variables for the model's chat template, as in `/v1/chat/completions`."
    )

    @property
    def wants_logprobs(self) -> bool:
        """Whether the response has log-probabilities."""
        return LOGPROBS in (self.include or ())
