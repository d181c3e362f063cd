"""Find config files and the paths they name; tell whether the machine has an Ascend."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

from llm_serving.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]
DATA_ROOTS = (_PACKAGE.parent, _PACKAGE / "_data")
"""Folders that may hold ``configs/`` and ``models/``: the repository, or the data inside an installed package."""

_CANN_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH")


def find_config_file(name: str) -> Path:
    """The file of that path, else the one of that name under ``configs/``. Raises ConfigError with the nearest."""
    path = _expanded(name)
    if _there(path) and path.is_file():
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
    """A path a config names: as it is, from the working directory, the config's folder or a data root."""
    path = _expanded(name)
    for root in (Path.cwd(), config_folder, *DATA_ROOTS):
        candidate = root / path
        if _there(candidate):
            return candidate.resolve()
    return None


def _expanded(name: str) -> Path:
    """The path with ``~`` replaced, where that names a home folder."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def _there(path: Path) -> bool:
    """False also for what cannot be a path (too long) or may not be looked at."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def has_ascend(environment: Mapping[str, str], devices: Path = Path("/dev")) -> bool:
    """True where an NPU's device file and an installed CANN are both there. mindspore is not asked (it is slow)."""
    has_npu = any(file.name[len("davinci") :].isdigit() for file in devices.glob("davinci*"))
    return has_npu and any(Path(environment[name]).is_dir() for name in _CANN_VARIABLES if environment.get(name))
