"""Declares the keys of the configuration. Each key is a dataclass field with meaning, unit and limits.

The loader checks values against these fields. ``docs/configuration.md`` and ``--help`` are generated from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from typing import Any

MAX_SECONDS = 86_400.0
"""Maximum value of each setting that is a time in seconds: one day."""
AUTO_SIZE = 0
"""The number that stands for ``auto``, in keys whose other values are integers above 0."""
_METADATA_KEY = "config_key"


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """The declaration of a configuration key, apart from its type and default.

    The dataclass of the section has the type and the default. ``low`` and ``high`` are the smallest and the largest
    permitted value. If the key is a list, ``low``, ``high`` and ``choices`` apply to each element.
    """

    meaning: str
    published: bool
    unit: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    null: str = ""
    """Meaning of the value null. Empty if null is not allowed."""
    unavailable: tuple[tuple[object, str], ...] = ()
    """Values that MindSpore llm-serving accepts and this server refuses, as pairs (value, reason)."""
    normalise: Callable[[str], str] | None = None
    auto: bool = False
    """Whether the text ``auto`` is accepted. It is stored as ``AUTO_SIZE`` until the loader replaces it."""
    no_effect: str = ""
    """Reason why a key of MindSpore llm-serving has no effect in this server. Empty for a key with an effect."""


def published(default: object, meaning: str, **details: Any) -> Any:
    """Declares a key that configs of MindSpore llm-serving also have. Its name and its meaning must not change."""
    return _key(default, KeyInfo(meaning, published=True, **details))


def own(default: object, meaning: str, **details: Any) -> Any:
    """Declares a config key that MindSpore llm-serving does not have."""
    return _key(default, KeyInfo(meaning, published=False, **details))


def without_effect(meaning: str, reason: str, default: object = None, **details: Any) -> Any:
    """Declares a key of MindSpore llm-serving's configs that is checked but has no effect. ``reason`` states why."""
    null = "not stated" if default is None else ""
    return _key(default, KeyInfo(meaning, published=True, no_effect=reason, null=null, **details))


def _key(default: object, info: KeyInfo) -> Any:
    return field(default=default, metadata={_METADATA_KEY: info})


def key_info(declared: Field[Any]) -> KeyInfo | None:
    """Returns the declaration of a dataclass field, or None if the field is not a configuration key."""
    info: KeyInfo | None = declared.metadata.get(_METADATA_KEY)
    return info


def section_keys(section: type) -> dict[str, KeyInfo]:
    """Returns the keys of a section's dataclass, in the order of its fields, with their declarations."""
    return {declared.name: info for declared in fields(section) if (info := key_info(declared)) is not None}
