"""Finds configuration files and the paths that they name."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path

from llm_serving.errors import CheckpointError, ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]
DATA_ROOTS = (_PACKAGE.parent, _PACKAGE / "_data")
"""Folders in which ``configs/`` and ``models/`` are searched: the repository, and the data of an installed package."""

PACKAGE_PREFIX = "package:"
_TORCH_PATTERNS = ("*.bin", "*.pt", "*.pth")


def find_config_file(name: str) -> Path:
    """Returns the file with this path, or with this name under ``configs/``. Raises ConfigError with similar names."""
    path = _expanded(name)
    if _exists(path) and path.is_file():
        return path.resolve()
    if not name or path.is_absolute() or ".." in path.parts:
        raise ConfigError(f"{name}: no such config file")
    for root in DATA_ROOTS:
        matches = [file for file in _config_files(root) if file.parts[-len(path.parts) :] == path.parts]
        if len(matches) > 1:
            found = ", ".join(str(match) for match in matches)
            raise ConfigError(f"{name}: names more than one config file: {found}; give the path")
        if matches:
            return matches[0]
    raise ConfigError(f"{name}: no such config file here or under configs/{_nearest_config(path.name)}")


def _config_files(root: Path) -> list[Path]:
    return sorted((root / "configs").rglob("*.yaml"))


def _nearest_config(name: str) -> str:
    names = sorted({file.name for root in DATA_ROOTS for file in _config_files(root)})
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if matches:
        return f"; did you mean {matches[0]!r}?"
    return f"; there are {', '.join(names)}" if names else ""


def find_path(name: str, config_folder: Path) -> Path | None:
    """Returns the absolute path of a file or folder that a configuration names, or None if it does not exist.

    A relative path is searched in the working directory, in the configuration's folder and in ``DATA_ROOTS``. The name
    ``package:NAME`` means the folder of an installed Python package, which is not imported.
    """
    if name.startswith(PACKAGE_PREFIX):
        return _package_folder(name[len(PACKAGE_PREFIX) :])
    path = _expanded(name)
    for root in (Path.cwd(), config_folder, *DATA_ROOTS):
        candidate = root / path
        if _exists(candidate):
            return candidate.resolve()
    return None


def torch_pickles(folder: Path) -> list[str]:
    """Returns the names of the files in a model folder that PyTorch has written with pickle, sorted."""
    return sorted(file.name for pattern in _TORCH_PATTERNS for file in folder.glob(pattern))


def refuse_pickles(folder: Path) -> None:
    """Raises CheckpointError with the way to convert them if a model folder has PyTorch pickles.

    The caller knows that the folder has no safetensors.
    """
    if pickles := torch_pickles(folder):
        raise CheckpointError(
            f"{folder / pickles[0]}: PyTorch pickles are not loaded, as they can run code; convert the folder with "
            "transformers: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER, "
            "safe_serialization=True)"
        )


def _package_folder(name: str) -> Path | None:
    """Returns the folder of an installed top-level package, or None if it is not installed."""
    found = importlib.util.find_spec(name) if name.isidentifier() else None
    places = None if found is None else found.submodule_search_locations
    return Path(next(iter(places))).resolve() if places else None


def _expanded(name: str) -> Path:
    """Returns the path, with ``~`` replaced by the user's home folder if there is one."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def _exists(path: Path) -> bool:
    """Returns whether a path exists. A path that is too long or not accessible counts as missing."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
