"""The folders that an agent writes to. This module imports neither NumPy nor MindSpore."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from llm_serving.config import Config


def weight_cache_folder(config: Config, environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder of converted weights: the configured one, or the user's cache folder."""
    configured = config.model_config.weight_cache_path
    if configured:
        return Path(configured).expanduser()
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "llm-serving" / "weights"


def log_folder(config: Config) -> Path:
    """Returns the folder of the logs. Profiles and the log files of MindFormers are in subfolders of this folder."""
    return Path(config.log_config.path).parent


def scratch_folder() -> Path:
    """Returns a folder for temporary files outside of the working directory. The caller creates it when needed."""
    return Path(tempfile.gettempdir()) / f"llm-serving-mindspore-{os.getuid()}"
