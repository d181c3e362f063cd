"""Makes frozen dataclasses from YAML or JSON, and checks each value by the type hint and the limits of its field."""

from __future__ import annotations

import difflib
import functools
import math
import types
import typing
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, cast

from llm_serving.config.published_sections import PUBLISHED_SECTIONS
from llm_serving.config.schema import AUTO_SIZE, KeyInfo, key_info
from llm_serving.config.sections import SECTIONS
from llm_serving.config.source import RawConfig, UnusedSetting, key_error
from llm_serving.errors import ConfigError
from llm_serving.formats.typed_fields import short_repr

MAX_LIST_LENGTH = 256
"""Maximum number of values in a list of the config."""
T = TypeVar("T")

_NO_LIMITS = KeyInfo("", published=False)
_ALL_SECTIONS = SECTIONS | PUBLISHED_SECTIONS


def build_sections(raw: RawConfig) -> dict[str, Any]:
    """Returns an object of every section's class, by section name. A missing section has its defaults."""
    for name in raw.sections:
        if name not in _ALL_SECTIONS:
            raise ConfigError(f"{raw.file}: unknown section {name!r}{nearest(name, list(SECTIONS))}")
    return {name: _build_section(raw, name, cls) for name, cls in _ALL_SECTIONS.items()}


def find_unused(raw: RawConfig, sections: dict[str, Any]) -> list[UnusedSetting]:
    """Returns the settings of the YAML that have no effect. Settings with their default value are left out."""
    unused = []
    for name, keys in raw.sections.items():
        declared = {each.name: each for each in fields(cast(Any, _ALL_SECTIONS[name]))}
        for key in keys:
            info = key_info(declared[key]) or _NO_LIMITS
            value = getattr(sections[name], key)
            if info.no_effect and value != declared[key].default:
                path = f"{name}.{key}"
                shown = list(value) if isinstance(value, tuple) else value
                unused.append(UnusedSetting(raw.source(path), path, short_repr(shown), info.no_effect))
    return unused


@functools.cache
def type_hints(cls: type) -> dict[str, Any]:
    """Returns the types of a section's keys. Python compiles each of them again at every call of get_type_hints."""
    return typing.get_type_hints(cls)


def _build_section(raw: RawConfig, name: str, cls: type[T]) -> T:
    declared = {each.name: each for each in fields(cast(Any, cls))}
    hints = type_hints(cast(Any, cls))
    values: dict[str, object] = {}
    for key, value in raw.sections.get(name, {}).items():
        path = f"{name}.{key}"
        if key not in declared:
            raise raw.error(path, value, f"unknown key{nearest_key(name, key)}")
        values[key] = convert(value, hints[key], raw.source(path), path, key_info(declared[key]) or _NO_LIMITS)
    return cls(**values)


def nearest(word: str, candidates: list[str]) -> str:
    """Returns the end of an error message about the unknown ``word``. It suggests the most similar candidate.

    If no candidate is similar enough, it lists all candidates.
    """
    if matches := difflib.get_close_matches(word, candidates, n=1, cutoff=0.6):
        return f"; did you mean {matches[0]!r}?"
    return f"; choose one of {', '.join(sorted(candidates))}"


def nearest_key(section: str, key: str) -> str:
    """Returns the end of an error message about an unknown key.

    It suggests the same key of another section, or else the most similar key.
    """
    for name, cls in SECTIONS.items():
        if key in {each.name for each in fields(cast(Any, cls))}:
            return f"; did you mean '{name}.{key}'?"
    return nearest(key, [each.name for each in fields(cast(Any, _ALL_SECTIONS[section]))])


def convert(value: object, hint: Any, source: str, path: str, info: KeyInfo = _NO_LIMITS) -> Any:
    """Returns ``value`` as the type ``hint``. Raises ConfigError if it is of another type or outside ``info``'s limits.

    ``source`` (a file, or the command line) and ``path`` (the key) are for the error's message.
    """
    allowed = _without_none(hint)
    if value is None:
        if allowed is hint:
            raise key_error(source, path, value, f"must be {_describe(hint)}, not null")
        return None
    if is_dataclass(allowed):
        return build_dataclass(value, cast(type, allowed), source, path)
    if typing.get_origin(allowed) is tuple:
        return _convert_list(value, typing.get_args(allowed)[0], source, path, info)
    return _convert_scalar(value, allowed, source, path, info)


def build_dataclass(value: object, cls: type[T], source: str, path: str) -> T:
    """Makes an object of dataclass ``cls`` from a mapping of its fields. Missing fields get their defaults."""
    if not isinstance(value, dict):
        raise key_error(source, path, value, "must be a mapping")
    hints = type_hints(cast(Any, cls))
    declared = {each.name: each for each in fields(cast(Any, cls))}
    for key in value:
        if key not in declared:
            raise key_error(source, f"{path}.{key}", value[key], f"unknown key{nearest(str(key), list(declared))}")
    values = {
        key: convert(item, hints[key], source, f"{path}.{key}", key_info(declared[key]) or _NO_LIMITS)
        for key, item in value.items()
    }
    try:
        return cls(**values)
    except TypeError as reason:
        raise key_error(source, path, value, str(reason)) from reason


def _convert_list(value: object, element: Any, source: str, path: str, info: KeyInfo) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise key_error(source, path, value, f"must be a list of {_describe(element)}, as in [1]")
    if len(value) > MAX_LIST_LENGTH:
        raise key_error(source, path, value, f"has {len(value)} elements; at most {MAX_LIST_LENGTH}")
    if not value and info is not _NO_LIMITS and not info.no_effect:
        raise key_error(source, path, value, "must not be empty")
    return tuple(convert(item, element, source, path, info) for item in value)


def _convert_scalar(value: object, hint: type, source: str, path: str, info: KeyInfo) -> Any:
    if info.auto and value == "auto":
        return AUTO_SIZE
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 1e300 else math.inf
    if type(value) is not hint:
        wanted = f"{_describe(hint)} or auto" if info.auto else _describe(hint)
        raise key_error(source, path, value, f"must be {wanted}, not {_describe(type(value))}")
    if isinstance(value, str):
        return _check_text(value, source, path, info)
    if isinstance(value, int | float) and not isinstance(value, bool):
        _check_range(value, source, path, info)
    _check_available(value, source, path, info)
    return value


def _check_text(value: str, source: str, path: str, info: KeyInfo) -> str:
    if info is not _NO_LIMITS and not info.no_effect and (not value or "\0" in value):
        raise key_error(source, path, value, "must not be empty or hold a null character")
    name = info.normalise(value) if info.normalise is not None else value
    if info.choices and name not in info.choices:
        raise key_error(source, path, value, f"unknown value{nearest(name, list(info.choices))}")
    _check_available(name, source, path, info)
    return name


def _check_available(value: object, source: str, path: str, info: KeyInfo) -> None:
    for refused, reason in info.unavailable:
        if value == refused:
            raise key_error(source, path, value, reason)


def _check_range(value: float, source: str, path: str, info: KeyInfo) -> None:
    if not math.isfinite(value):
        raise key_error(source, path, value, "must be a finite number")
    if info.low is not None and value < info.low:
        raise key_error(source, path, value, f"must be at least {info.low:g}")
    if info.high is not None and value > info.high:
        raise key_error(source, path, value, f"must be at most {info.high:.15g}")


def _without_none(hint: Any) -> Any:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return next(each for each in typing.get_args(hint) if each is not type(None))
    return hint


def _describe(hint: Any) -> str:
    names = {int: "an integer", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    names |= {list: "a list", dict: "a mapping"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))
