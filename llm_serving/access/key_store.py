"""Holds the valid API keys. When the key file changes, it is read again without a restart of the server."""

from __future__ import annotations

import hmac
import os
import stat
import threading
from collections.abc import Mapping
from typing import Protocol

from llm_serving.access.keys import MAX_KEY_CHARS, ApiKey, KeyLineError, digest_of, parse_keys
from llm_serving.errors import ConfigError

ENVIRONMENT_VARIABLE = "LLM_SERVING_API_KEYS"
"""Environment variable that may contain the lines of a key file. A semicolon also ends a line."""
MAX_FILE_BYTES = 16 * 1024 * 1024
"""Maximum size of the key file."""


class KeyLog(Protocol):
    """The two logging methods that the key store calls on the event log."""

    def event(self, name: str, /, *, level: str = "info", **fields: object) -> None: ...
    def error(self, message: str, /, *, event: str = "error", **fields: object) -> None: ...


class KeyStore:
    """The API keys of a file and of the environment. The constructor raises ConfigError for a wrong key or key file."""

    def __init__(self, path: str | None, environment: str, log: KeyLog) -> None:
        self._path = path
        self._log = log
        self._lock = threading.Lock()
        self._fixed = _keys_of_environment(environment) if environment.strip(" ;\n") else {}
        self._seen: tuple[int, ...] | None = None
        self._keys: Mapping[bytes, ApiKey] = self._fixed
        self._named: tuple[Mapping[bytes, ApiKey], Mapping[str, ApiKey]] = {}, {}
        """A cache for the method ``named``: the mapping ``_keys`` from which the cache was made, and its keys by name.
        If ``_keys`` is another mapping now, ``named`` makes the cache again.
        """
        if path is not None:
            self._seen = file_signature(path)
            self._keys = self._read(path)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, secret: str) -> ApiKey | None:
        """Returns the key with this secret, or None.

        The look-up uses a hash, so its time does not reveal how many characters of a wrong secret are correct.
        """
        if len(secret) > MAX_KEY_CHARS:
            return None
        digest = digest_of(secret)
        key = self._keys.get(digest)
        return key if key is not None and hmac.compare_digest(key.digest, digest) else None

    def named(self, name: str) -> ApiKey | None:
        """Returns a key with this name, or None. All keys with one name have the same rights."""
        keys, by_name = self._named
        if keys is not self._keys:
            by_name = {key.name: key for key in self._keys.values()}
            self._named = self._keys, by_name
        return by_name.get(name)

    @property
    def has_file(self) -> bool:
        """Whether keys come from a file, and not only from the environment."""
        return self._path is not None

    def has_changed(self) -> bool:
        """Returns True if the file has changed since it was read last."""
        return self._path is not None and file_signature(self._path) != self._seen

    def refresh(self) -> bool:
        """Reads the file if it has changed. Returns True if new keys are valid now.

        If the file has an error, logs the error, and the old keys stay valid. Any thread may call this method. Reading
        10000 keys takes 0.2 seconds.
        """
        with self._lock:
            path = self._path
            if path is None or (seen := file_signature(path)) == self._seen:
                return False
            self._seen = seen
            try:
                self._keys = self._read(path)
            except ConfigError as error:
                self._log.error(f"{error}; the earlier keys stay valid", event="api_keys_refused")
                return False
            self._log.event("api_keys_loaded", keys=len(self._keys), file=path)
            return True

    def _read(self, path: str) -> Mapping[bytes, ApiKey]:
        """Returns the keys of the file and of the environment together. Raises ConfigError."""
        try:
            text, mode = _read_file(path)
            keys = parse_keys(text)
            _check_disjoint(keys, self._fixed)
        except (KeyLineError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ConfigError(f"serving_config.api_keys_file: {path}: {reason}") from None
        if mode & 0o044:
            message = f"others can read {path}; it holds only hashes, but 'chmod 600' keeps the names private, too"
            self._log.event("api_keys_readable", level="warning", message=message)
        return {**keys, **self._fixed}


def _keys_of_environment(text: str) -> dict[bytes, ApiKey]:
    try:
        return parse_keys(text.replace(";", "\n"))
    except KeyLineError as error:
        raise ConfigError(f"{ENVIRONMENT_VARIABLE}: {error}") from None


def _check_disjoint(keys: Mapping[bytes, ApiKey], fixed: Mapping[bytes, ApiKey]) -> None:
    rights = {key.name: key.rights for key in fixed.values()}
    for key in keys.values():
        if key.digest in fixed or rights.get(key.name, key.rights) != key.rights:
            raise KeyLineError(
                f"{ENVIRONMENT_VARIABLE} also has this key, or other rights, of {key.name!r}; state them in one place"
            )


def file_signature(path: str) -> tuple[int, ...] | None:
    """Returns numbers that change when the file is written or replaced: device, inode, size and times.

    Returns None if there is no file.
    """
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _read_file(path: str) -> tuple[str, int]:
    """Returns the text and the permission bits of a key file. Raises OSError or KeyLineError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise KeyLineError("is not a file")
        if found.st_mode & 0o022:
            raise KeyLineError("others may write this file, so they could add keys; use 'chmod 600'")
        if found.st_size > MAX_FILE_BYTES:
            raise KeyLineError(f"has {found.st_size} bytes; the maximum is {MAX_FILE_BYTES}")
        data = file.read(MAX_FILE_BYTES)
    try:
        return data.decode("utf-8"), found.st_mode
    except UnicodeDecodeError:
        raise KeyLineError("is not UTF-8 text") from None
