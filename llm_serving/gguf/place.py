"""Finds the GGUF file of a model."""

from __future__ import annotations

from pathlib import Path

from llm_serving.errors import CheckpointError

SUFFIX = ".gguf"


def find_gguf(path: Path) -> Path | None:
    """Returns the GGUF file of a model: ``path`` itself, or the file in the folder ``path``.

    Returns None for a folder with safetensors, and for a folder without GGUF files. Raises CheckpointError if the
    folder has several GGUF files.
    """
    if path.suffix == SUFFIX and not path.is_dir():
        return path
    files = sorted(path.glob(f"*{SUFFIX}"))
    if not files or any(path.glob("*.safetensors")):
        return None
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:4])
        raise CheckpointError(f"{path}: {names}: there must be exactly one GGUF file; name the file instead")
    return files[0]


def own_config(path: Path) -> Path | None:
    """Returns the GGUF file from which the config of the model is read, because the folder has no ``config.json``.

    Returns None if the model has a ``config.json``, or no GGUF file.
    """
    found = find_gguf(path)
    return None if found is None or (path.is_dir() and (path / "config.json").exists()) else found
