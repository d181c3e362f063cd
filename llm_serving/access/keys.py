"""Creates API keys, and reads and writes the lines of a key file, which state the names and rights of keys.

A key is 32 random bytes, and the server stores only its SHA-256. Passwords need slow, salted hashes, because attackers
can guess passwords. 256 random bits cannot be guessed, so a plain hash is safe. With a plain hash, the server also
finds a key with one look-up, for any number of keys.

A line is ``NAME sha256:HEX [admin] [sessions] [OPTION=VALUE ...]``. Empty lines and lines that begin with ``#`` are
ignored. Several lines may have the same name if they state the same rights. So an operator can hand out a new key
before removing the old one. Both keys then share one quota, one tenant and one part of the prefix cache.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

PREFIX = "sk-llm-"
"""Text at the beginning of each new key. People and scanners of source code recognise a key by this text."""
KEY_BYTES = 32
"""Number of random bytes in a new API key."""
MIN_KEY_CHARS = 32
"""Minimum length of a key that another program created. An attacker with the hash of a shorter key could try all texts
of this length, and find the key."""
MAX_KEY_CHARS = 512
"""Maximum length of an API key."""
MAX_KEYS = 65536
"""Maximum number of API keys in a key file."""
MAX_LIMIT = 1 << 40
"""Largest quota that a line of the key file may state."""
MAX_PRIORITY = 2**31 - 1
"""Largest priority that a line of the key file may state. The smallest is the same number with a minus sign."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_INTEGER = re.compile(r"-?[0-9]{1,15}")


@dataclass(frozen=True, slots=True)
class KeyRights:
    """The rights of a key, and the limits of its requests. A limit of None means no limit."""

    admin: bool = False
    """True if the key may read metrics and the state of the server, profile the agents, and change LoRA adapters,
    nodes, models and shadow serving.
    """
    requests_in_flight: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    priority: int = 0
    """The most urgent priority that a request may state. A smaller number is more urgent."""
    models: frozenset[str] | None = None
    """Names of the models that the key may use. None: all models."""
    sessions: bool = False
    """True if the key may export and import sessions."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key without its secret: the hash, the name of its owner, and its rights."""

    name: str
    digest: bytes
    rights: KeyRights


class KeyLineError(ValueError):
    """A line of a key file does not describe a valid key.

    The message states the problem and the remedy. It does not quote the line, which may contain a secret.
    """


def new_secret() -> str:
    """Returns the secret text of a new random API key."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def digest_of(secret: str) -> bytes:
    """Returns the SHA-256 of a key. The server stores and compares only this hash."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def key_line(key: ApiKey) -> str:
    """Returns the line of a key file that states this key."""
    rights, words = key.rights, [key.name, f"sha256:{key.digest.hex()}"]
    words += [word for word in WORDS if getattr(rights, word)]
    for name in _OPTIONS:
        value = getattr(rights, name)
        if value != getattr(KeyRights(), name):
            words.append(f"{name}={','.join(sorted(value)) if isinstance(value, frozenset) else value}")
    return " ".join(words)


def parse_keys(text: str) -> dict[bytes, ApiKey]:
    """Parses the text of a key file. Returns the keys by their hashes. Raises KeyLineError with the number of a wrong
    line.
    """
    keys: dict[bytes, ApiKey] = {}
    rights: dict[str, KeyRights] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            key = parse_line(line)
            if key.digest in keys:
                raise KeyLineError(f"this key is already that of {keys[key.digest].name!r}; make a new one")
            if rights.setdefault(key.name, key.rights) != key.rights:
                raise KeyLineError(f"an earlier line gives {key.name!r} other rights; state the same rights in both")
        except KeyLineError as error:
            raise KeyLineError(f"line {number}: {error}") from None
        keys[key.digest] = key
        if len(keys) > MAX_KEYS:
            raise KeyLineError(f"line {number}: there are more than {MAX_KEYS} keys")
    if not keys:
        raise KeyLineError("there is no key; make one with 'python -m llm_serving.access new NAME'")
    return keys


def parse_line(line: str) -> ApiKey:
    """Returns the key that a line states. Raises KeyLineError."""
    name, *words = line.split()
    if not _NAME.fullmatch(name):
        raise KeyLineError(
            "the name must begin with a letter or digit and hold only letters, digits, '.', '_', '-' (64 at most)"
        )
    found = _HASH.fullmatch(words[0]) if words else None
    if found is None:
        raise KeyLineError(
            "after the name comes sha256: with 64 hexadecimal digits. The file never holds a key itself; "
            "'python -m llm_serving.access hash NAME' reads a key and prints its line"
        )
    values: dict[str, object] = {}
    for number, word in enumerate(words[1:], 3):
        option, equals, value = word.partition("=")
        if option in values:
            raise KeyLineError(f"{option} appears twice")
        if word in WORDS:
            values[word] = True
        elif equals and option in _OPTIONS:
            values[option] = _OPTIONS[option](option, value)
        else:
            known = ", ".join(f"{one}=" for one in _OPTIONS)
            raise KeyLineError(f"word {number} is unknown; a key may have {', '.join(WORDS)}, {known}")
    return ApiKey(name, bytes.fromhex(found[1]), KeyRights(**values))  # type: ignore[arg-type]


def _limit(option: str, text: str) -> int:
    return _integer(option, text, 1, MAX_LIMIT)


def _priority(option: str, text: str) -> int:
    return _integer(option, text, -MAX_PRIORITY, MAX_PRIORITY)


def _integer(option: str, text: str, low: int, high: int) -> int:
    if not _INTEGER.fullmatch(text) or not low <= int(text) <= high:
        raise KeyLineError(f"{option} must be an integer from {low} to {high}")
    return int(text)


def _models(option: str, text: str) -> frozenset[str]:
    names = text.split(",")
    if not all(names):
        raise KeyLineError(f"{option} must be the names of models, with commas between them")
    return frozenset(names)


_OPTIONS: Mapping[str, Callable[[str, str], object]] = {
    "requests_in_flight": _limit,
    "requests_per_minute": _limit,
    "tokens_per_minute": _limit,
    "priority": _priority,
    "models": _models,
}
"""Maps the name of an option in a line to a function. The function checks the text after ``=`` and returns its value.
"""

WORDS = ("admin", "sessions")
"""The rights that a single word grants, without a value."""
OPTION_NAMES = tuple(_OPTIONS)
if {*WORDS, *OPTION_NAMES} != {field.name for field in fields(KeyRights)}:
    raise AssertionError("each field of KeyRights is an option of a line")
