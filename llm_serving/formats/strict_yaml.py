"""Reads YAML strictly: it refuses tags that build objects, contradicting duplicate keys and deep nesting.

Values without quotes follow YAML 1.2: ``yes``, ``on``, ``1:30`` and ``010`` are text, and ``1e-5`` is a number. PyYAML
follows YAML 1.1 and would read these values as true, true, 90, 8 and text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from llm_serving.errors import ConfigError
from llm_serving.formats.small_files import read_small_text

MAX_YAML_BYTES = 64 * 1024
"""Maximum size of a YAML file."""
MAX_YAML_DEPTH = 32
"""Maximum depth of nested lists and mappings in a YAML file."""


class _StrictLoader(yaml.SafeLoader):
    """A PyYAML loader that refuses duplicate keys with different values, and deep nesting. Both checks run before it
    creates objects.
    """

    yaml_implicit_resolvers = {}  # noqa: RUF012  (the loop below fills the dict of the class)
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        self._depth += 1
        if self._depth > MAX_YAML_DEPTH:
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(
                None, None, f"nested deeper than {MAX_YAML_DEPTH} levels", event.start_mark
            )
        node = super().compose_node(parent, index)  # type: ignore[arg-type]
        self._depth -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: dict[str, yaml.Node] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.composer.ComposerError(None, None, "a key must be plain text", key.start_mark)
            if key.value in seen and not _is_same_scalar(seen[key.value], value):
                raise yaml.composer.ComposerError(None, None, f"duplicate key {key.value!r}", key.start_mark)
            seen[key.value] = value
        return node


def _is_same_scalar(first: yaml.Node, second: yaml.Node) -> bool:
    """Returns True if two YAML nodes are equal scalars.

    Duplicate keys with equal values are allowed, because a config of MindSpore llm-serving has a duplicate key.
    """
    scalars = isinstance(first, yaml.ScalarNode) and isinstance(second, yaml.ScalarNode)
    return scalars and (first.tag, first.value) == (second.tag, second.value)


for _tag, _pattern, _first in (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?(?:0|[1-9][0-9]*)$", list("-+0123456789")),
    ("float", r"^[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$", list("-+.0123456789")),
    ("merge", r"^<<$", ["<"]),
):
    _StrictLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)


def parse_yaml(text: str, source: str) -> object:
    """Returns the value of a YAML text with one document. Raises ConfigError with ``source`` and the line."""
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506  (a SafeLoader)
    except yaml.MarkedYAMLError as reason:
        raise ConfigError(f"{source}{_line(reason)}: {_problem(reason)}") from reason
    except (yaml.YAMLError, ValueError, RecursionError) as reason:
        raise ConfigError(f"{source}: not valid YAML: {reason}") from reason


def _line(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    return f":{mark.line + 1}" if mark is not None else ""


def _problem(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or error.context or "syntax error"
    if problem.startswith(("duplicate key", "nested deeper", "a key must")):
        return problem
    return f"not valid YAML: {problem}"


def read_yaml_mapping(path: Path) -> dict[str, object]:
    """Returns the mapping in a YAML file. Raises ConfigError with the file name."""
    document = parse_yaml(read_small_text(path, MAX_YAML_BYTES, ConfigError), str(path))
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: must hold a mapping of sections, not {type(document).__name__}")
    return {str(key): value for key, value in document.items()}
