"""Reads small text and JSON files. Pipes, folders and files above a size limit are refused."""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from pathlib import Path

from llm_serving.errors import LLMServingError

_SHOWN_CHARS = 80
"""Maximum number of characters that an error message shows of a key of a JSON object."""


def read_small_text(path: Path, max_bytes: int, error: type[LLMServingError]) -> str:
    """Returns the text of a UTF-8 file of at most ``max_bytes``. If the file is larger or not UTF-8, raises ``error``
    with the file name.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as reason:
        raise error(f"{path}: cannot be read: {reason.strerror}") from reason
    except ValueError as reason:  # the path has a null byte
        raise error(f"{str(path)!r}: cannot be read: {reason}") from reason
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise error(f"{path}: is not a regular file")
        if status.st_size > max_bytes:
            raise error(f"{path}: has {status.st_size} bytes; at most {max_bytes} are read")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(max_bytes)
    finally:
        os.close(descriptor)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as reason:
        raise error(f"{path}: is not UTF-8 text (byte {reason.start})") from reason


def read_json_object(file: Path, max_bytes: int, error: type[LLMServingError]) -> dict[str, object]:
    """Returns the object in a JSON file. Raises ``error`` with the file name if the content is not a JSON object."""
    text = read_small_text(file, max_bytes, error)
    try:
        values = json.loads(text, object_pairs_hook=no_duplicate_keys)
    except (ValueError, RecursionError) as reason:
        raise error(f"{file}: not valid JSON: {reason}") from reason
    if not isinstance(values, dict):
        raise error(f"{file}: must hold a JSON object, not {type(values).__name__}")
    return values


def no_duplicate_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Returns the pairs of a JSON object as a dict (a hook of ``json.loads``). Raises ValueError for a repeated key.

    The time grows linearly with the number of pairs, even for an object with many repeated keys from an untrusted
    client.
    """
    values = dict(pairs)
    if len(values) != len(pairs):
        [(key, times)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"duplicate key {key[:_SHOWN_CHARS]!r}, {times} times in one object; keep one")
    return values
