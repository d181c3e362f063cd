"""``--set section.key=value``: values are YAML, so lists, numbers, null and true work as in the file."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from pathlib import Path

from llm_serving.config.convert import nearest, nearest_key
from llm_serving.config.sections import SECTIONS
from llm_serving.config.source import COMMAND_LINE, RawConfig
from llm_serving.errors import ConfigError
from llm_serving.formats.strict_yaml import parse_yaml
from llm_serving.formats.typed_fields import short_repr

MAX_OVERRIDE_CHARACTERS = 8192


def raw_config(file: Path, document: dict[str, object], overrides: Sequence[str]) -> RawConfig:
    """The sections of ``document`` with the overrides over them; a later override wins over an earlier one."""
    sections: dict[str, dict[str, object]] = {}
    for name, values in document.items():
        if values is not None and not isinstance(values, dict):
            raise ConfigError(f"{file}: {name} = {short_repr(values)}: a section must be a mapping of keys")
        sections[name] = {str(key): value for key, value in (values or {}).items()}
    overridden: set[str] = set()
    for text in overrides:
        section, key, value = parse_override(text)
        sections.setdefault(section, {})[key] = value
        overridden.add(f"{section}.{key}")
    return RawConfig(str(file), sections, frozenset(overridden))


def parse_override(text: str) -> tuple[str, str, object]:
    """Section, key and value of one override. Raises ConfigError quoting it when section or key is unknown."""
    path, equals, raw_value = text.partition("=")
    section, dot, key = path.strip().partition(".")
    if not equals or not dot or not section or not key:
        raise ConfigError(f"{COMMAND_LINE} {text!r}: must be section.key=value, as in pa_config.num_blocks=2048")
    if len(text) > MAX_OVERRIDE_CHARACTERS:
        raise ConfigError(f"{COMMAND_LINE} {path}: has more than {MAX_OVERRIDE_CHARACTERS} characters")
    if section not in SECTIONS:
        raise ConfigError(f"{COMMAND_LINE} {text!r}: unknown section {section!r}{nearest(section, list(SECTIONS))}")
    hints = typing.get_type_hints(SECTIONS[section])
    if key not in hints:
        raise ConfigError(f"{COMMAND_LINE} {text!r}: unknown key '{section}.{key}'{nearest_key(section, key)}")
    return section, key, _value(raw_value.strip(), hints[key], f"{COMMAND_LINE} {path}")


def _value(text: str, hint: object, source: str) -> object:
    """The YAML value; for a key that takes text, what was typed unless it is null or quoted."""
    takes_text = hint is str or str in typing.get_args(hint)
    if not takes_text:
        return parse_yaml(text, source)
    if text in ("null", "~", ""):
        return None
    return parse_yaml(text, source) if text[0] in "\"'" else text
