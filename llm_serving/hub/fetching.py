"""Finds the local path of the model or the draft model that the user states. A path is used directly. A model's name is
found in a cache, or the model is downloaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llm_serving.config.lookup import PACKAGE_PREFIX, find_path
from llm_serving.hub.names import HUGGING_FACE, parse_model_name

_TRUE = ("1", "on", "yes", "true")


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine. If the user gave a path, ``name`` is None, and the model gets its name from the path."""

    path: str
    name: str | None = None


def local_model(text: str, *, offline: bool = False, option: str = "--model") -> LocalModel:
    """Returns the model that ``option`` states. ``text`` is a path if the path exists, otherwise the name of a model.

    ``offline`` or ``HF_HUB_OFFLINE`` forbids requests to a hub, so a named model must be in a cache. Raises HubError.
    """
    if text.startswith(PACKAGE_PREFIX) or find_path(text, Path.cwd()) is not None:
        return LocalModel(text)
    name = parse_model_name(text, option)
    if name is None:
        return LocalModel(text)
    # Imported here, because only models with a name need the HTTP library.
    if name.hub == HUGGING_FACE:
        from llm_serving.hub.hugging_face import HuggingFace as Hub
    else:
        from llm_serving.hub.model_scope import ModelScope as Hub  # type: ignore[assignment]
    hub = Hub()
    path = hub.find(name) if offline or is_offline() else hub.fetch(name)
    return LocalModel(str(path), None if path.suffix == ".gguf" else name.short)


def cached_draft(name: str) -> str:
    """Returns the path of the model that ``speculative_config.model`` names: a ``Fetch`` for programs that download
    nothing. Raises HubError if the model is not in a cache.
    """
    return local_model(name, offline=True, option="speculative_config.model").path


def hub_caches() -> tuple[Path, Path]:
    """Returns the caches of Hugging Face and of ModelScope."""
    from huggingface_hub import constants  # Imported here, because only models with a name need the HTTP library.

    from llm_serving.hub.model_scope import cache_folder

    return Path(constants.HF_HUB_CACHE), cache_folder()


def is_offline(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns True if the environment forbids requests to hubs."""
    return environment.get("HF_HUB_OFFLINE", "").lower() in _TRUE
