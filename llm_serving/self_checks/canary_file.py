"""Stores the tokens of the canary on disk, so that a server can compare its first run with runs of earlier servers.

Each key has a file. The tokens may depend on the model's files and settings, and on the code and the instruction set of
the kernels. The key has all of these. So a changed model or a new version of the program has a new file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from llm_serving.config import Config
from llm_serving.kvstore.identity import model_facts

MAX_FILES = 256
"""Maximum number of files in the folder. The oldest files are deleted first."""
_MAX_FILE_BYTES = 1 << 16
_UNRELATED = ("weight_cache_gib", "weight_cache_path")
"""Settings of the model that never change its tokens."""


class CanaryFile:
    """The file with the tokens of one key."""

    def __init__(self, config: Config, arithmetic: str, prompt: Sequence[int], num_tokens: int) -> None:
        """``arithmetic`` is the agents' digest of their kernels and operators.

        ``prompt`` and ``num_tokens``: the token ids that the canary sends, and the number of tokens that it generates.
        """
        self._num_tokens = num_tokens
        self._key = _digest({**_facts(config, arithmetic), "prompt": list(prompt), "num_tokens": num_tokens})
        self.path = canary_folder(config) / f"{config.model_name[:64]}-{self._key[:20]}.json"

    def read(self) -> tuple[int, ...] | None:
        """Returns the stored tokens. None if there is no file, or if the file is damaged or of another key.

        Raises OSError if the file cannot be read, or if other users can write to its folder.
        """
        try:
            check_private(self.path.parent)
            if self.path.stat().st_size > _MAX_FILE_BYTES:
                return None
            content = json.loads(self.path.read_bytes())
        except (FileNotFoundError, ValueError, RecursionError):
            return None
        if not isinstance(content, dict) or content.get("key") != self._key:
            return None
        tokens = content.get("tokens")
        if not isinstance(tokens, list) or content.get("digest") != self._digest_of(tokens):
            return None
        return tuple(tokens) if len(tokens) == self._num_tokens and all(type(each) is int for each in tokens) else None

    def write(self, tokens: Sequence[int]) -> None:
        """Writes the file, so that a reader sees either the whole new file or none. Raises OSError."""
        folder = self.path.parent
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        check_private(folder)
        content = {"key": self._key, "tokens": list(tokens), "digest": self._digest_of(list(tokens))}
        descriptor, name = tempfile.mkstemp(prefix="new-", suffix=".tmp", dir=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(json.dumps(content).encode())
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
        _delete_oldest(folder)

    def _digest_of(self, tokens: list[object]) -> str:
        return _digest([self._key, tokens])


def keeps_tokens(config: Config) -> bool:
    """Returns whether the tokens of the canary depend only on the key, so that servers may store them.

    They depend on more than the key on an Ascend and with MindSpore's own operators, whose results may change with the
    driver or the processor. The same holds with foreign code: MindFormers and logits processors.
    """
    model = config.model_config
    has_own_operators = config.device == "CPU" and config.op_table == "fused"
    return has_own_operators and model.model_type != "mindformers" and not model.logits_processors


def canary_folder(config: Config, environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder of the files: in the configured folder of converted weights, or in the user's cache folder."""
    if config.model_config.weight_cache_path:
        return Path(config.model_config.weight_cache_path).expanduser() / "canary"
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "llm-serving" / "canary"


def check_private(folder: Path) -> None:
    """Raises OSError unless the folder belongs to this user and no other user can write to it."""
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder} must belong to this user, and no other user may write to it (chmod 700)")


def _facts(config: Config, arithmetic: str) -> dict[str, object]:
    """Returns everything on which the tokens of the canary may depend, except the prompt."""
    return {
        **model_facts(config),
        "files": config.files_fingerprint,
        "model": {name: value for name, value in asdict(config.model_config).items() if name not in _UNRELATED},
        "parallel": {**asdict(config.parallel_config), "data_parallel": 1, "routing": "", "pools": None},
        "context": config.max_model_len,
        "arithmetic": arithmetic,
        "libraries": [version("numpy"), *platform.libc_ver()],
    }


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _delete_oldest(folder: Path) -> None:
    files = []
    for file in folder.glob("*.json"):
        with contextlib.suppress(FileNotFoundError):
            files.append((file.stat().st_mtime_ns, file))
    for _, file in sorted(files)[:-MAX_FILES]:
        file.unlink(missing_ok=True)
