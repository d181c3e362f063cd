"""The endpoints ``/v1/cluster``: list, add, drain and remove the nodes of this server while it runs."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.cluster.nodes import NodeError, NodePool
from llm_serving.errors import ConfigError, RequestError
from llm_serving.server.fields.validation import StrictModel
from llm_serving.server.http.body import json_response, read_request
from llm_serving.server.state import Endpoint, ServerState

__all__ = ["ENDPOINTS"]

MAX_NAME_CHARS = 300
"""Maximum length of the address and of the name of a node, in characters."""
MAX_DRAIN_S = 86400.0
"""Maximum seconds that a client may grant a node to finish its requests: one day."""


class AddNodeRequest(StrictModel):
    """Request body of ``/v1/cluster/add``."""

    address: str = Field(min_length=3, max_length=MAX_NAME_CHARS, description="Address of the node: `HOST:PORT`.")


NodeName = Annotated[
    str, Field(min_length=1, max_length=MAX_NAME_CHARS, description="Name of the node, as `/v1/cluster` shows it.")
]


class DrainNodeRequest(StrictModel):
    """Request body of ``/v1/cluster/drain``."""

    node: NodeName
    timeout_s: float | None = Field(
        default=None,
        ge=0.0,
        le=MAX_DRAIN_S,
        description="After this number of seconds, requests that still run move to other nodes (default: "
        "`serving_config.drain_timeout_s`).",
    )


class RemoveNodeRequest(StrictModel):
    """Request body of ``/v1/cluster/remove``."""

    node: NodeName


async def _show(state: ServerState, request: Request) -> Response:
    nodes, parallel = _nodes(state), state.engine.config.parallel_config
    replicas = [
        {"replica": each.replica, "state": each.state, "running": each.figures.running, "steps": each.steps}
        for each in state.engine.status().replicas
    ]
    return json_response({"executor": parallel.executor, "nodes": nodes.status(), "replicas": replicas})


async def _add(state: ServerState, request: Request) -> Response:
    body = await read_request(AddNodeRequest, request, state.settings.max_body_bytes)
    state.check_running()
    try:
        node = _nodes(state).add(body.address)
    except ConfigError as error:
        raise RequestError(f"{error}.", param="address") from error
    return json_response(node.describe())


async def _drain(state: ServerState, request: Request) -> Response:
    body = await read_request(DrainNodeRequest, request, state.settings.max_body_bytes)
    nodes, timeout_s = _nodes(state), body.timeout_s
    if timeout_s is None:
        timeout_s = state.engine.config.serving_config.drain_timeout_s
    node = nodes.drain(body.node, timeout_s)
    return json_response(node.describe())


async def _remove(state: ServerState, request: Request) -> Response:
    body = await read_request(RemoveNodeRequest, request, state.settings.max_body_bytes)
    node = _nodes(state).remove(body.node)
    return json_response(node.describe())


def _nodes(state: ServerState) -> NodePool:
    nodes = state.engine.nodes
    if nodes is None:
        raise NodeError("The agents of this server are on its own machine (parallel_config.executor: local).")
    return nodes


ENDPOINTS = (
    Endpoint("GET", "/v1/cluster", _show, "The nodes of this server and their states.", admin=True),
    Endpoint(
        "POST", "/v1/cluster/add", _add, "Add a node, or use a drained one again.", AddNodeRequest,
        '{"address": "10.0.0.5:7450"}', admin=True,
    ),
    Endpoint(
        "POST", "/v1/cluster/drain", _drain, "Give a node no more requests, and end its agents when it has none.",
        DrainNodeRequest, '{"node": "10.0.0.5:7450"}', admin=True,
    ),
    Endpoint(
        "POST", "/v1/cluster/remove", _remove, "Forget a node. Its requests move to other nodes.", RemoveNodeRequest,
        '{"node": "10.0.0.5:7450"}', admin=True,
    ),
)  # fmt: skip
