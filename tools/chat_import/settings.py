"""Reads a ``configuration.json`` and returns its settings, each with its dotted name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llm_serving.errors import LLMServingError
from llm_serving.formats.small_files import read_json_object

MAX_BYTES = 1024 * 1024
"""Maximum size of a ``configuration.json``."""
MAX_DEPTH = 32
"""Maximum depth of nested lists and objects in a ``configuration.json``."""
MAX_SHOWN_CHARS = 200
"""Maximum number of characters of a value in messages and in the comment of the config."""
HIDDEN = "(hidden)"
"""Stands for a secret in messages and in the comment of the config."""
_SECRET = re.compile(
    "password|passwd|passphrase|pwd|secret|apikey|accesskey|credential|privatekey|authtoken|accesstoken|bearer"
)
"""Part of a name whose value is never shown, without ``_`` and in lower case."""
_TOKEN = re.compile(r"tokens?(\[\d+\])?$")
"""End of a name that may be an access token, in the same form."""
_TEXT_TOKEN = re.compile(
    r"((begin|end|bos|eos|pad|unk|cls|sep|mask|image|stop|max|(additional|skip)?special)tokens?|(max|min|num)\w*tokens)"
    r"(\[\d+\])?"
)
"""Name of a token of a text, or of a number of tokens, in the same form."""


class ImportFailedError(LLMServingError):
    """Raised if a ``configuration.json`` cannot be imported."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One value of the file."""

    path: str
    """Names of the objects around the value and its own name, with dots between them."""
    parent: str
    """Name of the object that holds the value. Empty at the top level of the file."""
    name: str
    value: object

    @property
    def is_secret(self) -> bool:
        path = plain(self.path)
        return _SECRET.search(path) is not None or any(map(_is_access_token, path.split(".")))

    @property
    def shown_value(self) -> str:
        """The value for a message. Secrets are hidden."""
        return HIDDEN if self.is_secret else shown(self.value)

    @property
    def shown_path(self) -> str:
        """The dotted name. Other characters than letters, digits and ``._-[]`` are written as in JSON."""
        return shown_name(self.path)

    def is_named(self, name: str) -> bool:
        """Returns True if an option means this setting by its dotted name or by its own name."""
        return name in (self.path, self.name)

    def is_within(self, name: str) -> bool:
        """Returns True if an option means this setting or an object around it."""
        return self.is_named(name) or self.path.startswith((f"{name}.", f"{name}["))


def _is_access_token(name: str) -> bool:
    return _TOKEN.search(name) is not None and _TEXT_TOKEN.fullmatch(name) is None


def shown(value: object) -> str:
    """Returns a value as JSON in ASCII, shortened, for a message or comment."""
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[: MAX_SHOWN_CHARS - 3]}..."


def plain(name: str) -> str:
    """Returns a name in the form in which names are compared: without ``_`` and ``-``, in lower case."""
    return re.sub(r"[-_]", "", name).lower()


def shown_name(name: str) -> str:
    """Returns a name for a message or comment."""
    return name if re.fullmatch(r"[\w.\-\[\]]+", name, re.ASCII) else json.dumps(name)


def read_settings(file: Path) -> list[Setting]:
    """Returns the settings of a ``configuration.json`` in the order of the file.

    Raises ImportFailedError if the file is too large, not UTF-8, or not a JSON object. Repeated keys and deep nesting
    are also refused.
    """
    document = read_json_object(file, MAX_BYTES, ImportFailedError)
    _check(document, file, MAX_DEPTH)
    return [setting for name, value in document.items() for setting in _settings(value, name, "", name)]


def _check(value: object, file: Path, depth: int) -> None:
    """Raises ImportFailedError if the value is nested too deep, or if it has text that UTF-8 cannot represent."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as reason:
            raise ImportFailedError(f"{file}: not valid text: {json.dumps(value)[:MAX_SHOWN_CHARS]}") from reason
    if not isinstance(value, dict | list):
        return
    if depth == 0:
        raise ImportFailedError(f"{file}: nested deeper than {MAX_DEPTH} levels")
    for each in value:
        _check(each, file, depth - 1)
    if isinstance(value, dict):
        for each in value.values():
            _check(each, file, depth - 1)


def _settings(value: object, path: str, parent: str, name: str) -> Iterator[Setting]:
    """Yields the settings in a value.

    An empty object and a list of plain values are each the value of one setting. In a list of objects, each object has
    the name of the list.
    """
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from _settings(each, f"{path}.{key}", name, key)
    elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
        for index, each in enumerate(value):
            yield from _settings(each, f"{path}[{index}]", parent, name)
    else:
        yield Setting(path, parent, name, value)
