"""``POST /v1/load_lora_adapter`` and ``POST /v1/unload_lora_adapter``: LoRA adapters while the server runs."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.errors import AdapterError, AgentError
from llm_serving.lora.loading import read_into_memory
from llm_serving.lora.registry import Adapter
from llm_serving.server.errors import UnavailableError
from llm_serving.server.fields.validation import StrictModel
from llm_serving.server.http.body import json_response, read_request
from llm_serving.server.limits import MAX_NAME_CHARS
from llm_serving.server.state import Endpoint, ServerState

__all__ = ["ENDPOINTS", "adapter_json"]

LOAD_TIMEOUT_S = 120.0
"""Maximum seconds until all agents have loaded an adapter."""
MAX_PATH_CHARS = 4096
"""Maximum length of the path of an adapter's folder."""

AdapterName = Annotated[
    str,
    Field(min_length=1, max_length=MAX_NAME_CHARS, description="Name of the adapter, which requests give as `model`."),
]


class LoadAdapterRequest(StrictModel):
    """Request body of ``/v1/load_lora_adapter``."""

    lora_name: AdapterName
    lora_path: str = Field(
        min_length=1, max_length=MAX_PATH_CHARS, description="Folder of a PEFT adapter on the server's machine."
    )


class UnloadAdapterRequest(StrictModel):
    """Request body of ``/v1/unload_lora_adapter``."""

    lora_name: AdapterName


async def _load(state: ServerState, request: Request) -> Response:
    body = await read_request(LoadAdapterRequest, request, state.settings.max_body_bytes)
    engine, name = state.engine, body.lora_name
    if not engine.adapters.max_adapters:
        raise AdapterError("This server has no adapter slots; start it with lora_config.max_adapters above 0.")
    if name == engine.model_name or (state.models is not None and state.models.is_model(name)):
        raise AdapterError(f"{name!r} is the name of a served model; choose another one.", param="lora_name")
    state.check_ready()
    async with state.adapters_lock:
        engine.adapters.check_new(name)
        path, began = Path(body.lora_path).expanduser().absolute(), time.monotonic()
        digest, memory = await asyncio.to_thread(read_into_memory, path, engine.config)
        try:
            await engine.adapters.load(name, str(path), digest, memory, LOAD_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise UnavailableError(
                f"The agents did not reply within {LOAD_TIMEOUT_S:g} seconds; see their logs.", "adapter_not_loaded"
            ) from None
        except AgentError as error:
            raise UnavailableError(f"The agents could not load the adapter: {error}.", "adapter_not_loaded") from None
        adapter = engine.adapters.find(name)
        assert adapter is not None, "the adapter was loaded while the lock was held"
    seconds = round(time.monotonic() - began, 3)
    state.log.event("adapter_loaded", name=name, path=str(path), digest=digest.hex(), seconds=seconds)
    return json_response(adapter_json(state, adapter, shows_folder=True))


async def _unload(state: ServerState, request: Request) -> Response:
    body = await read_request(UnloadAdapterRequest, request, state.settings.max_body_bytes)
    async with state.adapters_lock:
        adapter = state.engine.adapters.remove(body.lora_name)
    state.log.event("adapter_unloaded", name=adapter.name, path=adapter.path, digest=adapter.digest.hex())
    return json_response({"id": adapter.name, "object": "model", "deleted": True})


def adapter_json(state: ServerState, adapter: Adapter, *, shows_folder: bool) -> dict[str, Any]:
    """Returns an adapter as an entry of ``/v1/models``.

    If ``shows_folder`` is True, ``root`` is the adapter's folder. Otherwise the entry has no ``root``, because a path
    reveals names of the server's machine.
    """
    folder = {"root": adapter.path} if shows_folder else {}
    return {
        "id": adapter.name,
        "object": "model",
        "created": int(state.started_at),
        "owned_by": "llm-serving",
        "max_model_len": state.settings.max_context,
        **folder,
        "parent": state.engine.model_name,
    }


ENDPOINTS = (
    Endpoint(
        "POST", "/v1/load_lora_adapter", _load, "Load a LoRA adapter, so that requests may name it.",
        LoadAdapterRequest, '{"lora_name": "sql", "lora_path": "/adapters/sql"}', admin=True,
    ),
    Endpoint(
        "POST", "/v1/unload_lora_adapter", _unload, "Unload a LoRA adapter.",
        UnloadAdapterRequest, '{"lora_name": "sql"}', admin=True,
    ),
)  # fmt: skip
