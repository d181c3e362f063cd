"""Fields that the request bodies of several endpoints share (sampling, stop strings, messages), with their ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError, PydanticKnownError

from llm_serving.engine.beam_search import MAX_BEAM_WIDTH
from llm_serving.sampling_params import MAX_LOGIT_BIAS, MAX_TOP_LOGITS, PARAMETERS
from llm_serving.server.fields.structured_output import StructuredFields
from llm_serving.server.fields.tools import EarlierCall, check_argument_values
from llm_serving.server.fields.validation import LaxModel, StrictModel, short
from llm_serving.server.generation.scheduling import SchedulingFields
from llm_serving.server.limits import (
    MAX_CHOICES,
    MAX_LENGTH_PENALTY,
    MAX_MESSAGES,
    MAX_NAME_CHARS,
    MAX_TEMPLATE_VALUE_CHARS,
    MAX_TEMPLATE_VALUES,
    MAX_TOOLS,
)


def _strings(value: object, info: ValidationInfo) -> object:
    """Converts a string, or a list of strings, to a tuple. Refuses empty strings, long strings, and too many strings.

    ``PARAMETERS`` has the limits of each field.
    """
    if value is None:
        return ()
    parameter = PARAMETERS[info.field_name or ""]
    max_items, max_chars = parameter.max_items or 0, parameter.max_chars or 0
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
        raise PydanticCustomError("string_type", "should be a string or a list of strings")
    if len(strings) > max_items:
        raise PydanticCustomError("stop_count", f"should hold at most {max_items} strings, not {len(strings)}")
    for text in strings:
        if not 0 < len(text) <= max_chars:
            raise PydanticCustomError(
                "stop_length", f"should hold strings of 1 to {max_chars} characters, not {len(text)}"
            )
    return tuple(strings)


def _parameter(name: str) -> Any:
    """Returns the pydantic field of a sampling parameter, with meaning and range from ``sampling_params.py``."""
    parameter = PARAMETERS[name]
    return Field(ge=parameter.low, gt=parameter.above, le=parameter.high, description=parameter.meaning)


Temperature = Annotated[float | None, _parameter("temperature")]
TopP = Annotated[float | None, _parameter("top_p")]
TopK = Annotated[int | None, _parameter("top_k")]
RepetitionPenalty = Annotated[float | None, _parameter("repetition_penalty")]
FrequencyPenalty = Annotated[float | None, _parameter("frequency_penalty")]
Seed = Annotated[int | None, _parameter("seed")]
MaxTokens = Annotated[int | None, _parameter("max_tokens")]
Name = Annotated[str | None, Field(max_length=MAX_NAME_CHARS)]
TokenIds = Annotated[list[int], Field(max_length=PARAMETERS["stop_token_ids"].max_items, fail_fast=True)]


def _logit_bias(value: object) -> object:
    """Converts the field ``logit_bias``, which maps token ids to numbers, to pairs in the order of the ids."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise PydanticCustomError("dict_type", "should be an object with token ids as names")
    max_items = PARAMETERS["logit_bias"].max_items or 0
    if len(value) > max_items:
        raise PydanticCustomError("too_long", f"should hold at most {max_items} tokens, not {len(value)}")
    biases: dict[int, float] = {}
    for name, bias in value.items():
        if not (name.isascii() and name.isdigit() and len(name) <= _MAX_ID_DIGITS) or int(name) in biases:
            raise PydanticCustomError("token_id", f"holds {short(name)}, which is not a token id, or occurs twice")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= MAX_LOGIT_BIAS:
            raise PydanticCustomError(
                "bias", f"holds {short(bias)} for token {name}; it should be -{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
            )
        biases[int(name)] = float(bias)
    return tuple(sorted(biases.items()))


_MAX_ID_DIGITS = 9
"""Maximum number of digits of a token id in ``logit_bias``."""
LogitBias = Annotated[
    tuple[tuple[int, float], ...],
    BeforeValidator(_logit_bias),
    WithJsonSchema({"anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}]}),
]
AllowedTokenIds = Annotated[
    list[int], Field(min_length=1, max_length=PARAMETERS["allowed_token_ids"].max_items, fail_fast=True)
]
_Strings = Annotated[
    tuple[str, ...],
    BeforeValidator(_strings),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}),
]


def _described(name: str) -> Any:
    """Returns the pydantic field of a sampling parameter whose value is a list of strings."""
    return Field(description=f"{PARAMETERS[name].meaning} At most {PARAMETERS[name].max_items}.")


StopStrings = Annotated[_Strings, _described("stop")]

