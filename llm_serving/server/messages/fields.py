"""The request bodies of ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from llm_serving.server.fields.shared import Name, StopStrings, Temperature, TopK, TopP
from llm_serving.server.fields.tools import ToolName, check_argument_values
from llm_serving.server.fields.validation import StrictModel, short
from llm_serving.server.generation.scheduling import SchedulingFields
from llm_serving.server.limits import MAX_MESSAGES, MAX_NAME_CHARS, MAX_TOOLS

_CACHE = frozenset({"cache_control"})
"""Fields that have no effect. The prefix cache finds equal prefixes by itself, so clients need not mark them."""
_KEEP_THINKING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
"""The only accepted edit of ``context_management``. It keeps all earlier reasoning, as the server always does."""
_BLOCKS = ("text", "image", "thinking", "tool_use", "tool_result")


class TextBlock(StrictModel):
    """A block of text."""

    ignored = _CACHE | {"citations"}

    type: Literal["text"]
    text: str


class ImageData(StrictModel):
    """The file of an image in base64."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/webp"]
    data: str


class ImageAddress(StrictModel):
    """The URL of an image: a data URL, or a host or folder that the operator has allowed."""

    type: Literal["url"]
    url: str


class ImageBlock(StrictModel):
    """An image in a message of the user or in the result of a tool, for models that read images."""

    ignored = _CACHE

    type: Literal["image"]
    source: Annotated[ImageData | ImageAddress, Field(discriminator="type")]


class ThinkingBlock(StrictModel):
    """The reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(default=None, description="Has no effect.")


def _check_input(value: dict[str, Any]) -> dict[str, Any]:
    check_argument_values([orjson.dumps(value).decode()])
    return value


class ToolUseBlock(StrictModel):
    """A tool call of an earlier answer."""

    ignored = _CACHE
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "caller": (None, {"type": "direct"}),
        "toolset_name": (None,),
    }

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    input: Annotated[dict[str, Any], AfterValidator(_check_input)]


def _only_text(value: object) -> object:
    """Refuses blocks of other types than text, with a message that names the type."""
    if isinstance(value, list):
        _check_types(value, ("text",))
    return value


def _blocks_of_result(value: object) -> object:
    """Returns the content of a tool's result as blocks. Refuses blocks that are neither text nor images."""
    if isinstance(value, list):
        _check_types(value, ("text", "image"))
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _known_blocks(value: object) -> object:
    """Refuses blocks of unknown types, with a message that names the type."""
    if isinstance(value, list):
        _check_types(value, _BLOCKS)
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _check_types(blocks: list[object], allowed: tuple[str, ...]) -> None:
    for i, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, dict) else block
        if kind not in allowed:
            raise PydanticCustomError(
                "block_type",
                "holds a block [{index}] of type {kind}, which is not supported; the types are {allowed}",
                {"index": i, "kind": short(kind), "allowed": ", ".join(allowed)},
            )


def _blocks_of_text(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else _only_text(value)


Texts = Annotated[
    list[TextBlock],
    Field(fail_fast=True),
    BeforeValidator(_blocks_of_text, json_schema_input_type=str | list[TextBlock]),
]


class ToolResultBlock(StrictModel):
    """The result of a tool call."""

    ignored = _CACHE
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"toolset_name": (None,)}

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    content: Annotated[
        list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]],
        Field(fail_fast=True),
        BeforeValidator(_blocks_of_result, json_schema_input_type=str | list[TextBlock | ImageBlock]),
    ] = Field(default_factory=list, description="Text, or a list of text and image blocks.")
    is_error: bool | None = Field(default=None, description="Has no effect: the model reads the content.")


Block = Annotated[TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class InputMessage(StrictModel):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[Block], Field(fail_fast=True), BeforeValidator(_known_blocks, json_schema_input_type=str | list[Block])
    ]


class ToolDefinition(StrictModel):
    """A tool that the client runs."""

    ignored = _CACHE | {"eager_input_streaming", "input_examples"}
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "defer_loading": (None, False),
        "allowed_callers": (None, ["direct"]),
    }

    type: Literal["custom"] | None = None
    name: ToolName = Field(description="Name of the tool: letters, digits, `_` and `-`.")
    description: str | None = Field(default=None, description="What the tool does, for the model.")
    input_schema: dict[str, Any] = Field(description="JSON schema of the input, which is an object.")
    strict: bool | None = Field(
        default=None,
        description="False: do not enforce the schema. Otherwise the input always fits, except for keywords that "
        "the formats `qwen3_coder` and `pythonic` cannot enforce. True: refuse such keywords.",
    )


class ToolSelection(StrictModel):
    """The field ``tool_choice``: whether the model must call a tool, and which one."""

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str | None, Field(max_length=MAX_NAME_CHARS)] = None
    disable_parallel_tool_use: bool | None = Field(default=None, description="True: at most one tool call.")


class Thinking(StrictModel):
    """The field ``thinking``: whether the model reasons, and for how many tokens."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"display": (None, "summarized")}

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(
        default=None, ge=1, le=2**31 - 1, description="Maximum number of tokens of the reasoning, for `enabled`."
    )


class OutputSchema(StrictModel):
    """The JSON schema that the generated text must fit."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    """The field ``output_config``: the JSON schema of the text, and the effort of the reasoning."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="How long the model reasons, if its chat template supports this. `max` is `xhigh`."
    )
    format: OutputSchema | None = None


def _check_tools(tools: list[ToolDefinition] | None) -> list[ToolDefinition] | None:
    names: set[str] = set()
    for i, tool in enumerate(tools or ()):
        if tool.name in names:
            raise PydanticCustomError(
                "tool_names", "holds two tools named {name}; the second is [{index}]", {"name": tool.name, "index": i}
            )
        names.add(tool.name)
    return tools


class ConversationFields(SchedulingFields, StrictModel):
    """The fields of a conversation in Anthropic's form."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "container": (None,),
        "context_management": (None, {}, {"edits": []}, _KEEP_THINKING),
        "diagnostics": (None,),
        "mcp_servers": (None, []),
        "speed": (None, "standard"),
    }
    ignored = _CACHE | {"metadata", "service_tier", "inference_geo", "user_profile_id"}

    model: Name = Field(default=None, description="Name of the served model; may be left out.")
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Texts = Field(default_factory=list, description="The system prompt: text, or a list of text blocks.")
    tools: Annotated[
        list[ToolDefinition] | None, Field(max_length=MAX_TOOLS, fail_fast=True), AfterValidator(_check_tools)
    ] = Field(default=None, description="Tools that the model may call.")
    tool_choice: ToolSelection | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Variables for the model's chat template, as in `/v1/chat/completions`."
    )


class MessagesRequest(ConversationFields):
    """Request body of ``/v1/messages``."""

    max_tokens: int = Field(ge=1, le=2**31 - 1, description="Maximum number of tokens to generate.")
    stop: StopStrings = Field(default=(), alias="stop_sequences")
    stream: bool | None = Field(default=None, description="Send the answer as events while it is generated.")
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None


class CountRequest(ConversationFields):
    """Request body of ``/v1/messages/count_tokens``."""
