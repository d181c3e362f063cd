"""The endpoints ``POST /v1/models/{name}/load``, ``unload``, ``sleep``, ``wake`` and ``reload``."""

from __future__ import annotations

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.errors import ModelStateError
from llm_serving.registry.registry import ModelRegistry
from llm_serving.registry.served_model import ServedModel
from llm_serving.registry.states import ModelState
from llm_serving.server.fields.validation import StrictModel
from llm_serving.server.http.body import json_response, read_request
from llm_serving.server.state import Endpoint, ServerState

__all__ = ["ENDPOINTS"]

MAX_PATH_CHARS = 4096
"""Maximum length of the path of a model folder."""


class ReloadRequest(StrictModel):
    """Request body of ``/v1/models/{name}/reload``. It may be left out."""

    model_path: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_PATH_CHARS,
        description="Model folder or GGUF file on the server's machine (default: the same one, whose files may have "
        "changed).",
    )
    drain_first: bool = Field(
        default=False,
        description="If the memory is too small for two versions, end the old version before the new one starts.",
    )


async def _start(state: ServerState, request: Request) -> Response:
    """Handles ``load`` and ``wake``: bring a model into memory."""
    models, model = _named(state, request)
    state.check_running()
    await models.start(model)
    return _answer(model)


async def _unload(state: ServerState, request: Request) -> Response:
    models, model = _named(state, request)
    await models.end(model, ModelState.COLD)
    return _answer(model)


async def _sleep(state: ServerState, request: Request) -> Response:
    models, model = _named(state, request)
    await models.end(model, ModelState.SLEEPING)
    return _answer(model)


async def _reload(state: ServerState, request: Request) -> Response:
    models, model = _named(state, request)
    body = ReloadRequest()
    if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
        body = await read_request(ReloadRequest, request, state.settings.max_body_bytes)
    state.check_running()
    await models.reload(model, body.model_path, drain_first=body.drain_first)
    return _answer(model)


def _named(state: ServerState, request: Request) -> tuple[ModelRegistry[ServerState], ServedModel[ServerState]]:
    """Returns the registry, and the model in the path. Raises ModelNotFoundError, also for the name of an adapter."""
    name = request.path_params["name"]
    if state.models is None:
        raise ModelStateError("The models of this server cannot be loaded, unloaded or reloaded.")
    model = next((each for each in state.models.models if each.name == name), None)
    if model is None:
        raise state.unknown_model(name, None)  # only for keys with the right to administrate the server
    return state.models, model


def _answer(model: ServedModel[ServerState]) -> Response:
    return json_response({"id": model.name, "object": "model", **model.status().as_json()})


ENDPOINTS = (
    Endpoint("POST", "/v1/models/{name}/load", _start, "Bring a model into memory.", admin=True),
    Endpoint("POST", "/v1/models/{name}/wake", _start, "Bring a model into memory, as `load` does.", admin=True),
    Endpoint(
        "POST", "/v1/models/{name}/sleep", _sleep, "End the agents of a model. The next request wakes it.", admin=True
    ),
    Endpoint("POST", "/v1/models/{name}/unload", _unload, "Remove a model from the memory.", admin=True),
    Endpoint(
        "POST", "/v1/models/{name}/reload", _reload, "Replace a model by a new version of its weights.",
        ReloadRequest, '{"drain_first": false}', admin=True,
    ),
)  # fmt: skip
