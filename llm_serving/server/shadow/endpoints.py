"""The endpoints ``/v1/shadow``: show the figures and the recommendation of shadow serving, and reset them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from llm_serving.errors import RequestError
from llm_serving.server.http.body import json_response
from llm_serving.server.state import Endpoint, ServerState
from llm_serving.shadow.runner import ShadowRunner


class ShadowOffError(RequestError):
    """The server has no shadow serving."""

    status = 404
    code = "shadow_off"


async def _show(state: ServerState, request: Request) -> Response:
    return json_response(_runner_of(state).as_json())


async def _reset(state: ServerState, request: Request) -> Response:
    runner = _runner_of(state)
    runner.reset()
    return json_response(runner.as_json())


def _runner_of(state: ServerState) -> ShadowRunner:
    if state.shadow is None:
        raise ShadowOffError("This server compares no models; name one of models_config.models in shadow_config.model.")
    return state.shadow


ENDPOINTS = (
    Endpoint("GET", "/v1/shadow", _show, "The comparison of the main model with its candidate.", admin=True),
    Endpoint("POST", "/v1/shadow/reset", _reset, "Forget all comparisons, and begin again.", admin=True),
)
