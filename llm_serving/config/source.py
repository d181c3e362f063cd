"""Records whether each value comes from the YAML or the command line, for messages. Lists settings without effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llm_serving.errors import ConfigError
from llm_serving.formats.typed_fields import short_repr

COMMAND_LINE = "command line"
OVERRIDE = "--set"


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
        """Returns the file or the command line that gave ``section.key``."""
        return COMMAND_LINE if key in self.overridden else self.file

    def error(self, key: str, value: object, problem: str) -> ConfigError:
        """Returns an error for a wrong value of ``section.key``, which names the YAML or the command line."""
        return key_error(self.source(key), key, value, problem)


@dataclass(frozen=True, slots=True)
class UnusedSetting:
    """A setting of a YAML that was read but has no effect."""

    file: str
    """Path of the YAML."""
    key: str
    """Full name of the setting, for example ``context.ascend_config``."""
    value: str
    """The value as text, shortened to one line."""
    reason: str


def unused_lines(settings: Sequence[UnusedSetting]) -> list[str]:
    """Returns one line for each pair of file and reason. The line lists all settings of the file with this reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for each in settings:
        groups.setdefault((each.file, each.reason), []).append(f"{each.key} = {each.value}")
    return [f"{Path(file).name}: no effect: {', '.join(keys)}: {reason}" for (file, reason), keys in groups.items()]


def unused_summary(settings: Sequence[UnusedSetting]) -> list[str]:
    """Returns a line for each file with the number of its settings without effect."""
    counts = Counter(each.file for each in settings)
    where = "--check, the log (settings_unused) and /server_info list them with the reasons"
    return [f"{Path(file).name}: {count} settings have no effect here; {where}" for file, count in counts.items()]


def key_error(source: str, key: str, value: object, problem: str) -> ConfigError:
    """Returns an error whose message has the source (file or command line), the key, its value and the problem."""
    return ConfigError(f"{source}: {key} = {short_repr(value)}: {problem}")
