"""From a JSON object to a checked request model, with errors a client can act on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from llm_serving.errors import RequestError
from llm_serving.server.limits import MAX_STOP_CHARS, MAX_STOP_STRINGS

__all__ = ["LaxModel", "RequestModel", "StopStrings", "StrictModel", "clip", "parse", "short"]

SHORT_CHARS = 80

ModelT = TypeVar("ModelT", bound="RequestModel")


class RequestModel(BaseModel):
    """Base of every request body.

    ``unsupported`` are features that other servers have: field -> the values that ask for nothing. ``ignored`` are
    fields that clients send and that change nothing here.
    """

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        for name, neutral in cls.unsupported.items():
            if name in data and data[name] not in neutral:
                raise PydanticCustomError("unsupported_parameter", "{name}", {"name": name, "got": short(data[name])})
        return {key: data[key] for key in data if key not in cls.unsupported and key not in cls.ignored}


class StrictModel(RequestModel):
    """Types as JSON writes them: no number in a string, no 1 for true."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class LaxModel(RequestModel):
    """The published dialects: their clients write ``"True"`` and ``"0.7"``."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


def parse(model: type[ModelT], data: Mapping[str, Any]) -> ModelT:
    """The checked model. Raises RequestError naming the first field at fault, its value and what is allowed."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _request_error(error) from None


def short(value: object) -> str:
    """The value as JSON, cut to a few words."""
    try:
        return clip(orjson.dumps(value).decode())
    except (orjson.JSONEncodeError, TypeError):
        return clip(repr(value))


def clip(text: str) -> str:
    """A text from a client, short enough for a message."""
    return text if len(text) <= SHORT_CHARS else f"{text[:SHORT_CHARS]}..."


def _request_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False)[0]
    param = _path(first["loc"])
    kind = first["type"]
    if kind == "unsupported_parameter":
        param = _path((*first["loc"], first["ctx"]["name"]))
        return RequestError(
            f"'{param}' is not supported by this server; leave it out (got {first['ctx']['got']}).",
            param=param,
            code=kind,
        )
    if kind == "missing":
        return RequestError(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    if kind == "extra_forbidden":
        return RequestError(f"Unrecognized request argument supplied: {param}", param=param, code="unknown_parameter")
    message = first["msg"].replace(" after validation", "")
    for what in ("Input", "List", "String"):
        message = message.replace(f"{what} should", "should", 1)
    code = "invalid_type" if kind.endswith(("_type", "_parsing")) else "invalid_value"
    return RequestError(f"'{param}' {message}; got {short(first['input'])}.", param=param, code=code)


def _path(location: tuple[int | str, ...]) -> str:
    """``('messages', 0, 'role')`` is ``messages[0].role``."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return clip(text)


def _stop_strings(value: object) -> object:
    """One string or a list of them, as a tuple."""
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
        raise PydanticCustomError("string_type", "should be a string or a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise PydanticCustomError("stop_count", f"should hold at most {MAX_STOP_STRINGS} strings, not {len(strings)}")
    for text in strings:
        if not 0 < len(text) <= MAX_STOP_CHARS:
            raise PydanticCustomError(
                "stop_length", f"should hold strings of 1 to {MAX_STOP_CHARS} characters, not {len(text)}"
            )
    return tuple(strings)


StopStrings = Annotated[
    tuple[str, ...],
    BeforeValidator(_stop_strings),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}),
    Field(description=f"Up to {MAX_STOP_STRINGS} strings at which the text ends."),
]
