"""The entries of ``/v1/models``: each model with its state, and its LoRA adapters."""

from __future__ import annotations

from typing import Any

from llm_serving.registry.served_model import ServedModel
from llm_serving.server.operations.adapters import adapter_json
from llm_serving.server.state import ServerState


def model_entries(state: ServerState, *, shows_folders: bool) -> list[dict[str, Any]]:
    """Returns the JSON objects of all models and of the adapters that are in memory. The main model is the first.

    ``shows_folders`` is True if the client may see the folders of adapters.
    """
    if state.models is None:
        main = _entry(state, state.engine.model_name, state.settings.max_context)
        return [main, *_adapters(state, shows_folders=shows_folders)]
    entries = []
    for model in state.models.models:
        entries.append(_entry(state, model.name, model.config.max_model_len) | _state_members(state, model))
        if model.version is not None:
            entries += _adapters(model.version.view, shows_folders=shows_folders)
    return entries


def _entry(state: ServerState, name: str, max_model_len: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(state.started_at),
        "owned_by": "llm-serving",
        "max_model_len": max_model_len,
    }


def _state_members(state: ServerState, model: ServedModel[ServerState]) -> dict[str, Any]:
    """Returns the members about a model's state. Empty for the only model of a server, because it is always ready."""
    has_states = state.models is not None and (state.models.has_several or state.engine.standby is not None)
    return model.status().as_json() if has_states else {}


def _adapters(view: ServerState, *, shows_folders: bool) -> list[dict[str, Any]]:
    adapters = view.engine.adapters.adapters
    return [adapter_json(view, adapter, shows_folder=shows_folders) for adapter in adapters]
