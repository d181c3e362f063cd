"""Decides for each setting of a ``configuration.json`` which key gets its value, and collects everything that fails."""

from __future__ import annotations

import math
import os
import shlex
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llm_serving.config.convert import convert, nearest, nearest_key, type_hints
from llm_serving.config.published_sections import PUBLISHED_SECTIONS
from llm_serving.config.schema import section_keys
from llm_serving.config.sections import SECTIONS
from llm_serving.errors import ConfigError
from tools.chat_import.conversions import LIST, UNCHANGED, Conversion, WrongValueError
from tools.chat_import.names import (
    ABSENT,
    DEVICES,
    DO_SAMPLE,
    IMPORTED,
    TENSOR_PARALLEL,
    Absent,
    Imported,
    Row,
    Target,
)
from tools.chat_import.settings import ImportFailedError, Setting, plain, shown_name
from tools.reference.configuration import allowed, type_name

PATH_KEYS = frozenset(
    {
        "model_config.model_path",
        "model_config.model_cfg_path",
        "tokenizer.vocab_file",
        "serving_config.tls_cert",
        "serving_config.tls_key",
    }
)
"""Keys whose relative paths are searched in the folder of the ``configuration.json`` first."""
_OTHER_PARALLEL = ("parallel_config.pipeline_parallel", "parallel_config.data_parallel")


def _by_name(rows: Sequence[Row]) -> dict[tuple[str | None, str], Row]:
    """Returns the rows by the name of an object and the name of a setting. None stands for any object."""
    found: dict[tuple[str | None, str], Row] = {}
    for row in rows:
        pairs: list[tuple[str | None, str]] = [(None, name) for name in row.names]
        pairs += [(place, name) for place in row.places for name in row.short_names]
        for place, name in pairs:
            pair = (None if place is None else plain(place), plain(name))
            assert pair not in found, f"two rows have {place} {name}"
            found[pair] = row
    return found


ROWS = _by_name((*IMPORTED, *ABSENT))
_KEYS = {f"{name}.{key}": info for name, cls in SECTIONS.items() for key, info in section_keys(cls).items()}
_PUBLISHED = {key for key, info in _KEYS.items() if info.published and not info.no_effect}
"""Keys that configs of MindSpore llm-serving also have, with the same meaning."""
_WITHOUT_EFFECT = {
    f"{name}.{key}": info.no_effect
    for name, cls in (*SECTIONS.items(), *PUBLISHED_SECTIONS.items())
    for key, info in section_keys(cls).items()
    if info.no_effect
}
"""The reason of each key of MindSpore llm-serving's configs that has no effect."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options that decide about single names."""

    mapped: Mapping[str, str] = field(default_factory=dict)
    """Key by name (``--map``)."""
    ignored: Sequence[str] = ()
    given: Mapping[str, object] = field(default_factory=dict)
    """Value by key (``--set``). It replaces that of the file."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A setting that cannot be imported."""

    path: str
    text: str
    remedy: str


@dataclass(slots=True)
class Import:
    """The imported values, the reasons why settings have no effect, and the problems."""

    values: dict[str, object] = field(default_factory=dict)
    """Value by key."""
    origins: dict[str, list[Setting]] = field(default_factory=dict)
    """The settings that gave a key its value."""
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    greedy: frozenset[str] = frozenset()
    """Dotted names of the objects with ``do_sample`` false. Their other sampling settings have no effect."""


def check_key(key: str) -> None:
    """Raises ImportFailedError if the config has no key of this name."""
    section, _, name = key.partition(".")
    if section not in SECTIONS:
        raise ImportFailedError(f"--map: unknown section {section!r}{nearest(section, list(SECTIONS))}")
    if key not in _KEYS:
        raise ImportFailedError(f"--map: unknown key {key!r}{nearest_key(section, name)}")


