"""Read a small JSON file that must hold an object, each of its keys once."""

from __future__ import annotations

import json
from pathlib import Path

from llm_serving.errors import LLMServingError
from llm_serving.formats.bounded_file import read_small_text


def read_json_object(file: Path, max_bytes: int, error: type[LLMServingError]) -> dict[str, object]:
    """The object. Raises ``error``, naming the file, when it is anything else."""
    text = read_small_text(file, max_bytes, error)
    try:
        values = json.loads(text, object_pairs_hook=no_duplicate_keys)
    except (ValueError, RecursionError) as reason:
        raise error(f"{file}: not valid JSON: {reason}") from reason
    if not isinstance(values, dict):
        raise error(f"{file}: must hold a JSON object, not {type(values).__name__}")
    return values


def no_duplicate_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """For ``object_pairs_hook`` of ``json.loads``. Raises ValueError naming a key that is there twice."""
    values = dict(pairs)
    if len(values) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"duplicate key {next(key for key in keys if keys.count(key) > 1)!r}")
    return values
