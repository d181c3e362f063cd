"""Compares a server with its nodes, which must have the same program and the same model files."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from llm_serving.cluster.messages import LINK_VERSION, Program
from llm_serving.config import Config
from llm_serving.ipc.messages import PROTOCOL_VERSION
from llm_serving.model.source_files import sample_digest
from llm_serving.version import __version__

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("llm_serving", "agent")
_MODEL_FILES = ("*.safetensors", "*.gguf", "*.ckpt", "*.bin", "*.json")
MAX_MODEL_FILES = 4096
"""Maximum number of files of a model folder that server and node compare."""


@cache
def own_program() -> Program:
    """Returns the versions of this program and a digest of its Python files. Only the first call reads the files."""
    digest = hashlib.sha256()
    for file in sorted(file for package in _PACKAGES for file in (_ROOT / package).rglob("*.py")):
        digest.update(f"{file.relative_to(_ROOT)}\0".encode() + file.read_bytes())
    return Program(__version__, LINK_VERSION, PROTOCOL_VERSION, digest.hexdigest()[:16])


def difference(server: Program, node: Program) -> str | None:
    """Returns a text with the differences between the programs of a node and the server, or None if they are equal."""
    names = {"version": "version", "link": "link version", "protocol": "protocol version", "code": "code"}
    found = [
        f"{names[field]} {getattr(node, field)}, the server has {getattr(server, field)}"
        for field in Program.__struct_fields__
        if getattr(server, field) != getattr(node, field)
    ]
    return f"the node has another program: {'; '.join(found)}" if found else None


def model_files(config: Config) -> dict[str, str]:
    """Returns, by file name, the size and a digest of each file of the model and of the draft model.

    The digest covers the first and the last MiB of a file, so that large models start quickly. Times of files are
    ignored, because copies have other times. Raises OSError if a file cannot be read.
    """
    model = config.model_config
    found: dict[str, str] = {}
    if model.load_format != "dummy" and model.model_path is not None:
        found |= _describe_all(Path(model.model_path), "")
    if config.draft is not None and config.draft.path is not None:
        found |= _describe_all(Path(config.draft.path), "draft ")
    return found


def model_difference(server: dict[str, str], node: dict[str, str]) -> str | None:
    """Returns a text with the first difference between the model files of a node and of the server, or None if they are
    equal.
    """
    lacking = sorted(server.keys() - node.keys())
    if lacking:
        return f"the node's model lacks {_listed(lacking)}"
    more = sorted(node.keys() - server.keys())
    if more:
        return f"the node's model has other files: {_listed(more)}"
    other = next((name for name in sorted(server) if server[name] != node[name]), None)
    return None if other is None else f"{other} differs: it is {node[other]} on the node, {server[other]} on the server"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _describe_all(place: Path, prefix: str) -> dict[str, str]:
    if place.is_file():
        return {f"{prefix}model file": _describe(place)}
    files = sorted({file for kind in _MODEL_FILES for file in place.glob(kind)})
    return {prefix + file.name: _describe(file) for file in files[:MAX_MODEL_FILES]}


def _describe(file: Path) -> str:
    size = file.stat().st_size
    return f"{size} bytes, digest {sample_digest(file, size)[:16]}"