def import_settings(settings: Sequence[Setting], options: Options, folder: Path) -> Import:
    """Returns the keys and values of the settings. ``folder`` is the absolute path of the file's folder.

    Raises ImportFailedError if ``--map`` or ``--ignore`` names no setting.
    """
    for option, names in (("--map", options.mapped), ("--ignore", options.ignored)):
        for name in names:
            if not any(each.is_within(name) if option == "--ignore" else each.is_named(name) for each in settings):
                raise ImportFailedError(f"{option} {shown_name(name)}: the file has no setting of this name")
    result = Import(greedy=frozenset(_object_of(each) for each in settings if _is_greedy(each)))
    for name in options.ignored:
        number = sum(each.is_within(name) for each in settings)
        result.notes.append(f"{shown_name(name)}: left out with --ignore (settings: {number})")
    for setting in settings:
        if not any(setting.is_within(name) for name in options.ignored):
            _import_one(setting, options, folder, result)
    _divide_devices(result, options.given)
    return result


def _import_one(setting: Setting, options: Options, folder: Path, result: Import) -> None:
    mapped = next((key for name, key in options.mapped.items() if setting.is_named(name)), None)
    row = _row_of(setting)
    if mapped is not None:
        targets: Sequence[Target] = (Target(mapped, conversion_of(mapped)),)
    elif _is_published(setting):
        targets = (Target(setting.path, conversion_of(setting.path)),)
    elif isinstance(row, Imported):
        targets = row.targets
    elif isinstance(row, Absent):
        _note_absent(setting, row, result)
        return
    elif setting.path in _WITHOUT_EFFECT:
        result.notes.append(f"{setting.shown_path}: no effect: {_WITHOUT_EFFECT[setting.path]}")
        return
    else:
        _fail(result, setting, "the table of names does not have this name", f"--map {_quoted(setting)}=SECTION.KEY")
        return
    if setting.value in (None, ""):
        result.notes.append(f"{setting.shown_path} = {setting.shown_value}: states no value")
        return
    for target in targets:
        _set(setting, target, options, folder, result)


def _is_greedy(setting: Setting) -> bool:
    return plain(setting.name) == plain(DO_SAMPLE) and setting.value is False


def _object_of(setting: Setting) -> str:
    """Returns the dotted name of the object that holds a setting."""
    return setting.path.removesuffix(setting.name)


def _is_published(setting: Setting) -> bool:
    """Returns True for a key of MindSpore llm-serving's configs.

    MindFormers also has ``model_config.seq_length``, but as a number, which is the maximum length of a sequence.
    """
    return setting.path in _PUBLISHED and (isinstance(setting.value, list) or not _is_list(setting.path))


def _row_of(setting: Setting) -> Row | None:
    name = plain(setting.name)
    return ROWS.get((plain(setting.parent), name)) or ROWS.get((None, name))


def conversion_of(key: str) -> Conversion:
    """Returns the conversion of values for a key that ``--map`` names."""
    in_table = (target.conversion for row in IMPORTED for target in row.targets if target.key == key)
    return next(in_table, LIST if _is_list(key) else UNCHANGED)


def _is_list(key: str) -> bool:
    hint = _hint_of(key)
    return tuple in (typing.get_origin(each) for each in (hint, *typing.get_args(hint)))


def _hint_of(key: str) -> typing.Any:
    section, _, name = key.partition(".")
    return type_hints(SECTIONS[section])[name]


def values_in_words(key: str) -> str:
    """Returns type and range of a key, for example ``integer, 1 to 1024``."""
    return ", ".join(word for word in (type_name(_hint_of(key)), allowed(_KEYS[key])) if word)


def _note_absent(setting: Setting, row: Absent, result: Import) -> None:
    is_harmless = row.harmless is None or any(_is_same(setting.value, each) for each in row.harmless)
    if is_harmless or (row.samples and _object_of(setting) in result.greedy):
        result.notes.append(f"{setting.shown_path} = {setting.shown_value}: not needed: {row.reason}")
    elif setting.value in (None, ""):
        result.notes.append(f"{setting.shown_path} = {setting.shown_value}: states no value")
    else:
        _fail(result, setting, f"has no counterpart: {row.reason}")


