"""Loads a configuration: reads the YAML, applies ``--set section.key=value``, and checks all values."""

from __future__ import annotations

import os
import typing
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llm_serving.config.config import Config
from llm_serving.config.convert import build_sections, find_unused, nearest, nearest_key, type_hints
from llm_serving.config.draft_source import Fetch, as_path
from llm_serving.config.hardware import Hardware
from llm_serving.config.lookup import find_config_file
from llm_serving.config.resolve import Resolver
from llm_serving.config.sections import SECTIONS
from llm_serving.config.serving_checks import agents_of_graphs, check_serving, check_telemetry
from llm_serving.config.source import OVERRIDE, RawConfig
from llm_serving.config.validation import check_model_name
from llm_serving.errors import ConfigError
from llm_serving.formats.strict_yaml import parse_yaml, read_yaml_mapping
from llm_serving.formats.typed_fields import short_repr

MAX_OVERRIDE_CHARACTERS = 8192
"""Maximum length of a value of ``--set``."""


def load_config(
    path_or_name: str,
    overrides: Sequence[str] = (),
    *,
    ascend: bool | None = None,
    bfloat16: bool | None = None,
    fetch: Fetch = as_path,
) -> Config:
    """Reads a configuration file and returns its checked ``Config``.

    ``path_or_name`` is a path, or a name that is searched under ``configs/``. Each override is ``section.key=value``.
    ``ascend`` states whether the machine has an Ascend, and ``bfloat16`` whether its kernels multiply bfloat16. None
    detects it. ``fetch`` downloads a draft model that is given by its name on a hub. Raises ConfigError with file, key
    and value. Raises CheckpointError if the model folder cannot be used.
    """
    file = find_config_file(path_or_name)
    raw = _raw_config(file, read_yaml_mapping(file), overrides)
    sections = build_sections(raw)
    notes = []
    if agents := agents_of_graphs(raw, sections):
        sections["parallel_config"] = replace(sections["parallel_config"], tensor_parallel=agents)
        reason = f"model_path.prefill_model has {agents} graphs, so parallel_config.tensor_parallel is {agents}"
        notes.append(f"{file}: {reason}")
    unused = find_unused(raw, sections)
    check_serving(raw, sections["serving_config"], sections["parallel_config"])
    check_telemetry(raw, sections["telemetry_config"])
    check_model_name(raw, sections["model_config"].model_name)
    own = {name: section for name, section in sections.items() if name in SECTIONS}
    resolver = Resolver(raw, own, Hardware.detect(os.environ, ascend, bfloat16), notes, unused, fetch)
    return resolver.config()


def parse_override(text: str) -> tuple[str, str, object]:
    """Returns section, key and value of ``section.key=value``. The value is read as YAML: a list, number, null or text.

    Raises ConfigError if the section or the key is unknown.
    """
    path, equals, raw_value = text.partition("=")
    section, dot, key = path.strip().partition(".")
    if not equals or not dot or not section or not key:
        raise ConfigError(f"{OVERRIDE} {text!r}: must be section.key=value, as in pa_config.num_blocks=2048")
    if len(text) > MAX_OVERRIDE_CHARACTERS:
        raise ConfigError(f"{OVERRIDE} {path}: has more than {MAX_OVERRIDE_CHARACTERS} characters")
    if section not in SECTIONS:  # ``SECTIONS`` lacks the sections without effect, so these cannot be overridden
        raise ConfigError(f"{OVERRIDE} {text!r}: unknown section {section!r}{nearest(section, list(SECTIONS))}")
    hints = type_hints(SECTIONS[section])
    if key not in hints:
        raise ConfigError(f"{OVERRIDE} {text!r}: unknown key '{section}.{key}'{nearest_key(section, key)}")
    return section, key, _value(raw_value.strip(), hints[key], f"{OVERRIDE} {path}")


def _raw_config(file: Path, document: dict[str, object], overrides: Sequence[str]) -> RawConfig:
    """Returns the sections of a YAML document with the overrides applied. The last override of a key wins."""
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


def _value(text: str, hint: object, source: str) -> object:
    """Returns the value of an override, read as YAML.

    For a key of type ``str``, text without quotes is taken literally.
    """
    takes_text = hint is str or str in typing.get_args(hint)
    if not takes_text:
        return parse_yaml(text, source)
    if text in ("null", "~", ""):
        return None
    return parse_yaml(text, source) if text[0] in "\"'" else text
