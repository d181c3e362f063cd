"""Writes a file of API keys for tests, and makes the access control that reads it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from llm_serving.access.audit import AuditLog
from llm_serving.access.control import AccessControl
from llm_serving.access.key_store import KeyStore
from llm_serving.access.keys import digest_of


class SilentLog:
    """An event log that discards its events."""

    def event(self, name: str, /, *, level: str = "info", **fields: object) -> None:
        pass

    def error(self, message: str, /, *, event: str = "error", **fields: object) -> None:
        pass


def secret_of(name: str) -> str:
    """Returns the API key that all tests use for a client's name."""
    return f"sk-test-{name}-0123456789abcdef0123456789"


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret_of(name)}"}


def write_keys(path: Path, lines: Sequence[str]) -> Path:
    """Writes a key file by an atomic rename. Each line has a name and its rights, for example ``alice admin``."""
    new = path.with_suffix(".new")
    parts = [line.partition(" ") for line in lines]
    new.write_text("".join(f"{name} sha256:{digest_of(secret_of(name)).hex()} {rest}\n" for name, _, rest in parts))
    new.chmod(0o600)
    os.replace(new, path)
    return path


def access_for(
    folder: Path, *lines: str, audit: Path | None = None, refused: Callable[[str], None] = lambda reason: None
) -> AccessControl:
    """Writes ``lines`` to the file ``keys`` of a folder. Returns an access control that reads this file."""
    keys = KeyStore(str(write_keys(folder / "keys", lines)), "", SilentLog()) if lines else None
    return AccessControl(keys, None if audit is None else AuditLog(str(audit)), refused)
