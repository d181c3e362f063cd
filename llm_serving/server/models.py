"""``GET /v1/models`` and the check of a request's model name."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llm_serving.errors import ModelNotFoundError
from llm_serving.server.responses import json_response
from llm_serving.server.state import ServerState
from llm_serving.server.validation import short

__all__ = ["check_model", "get_model", "list_models"]


def check_model(state: ServerState, name: str | None) -> None:
    """Raises ModelNotFoundError unless ``name`` is the served model's, or left out."""
    if name is not None and name != state.engine.model_name:
        raise ModelNotFoundError(
            f"The model {short(name)} does not exist; this server serves {short(state.engine.model_name)}.",
            param="model",
        )


async def list_models(state: ServerState, request: Request) -> Response:
    """The one model."""
    return json_response({"object": "list", "data": [_model(state)]})


async def get_model(state: ServerState, request: Request) -> Response:
    """The model by its name."""
    check_model(state, request.path_params["name"])
    return json_response(_model(state))


def _model(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.engine.model_name,
        "object": "model",
        "created": int(state.started_at),
        "owned_by": "llm-serving",
        "max_model_len": state.settings.max_context,
    }