IGNORED = frozenset(
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
"""Fields of OpenAI's API that are accepted and have no effect."""


class StreamOptions(StrictModel):
    """Options of a streamed response."""

    ignored = frozenset({"include_obfuscation"})

    include_usage: bool | None = Field(default=None, description="Send a last chunk with the token counts.")


class SamplingFields(SchedulingFields, StructuredFields, StrictModel):
    """Fields of ``/v1/chat/completions`` and ``/v1/completions``: OpenAI's sampling parameters, and fields of vLLM."""

    # older names of vLLM
    renamed: ClassVar[Mapping[str, str]] = {
        f"guided_{kind}": f"structured_outputs.{kind}" for kind in ("json", "regex", "choice", "grammar")
    }

    model: Name = Field(default=None, description="Name of the served model; may be left out.")
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES, description="Number of choices for each prompt.")
    stream: bool | None = Field(default=None, description="Send the text as server-sent events while it is generated.")
    stream_options: StreamOptions | None = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: Annotated[float | None, _parameter("min_p")] = None
    repetition_penalty: RepetitionPenalty = None
    presence_penalty: Annotated[float | None, _parameter("presence_penalty")] = None
    frequency_penalty: FrequencyPenalty = None
    seed: Seed = None
    stop: StopStrings = ()
    stop_token_ids: Annotated[TokenIds | None, _parameter("stop_token_ids")] = None
    logit_bias: Annotated[LogitBias, _described("logit_bias")] = ()
    min_tokens: Annotated[int | None, _parameter("min_tokens")] = None
    allowed_token_ids: Annotated[AllowedTokenIds | None, _parameter("allowed_token_ids")] = None
    bad_words: Annotated[_Strings, _described("bad_words")] = ()
    ignore_eos: Annotated[bool | None, _parameter("ignore_eos")] = None
    skip_special_tokens: Annotated[bool | None, _parameter("skip_special_tokens")] = None
    include_stop_str_in_output: Annotated[bool | None, _parameter("include_stop_str_in_output")] = None
    use_beam_search: bool | None = Field(
        default=None, description="Return the most likely outputs, found by beam search; not streamed."
    )
    beam_width: int | None = Field(
        default=None,
        ge=1,
        le=MAX_BEAM_WIDTH,
        description="Number of beams of a beam search (default: the value of `n`).",
    )
    length_penalty: float | None = Field(
        default=None,
        ge=-MAX_LENGTH_PENALTY,
        le=MAX_LENGTH_PENALTY,
        description="Beam search: the score of a beam is its log-probability / length ** this value (default 1).",
    )
    return_token_ids: bool | None = Field(
        default=None, description="Add `token_ids` and `prompt_token_ids` to each choice."
    )


class DialectSampling(LaxModel):
    """Sampling parameters of ``/generate`` and ``/chat``. Their format is that of MindSpore llm-serving."""

    do_sample: bool | None = Field(
        default=None,
        description="Sample, or take the best token. Default: sample if temperature, top_k or top_p is given.",
    )
    temperature: Temperature = None
    top_k: TopK = None
    top_p: TopP = None
    repetition_penalty: RepetitionPenalty = None
    frequency_penalty: FrequencyPenalty = None
    seed: Seed = None
    stop: StopStrings = ()
    return_logits: bool | None = Field(
        default=None, description=f"Return the top {MAX_TOP_LOGITS} ids and logits of each step."
    )


def is_image(part: object) -> bool:
    """Returns whether a part of a message's content is an image."""
    return isinstance(part, dict) and part.get("type") == "image_url"


def _join_content(value: object) -> object:
    """Returns a message's ``content`` as one text. ``value`` is a text, or a list of parts.

    Joins the parts of type ``text``, skips those of type ``image_url``, and refuses all others. ``Message.parts`` has
    the images.
    """
    if not isinstance(value, list):
        return value
    texts = []
    for i, part in enumerate(value):
        if is_image(part):
            continue
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise PydanticCustomError(
                "content_part",
                f"holds a part [{i}] of type {short(kind)}, which is not supported; only text and image_url parts are",
            )
        if not isinstance(part.get("text"), str) or part.keys() - {"type", "text"}:
            raise PydanticCustomError("content_part", f"holds a part [{i}] that is not just type and text")
        texts.append(part["text"])
    return "".join(texts)


def _check_content(value: str | None, info: ValidationInfo) -> str | None:
    """Checks that ``content`` is null only in a message of the assistant with tool calls."""
    if value is None and not (info.data.get("role") == "assistant" and info.data.get("tool_calls")):
        raise PydanticKnownError("string_type")
    return value


def _check_tool_call_id(value: str | None, info: ValidationInfo) -> str | None:
    """Checks that each message of a tool has ``tool_call_id``, and that other messages do not have it."""
    is_tool = info.data.get("role") == "tool"
    if is_tool and value is None:
        raise PydanticKnownError("missing")
    if not is_tool and value is not None:
        raise PydanticCustomError("tool_call_id", "is only allowed in messages with the role 'tool'")
    return value


