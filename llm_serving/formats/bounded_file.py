"""Read a small text file without being fooled by a pipe, a directory or a huge file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from llm_serving.errors import LLMServingError


def read_small_text(path: Path, max_bytes: int, error: type[LLMServingError]) -> str:
    """The file's text (UTF-8). Raises ``error``, naming the file, when it is no regular file of that size."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as reason:
        raise error(f"{path}: cannot be read: {reason.strerror}") from reason
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
