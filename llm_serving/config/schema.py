"""How a config key is declared: default, meaning, unit and limits live in the dataclass field, once.

The loader checks against them, ``docs/configuration.md`` and ``--help`` are written from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from typing import Any

_METADATA_KEY = "config_key"


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """What is known about a key beside its type and default. Limits are inclusive and hold for list elements."""

    meaning: str
    published: bool
    unit: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    null: str = ""
    """What null stands for; empty where null is not allowed."""
    unavailable: tuple[tuple[object, str], ...] = ()
    """(value, reason): values of the published dialect that are understood but refused for now."""
    normalise: Callable[[str], str] | None = None


def published(default: object, meaning: str, **details: Any) -> Any:
    """A key of the published configs, which keeps its name and meaning."""
    return _key(default, KeyInfo(meaning, published=True, **details))


def own(default: object, meaning: str, **details: Any) -> Any:
    """A key this project adds."""
    return _key(default, KeyInfo(meaning, published=False, **details))


def _key(default: object, info: KeyInfo) -> Any:
    return field(default=default, metadata={_METADATA_KEY: info})


def key_info(declared: Field[Any]) -> KeyInfo | None:
    """The declaration of a section's field; None for a field that is no config key."""
    info: KeyInfo | None = declared.metadata.get(_METADATA_KEY)
    return info


def section_keys(section: type) -> dict[str, KeyInfo]:
    """The keys of a section class, in the order they are declared."""
    return {declared.name: info for declared in fields(section) if (info := key_info(declared)) is not None}
