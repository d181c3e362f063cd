"""Keeps, for error messages, whether a value of the configuration comes from the YAML or from the command line."""

from __future__ import annotations

from dataclasses import dataclass, field

from llm_serving.errors import ConfigError
from llm_serving.formats.typed_fields import short_repr

COMMAND_LINE = "--set"


@dataclass(frozen=True, slots=True)
class RawConfig:
    """The sections of a YAML with the overrides of the command line, before any check."""

    file: str
    sections: dict[str, dict[str, object]]
    overridden: frozenset[str] = field(default_factory=frozenset)
    """Keys given on the command line, as ``section.key``."""

    def is_overridden(self, key: str) -> bool:
        return key in self.overridden

    def source(self, key: str) -> str:
        """Return the file or the command line that gave ``section.key``."""
        return COMMAND_LINE if key in self.overridden else self.file

    def error(self, key: str, value: object, problem: str) -> ConfigError:
        """Return an error for a wrong value of ``section.key``, which names the YAML or the command line."""
        return key_error(self.source(key), key, value, problem)


def key_error(source: str, key: str, value: object, problem: str) -> ConfigError:
    """Return an error whose message has the source (file or command line), the key, its value and the problem."""
    return ConfigError(f"{source}: {key} = {short_repr(value)}: {problem}")