def _check_calls(value: list[EarlierCall] | None, info: ValidationInfo) -> list[EarlierCall] | None:
    if value and info.data.get("role") != "assistant":
        raise PydanticCustomError("tool_calls", "is only allowed in messages with the role 'assistant'")
    return value


Content = Annotated[
    str | None,
    BeforeValidator(_join_content),
    AfterValidator(_check_content),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "anyOf": [
                            {
                                "type": "object",
                                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                                "required": ["type", "text"],
                            },
                            {
                                "type": "object",
                                "properties": {
                                    "type": {"const": "image_url"},
                                    "image_url": {
                                        "type": "object",
                                        "properties": {
                                            "url": {"type": "string"},
                                            "detail": {"enum": ["auto", "low", "high"]},
                                        },
                                        "required": ["url"],
                                    },
                                },
                                "required": ["type", "image_url"],
                            },
                        ]
                    },
                },
            ]
        }
    ),
]


class Message(StrictModel):
    """One message of a conversation."""

    # Clients send an earlier answer back as a message, with all members of the response. So a message may have these
    # unsupported members if they are empty.
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "refusal": (None,),
        "audio": (None,),
        "function_call": (None,),
        "annotations": (None, []),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(description="`developer` means `system`.")
    tool_calls: Annotated[
        list[EarlierCall] | None, Field(max_length=MAX_TOOLS, fail_fast=True), AfterValidator(_check_calls)
    ] = Field(default=None, description="Tool calls of an earlier answer.")
    content: Content
    tool_call_id: Annotated[str | None, Field(max_length=MAX_NAME_CHARS), AfterValidator(_check_tool_call_id)] = Field(
        default=None, validate_default=True, description="The call whose result a message of role `tool` has."
    )
    name: str | None = Field(default=None, max_length=MAX_NAME_CHARS)
    reasoning_content: str | None = Field(default=None, description="The reasoning of an earlier answer.")
    _parts: list[dict[str, Any]] | None = PrivateAttr(default=None)

    @property
    def parts(self) -> Sequence[dict[str, Any]]:
        """The parts of the content if it has images, as the client sent them. Empty if it has only text.

        The URLs of the images are not checked here.
        """
        return self._parts or ()

    @model_validator(mode="wrap")
    @classmethod
    def _keep_images(cls, data: object, handler: ModelWrapValidatorHandler[Message]) -> Message:
        message = handler(data)
        content = data.get("content") if isinstance(data, dict) else None
        if isinstance(content, list) and any(map(is_image, content)):
            message._parts = content
        return message

    @model_validator(mode="before")
    @classmethod
    def _without_content(cls, data: object) -> object:
        """Adds ``"content": null`` to messages with tool calls, because some clients leave the member out."""
        return (
            {**data, "content": None}
            if isinstance(data, dict) and data.get("tool_calls") and "content" not in data
            else data
        )

    def for_template(self) -> dict[str, Any]:
        """Returns the message as a dict, which is the input of chat templates.

        A message with images also has ``parts``, the parts of its content.
        """
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self._parts is not None:
            message["parts"] = [{"type": "image"} if is_image(part) else part for part in self._parts]
        return message


def _template_values(value: object) -> object:
    """Returns ``chat_template_kwargs`` after checks. Keys must be names of variables, and values plain JSON scalars."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise PydanticCustomError("dict_type", "should be an object")
    if len(value) > MAX_TEMPLATE_VALUES:
        raise PydanticCustomError("too_long", f"should hold at most {MAX_TEMPLATE_VALUES} values, not {len(value)}")
    for name, each in value.items():
        if len(name) > MAX_NAME_CHARS or not name.isidentifier():
            raise PydanticCustomError("template_name", f"holds {short(name)}, which is not the name of a variable")
        if not isinstance(each, str | int | float | bool | None):
            raise PydanticCustomError(
                "template_value", f"holds {name}, which should be text, a number, a boolean or null"
            )
        if isinstance(each, str) and len(each) > MAX_TEMPLATE_VALUE_CHARS:
            problem = f"holds {name} with {len(each)} characters; the maximum is {MAX_TEMPLATE_VALUE_CHARS}"
            raise PydanticCustomError("template_value", problem)
    return value


TemplateValues = Annotated[
    dict[str, Any],
    BeforeValidator(_template_values),
    Field(description="Variables for the model's chat template, for example `enable_thinking`."),
]


def _check_all_arguments(messages: list[Message]) -> list[Message]:
    """Checks the arguments of all tool calls together, because a chat template may write them all in one call."""
    check_argument_values([call.function.arguments for message in messages for call in message.tool_calls or ()])
    return messages


Messages = Annotated[
    list[Message],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    AfterValidator(_check_all_arguments),
]
