"""Finds the draft model, the EAGLE-3 head or the MTP layer that ``speculative_config`` names, and reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from llm_serving.config.draft_model import EAGLE, MTP, DraftModel, read_draft_model
from llm_serving.config.head_model import read_eagle_head, read_mtp_layer
from llm_serving.config.lookup import find_path
from llm_serving.config.sections import SpeculativeConfig
from llm_serving.config.source import RawConfig
from llm_serving.model.shape import ModelShape

_KEY = "speculative_config.model"

Fetch = Callable[[str], str]
"""Takes the value of ``speculative_config.model`` and returns a path. If the value names a model on a hub, downloads
the model first. Otherwise, returns the value.
"""


def as_path(name: str) -> str:
    """Returns ``name``: a ``Fetch`` for programs that download nothing."""
    return name


def read_draft_source(
    raw: RawConfig,
    section: SpeculativeConfig,
    folder: Path | None,
    shape: ModelShape,
    find: Callable[[str, str], Path | None],
    fetch: Fetch,
    *,
    has_weights: bool,
) -> DraftModel | None:
    """Returns the draft model or head for a model with the sizes ``shape`` in ``folder``. Returns None if the method
    needs none.

    ``find`` takes the key of a setting and its value, and returns the path. ``has_weights`` is False if all weights are
    random. Raises ConfigError, CheckpointError or HubError.
    """
    method, name = section.method, section.model
    if method not in ("draft", EAGLE):
        if name is not None:
            raise raw.error(_KEY, name, "has an effect only with speculative_config.method: draft or eagle")
        return read_mtp_layer(raw, folder, shape, has_weights=has_weights) if method == MTP else None
    if name is None:
        needed = "folder or the GGUF file of a draft model" if method == "draft" else "folder of a head"
        raise raw.error(_KEY, None, f"speculative_config.method: {method} needs the {needed}, or its name on a hub")
    path = find(_KEY, name if find_path(name, Path(raw.file).parent) is not None else fetch(name))
    assert path is not None, "a stated path is found or refused"
    read = read_draft_model if method == "draft" else read_eagle_head
    return read(raw, path, shape, has_weights=has_weights)
