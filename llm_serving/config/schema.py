"""The declaration of a config key: its dataclass field has the default, the meaning, the unit and the limits.

The loader checks values against the declaration. ``docs/configuration.md`` and ``--help`` are generated from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from typing import Any

_METADATA_KEY = "config_key"


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """The facts about a key, in addition to its type and default. Limits are inclusive and apply to list elements."""

    meaning: str
    published: bool
    unit: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    null: str = ""
    """The meaning of null. Empty if null is not allowed."""
    unavailable: tuple[tuple[object, str], ...] = ()
    """(value, reason): values of the published configs that this server does not support."""
    normalise: Callable[[str], str] | None = None


def published(default: object, meaning: str, **details: Any) -> Any:
    """Declare a key of the published configs, which keeps its name and meaning."""
    return _key(default, KeyInfo(meaning, published=True, **details))


def own(default: object, meaning: str, **details: Any) -> Any:
    """Declare a key that this project adds."""
    return _key(default, KeyInfo(meaning, published=False, **details))


def _key(default: object, info: KeyInfo) -> Any:
    return field(default=default, metadata={_METADATA_KEY: info})


def key_info(declared: Field[Any]) -> KeyInfo | None:
    """Return the declaration of a section's field. None for a field that is not a config key."""
    info: KeyInfo | None = declared.metadata.get(_METADATA_KEY)
    return info


def section_keys(section: type) -> dict[str, KeyInfo]:
    """Return the keys of a section class, in the order of their declaration."""
    return {declared.name: info for declared in fields(section) if (info := key_info(declared)) is not None}
