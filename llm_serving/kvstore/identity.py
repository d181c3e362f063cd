"""Computes the namespace of blocks on disk: a digest of everything that keys and values depend on, except tokens and
salts.

If two servers have the same namespace, equal tokens and salts give bit-identical blocks. The namespace depends on the
bytes of the weights, but not on the path of the model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from llm_serving.config import Config
from llm_serving.errors import CheckpointError

_WEIGHT_FILES = ("*.safetensors", "*.gguf", "*.ckpt", "*.bin")
_PIECE_BYTES = 8 << 20
"""Bytes that are read at a time for the digest of a file."""
_DIGESTS = "digests.json"
_MAX_DIGESTS_BYTES = 1 << 20
"""Maximum size of the file with known digests."""


def weights_state(config: Config) -> list[str]:
    """Returns path, inode, size and times of each weight file. If a file changes, its element of the list changes."""
    return [_identity(file) for file in _weight_files(config)]


def weights_bytes(config: Config) -> int:
    """Returns the size of all weight files in bytes."""
    return sum(file.stat().st_size for file in _weight_files(config))


def weights_digest(config: Config, cache_folder: Path | None = None, *, expected: list[str] | None = None) -> str:
    """Returns a digest of the contents of the weight files. It takes about a second for each GB.

    ``cache_folder`` keeps the digest of each file, so that an unchanged file is read only once. A file counts as
    unchanged while the system reports the same inode, size and times. One of the times is that of the last status
    change (ctime), which programs cannot set. If ``expected`` is given, ``weights_state`` must return it before and
    after the reading. Otherwise the agents may have read other weights, and CheckpointError is raised.
    """
    model = config.model_config
    if model.load_format == "dummy" or model.model_path is None:
        return f"seed {model.seed}"
    known = {} if cache_folder is None else _read_digests(cache_folder / _DIGESTS)
    check_weights(config, expected)
    files = _weight_files(config)
    digests = {identity: known.get(identity) or _digest_of(file) for file in files for identity in [_identity(file)]}
    check_weights(config, expected)
    if cache_folder is not None and digests.items() - known.items():
        _write_digests(cache_folder / _DIGESTS, digests)
    return hashlib.sha256(json.dumps(sorted(digests.values())).encode()).hexdigest()


def model_facts(config: Config) -> dict[str, object]:
    """Returns the properties of the model and of its arithmetic that determine the bytes of a KV block.

    The weights are not included.
    """
    model, parallel = config.model_config, config.parallel_config
    return {
        "shape": asdict(config.shape),
        "model_type": model.model_type,
        "dtype": model.model_dtype,
        "op_table": config.op_table,
        "device": config.device,
        "weight_format": config.weight_format,
        "weight_group": model.weight_group,
        "kv_format": config.kv_format,
        "block_size": config.pa_config.block_size,
        "tensor_parallel": parallel.tensor_parallel,
        "pipeline_parallel": parallel.pipeline_parallel,
        "sum_parts": parallel.sum_parts,
        "fusion": config.fuses_operators,
    }


@dataclass(frozen=True, slots=True)
class BlockIdentity:
    """Everything except tokens and salts on which the content of a server's blocks depends."""

    facts: dict[str, object]
    """``model_facts`` as JSON values, and the digests of the weights and of the kernels."""
    namespace: bytes

    @classmethod
    def of(cls, config: Config, weights: str, arithmetic: str) -> BlockIdentity:
        """Returns the identity of the blocks of a server. ``arithmetic`` is the digest of the agents' kernels."""
        facts = {**model_facts(config), "weights": weights, "arithmetic": arithmetic}
        return cls(json.loads(json.dumps(facts, default=str)), namespace_of(config, weights, arithmetic))


def namespace_of(config: Config, weights: str, arithmetic: str) -> bytes:
    """Returns the namespace, 32 bytes. ``arithmetic`` is the agents' digest of their kernels and operators."""
    facts = {**model_facts(config), "weights": weights, "arithmetic": arithmetic}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).digest()


def check_weights(config: Config, expected: list[str] | None) -> None:
    """Raises CheckpointError if the weight files have changed since ``weights_state`` returned ``expected``. None: no
    check."""
    if expected is not None and weights_state(config) != expected:
        raise CheckpointError("the weights have changed since the start of the server; restart the server")


def _weight_files(config: Config) -> list[Path]:
    model = config.model_config
    if model.load_format == "dummy" or model.model_path is None:
        return []
    place = Path(model.model_path)
    return [place] if place.is_file() else sorted(file for kind in _WEIGHT_FILES for file in place.glob(kind))


def _identity(file: Path) -> str:
    found = file.stat()
    times = (found.st_mtime_ns, found.st_ctime_ns)
    return json.dumps([str(file.resolve()), found.st_dev, found.st_ino, found.st_size, *times])


def _digest_of(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while piece := opened.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _read_digests(path: Path) -> dict[str, str]:
    """Returns the digests of an earlier run. A file that is missing or damaged counts as empty."""
    with contextlib.suppress(OSError, ValueError):
        if path.stat().st_size <= _MAX_DIGESTS_BYTES:
            values = json.loads(path.read_bytes())
            if isinstance(values, dict) and all(isinstance(value, str) for value in values.values()):
                return values
    return {}


def _write_digests(path: Path, digests: dict[str, str]) -> None:
    new = path.with_suffix(".new")
    with contextlib.suppress(OSError):
        new.write_text(json.dumps(digests))
        os.replace(new, path)
