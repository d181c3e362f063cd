"""Base classes of the request bodies (pydantic models), and the error for a field with a wrong value."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import ClassVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from llm_serving.errors import RequestError

SHORT_CHARS = 80
"""Maximum length of a wrong value in an error message."""
SIMILARITY = 0.8
"""Minimum similarity (``difflib``, 0 to 1) of an unknown field to a field that an error message suggests."""


class RequestModel(BaseModel):
    """Base class of every request body.

    ``unsupported`` names the fields of features that the server does not have. It maps each field to the values that
    are accepted, because they do not use the feature. ``remedies`` has the recommendations in the errors
    of some of these fields. ``ignored`` names the fields that are accepted and have no effect. ``renamed`` maps names
    that other servers have or had for a field to the name here.
    """

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    remedies: ClassVar[Mapping[str, str]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()
    renamed: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        for name, neutral in cls.unsupported.items():
            if name in data and data[name] not in neutral:
                remedy = cls.remedies.get(name, "leave it out")
                context = {"name": name, "got": short(data[name]), "remedy": remedy}
                raise PydanticCustomError("unsupported_parameter", "{name}", context)
        found = {key: data[key] for key in data if key not in cls.unsupported and key not in cls.ignored}
        return found if len(found) <= len(cls.model_fields) else cls._with_one_unknown(found)

    @classmethod
    def _with_one_unknown(cls, data: dict[str, object]) -> dict[str, object]:
        """Leaves out all unknown fields but the first, because pydantic makes an error for each of them."""
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next(key for key in data if key not in known)
        return {key: value for key, value in data.items() if key in known or key == unknown}


class StrictModel(RequestModel):
    """A request body whose fields must have the right JSON type: ``"1"`` is not a number, and 1 is not true."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class LaxModel(RequestModel):
    """A request body of ``/generate`` or ``/chat``. Clients of these endpoints may write ``"True"`` and ``"0.7"`` as
    text.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


def short(value: object) -> str:
    """Returns a value as JSON, shortened for an error message."""
    try:
        return clip(orjson.dumps(value).decode())
    except (orjson.JSONEncodeError, TypeError):
        return clip(repr(value))


def clip(text: str) -> str:
    """Returns a client's text, shortened for an error message."""
    return text if len(text) <= SHORT_CHARS else f"{text[:SHORT_CHARS]}..."


def request_error(error: ValidationError, model: type[BaseModel] | None = None) -> RequestError:
    """Returns an error for the client about the first wrong field, with its value and the allowed values.

    If the field is unknown and ``model`` has a field with a similar name, the error suggests that field.
    """
    first = error.errors(include_url=False)[0]
    param = _path(first["loc"])
    kind = first["type"]
    if kind == "unsupported_parameter":
        param = _path((*first["loc"], first["ctx"]["name"]))
        return RequestError(
            f"'{param}' is not supported by this server; {first['ctx']['remedy']} (got {first['ctx']['got']}).",
            param=param,
            code=kind,
        )
    if kind == "missing":
        return RequestError(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    if kind == "extra_forbidden":
        hint = "" if model is None or len(first["loc"]) > 1 else _similar_field(param, model)
        text = f"Unrecognized request argument supplied: {param}{hint}"
        return RequestError(text, param=param, code="unknown_parameter")
    message = _message(kind, first["msg"], first["input"])
    code = "invalid_type" if kind.endswith(("_type", "_parsing")) else "invalid_value"
    return RequestError(f"'{param}' {message}; got {short(first['input'])}.", param=param, code=code)


def _message(kind: str, message: str, value: object) -> str:
    """Returns what is wrong with ``value``. Types have their JSON names, such as "object". ``kind`` and ``message`` are
    those of pydantic.
    """
    if kind in ("model_type", "dict_type"):
        return message if message.startswith("should") else "should be an object"
    if kind == "int_type" and isinstance(value, float) and not -(2**63) <= value < 2**64:  # orjson returns a float
        return "should be an integer of at most 64 bits"
    message = message.replace(" after validation", "")
    for what in ("Input", "List", "String"):
        message = message.replace(f"{what} should", "should", 1)
    return message


def _similar_field(name: str, model: type[BaseModel]) -> str:
    """Returns the end of an error message about an unknown field: the field that is probably meant, or ""."""
    if issubclass(model, RequestModel) and name in model.renamed:
        return f"; use '{model.renamed[name]}'"
    if len(name) > SHORT_CHARS:  # longer than any field; a comparison takes time and memory for each character
        return ""
    known = [field.alias or key for key, field in model.model_fields.items()]
    matches = difflib.get_close_matches(name, known, n=1, cutoff=SIMILARITY)
    return f"; did you mean '{matches[0]}'?" if matches else ""


def _path(location: tuple[int | str, ...]) -> str:
    """Returns the location of a field as text: ``('messages', 0, 'role')`` becomes ``messages[0].role``."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return clip(text)