def _is_same(value: object, other: object) -> bool:
    """Returns True for equal values. A boolean does not equal a number."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _set(setting: Setting, target: Target, options: Options, folder: Path, result: Import) -> None:
    """Gives a key the value of a setting, or adds a problem."""
    key = target.key
    real_key = TENSOR_PARALLEL if key == DEVICES else key
    setter = f"--set {real_key}=VALUE"
    if real_key in options.given:
        result.notes.append(f"{setting.shown_path} = {setting.shown_value}: replaced by --set {real_key}")
        return
    try:
        value = _in_folder(key, _checked(setting, real_key, target.conversion), folder)
    except WrongValueError as error:
        _fail(result, setting, str(error), setter)
        return
    if key in result.values and result.values[key] != value:
        other = result.origins[key][0]
        problem = f"{other.shown_path} = {other.shown_value} gives {key} another value"
        _fail(result, setting, problem, f"--ignore {_quoted(other)} leaves out the other name; {setter}")
        return
    result.values[key] = value
    result.origins.setdefault(key, []).append(setting)


def _checked(setting: Setting, key: str, conversion: Conversion) -> object:
    """Returns the converted value of a setting. Raises WrongValueError if the key does not accept it."""
    value = conversion.convert(setting.value)
    try:
        convert(value, _hint_of(key), key, setting.shown_path, _KEYS[key])
    except ConfigError as error:
        problem = str(error).rpartition(": ")[2]
        raise WrongValueError(f"{problem} ({key}: {values_in_words(key).replace('`', '')})") from error
    return value


def _in_folder(key: str, value: object, folder: Path) -> object:
    """Returns the absolute path of a file or folder next to the ``configuration.json``, or else the value.

    Symbolic links stay in the path, because their targets change, for example when a certificate is renewed.
    """
    if key not in PATH_KEYS or not isinstance(value, str):
        return value
    path = str(folder / value)
    return path if os.path.exists(path) else value


def _divide_devices(result: Import, given: Mapping[str, object]) -> None:
    """Replaces the number of all devices by ``tensor_parallel``. Adds a problem if the numbers do not agree."""
    if DEVICES not in result.values:
        return
    number, origins = typing.cast(int, result.values.pop(DEVICES)), result.origins.pop(DEVICES)
    stated = {**result.values, **given}
    others = [key for key in (TENSOR_PARALLEL, *_OTHER_PARALLEL) if isinstance(stated.get(key), int)]
    known = math.prod(typing.cast(int, stated[key]) for key in others)
    if known < 1 or number % known or (TENSOR_PARALLEL in others and number != known):
        settings = [each for key in others for each in result.origins.get(key, ())]
        named = [f"{each.shown_path} = {each.shown_value}" for each in settings]
        named += [f"--set {key}={given[key]}" for key in others if key in given]
        _fail(result, origins[0], f"is the number of all devices, and {' and '.join(named)} needs another number")
    elif TENSOR_PARALLEL not in others:
        result.values[TENSOR_PARALLEL] = number // known
        result.origins[TENSOR_PARALLEL] = origins
    else:
        result.origins[TENSOR_PARALLEL] += origins


def _fail(result: Import, setting: Setting, reason: str, remedy: str = "") -> None:
    ignore = f"--ignore {_quoted(setting)}"
    text = f"{setting.shown_path} = {setting.shown_value}: {reason}"
    problem = Problem(setting.path, text, f"use {remedy}; or {ignore}" if remedy else f"use {ignore}")
    if not result.problems or result.problems[-1].text != text:  # a setting with two targets can fail twice
        result.problems.append(problem)


def _quoted(setting: Setting) -> str:
    """Returns the dotted name as a word for a shell."""
    return shlex.quote(setting.path) if setting.path.isprintable() else "NAME"
