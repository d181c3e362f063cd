"""Shows the receipts of requests: the time in each phase. A receipt stays available for some time after the request.

``GET /requests/{id}`` returns the receipt of one request to the client that sent the request. ``GET /requests`` returns
the receipts of all requests, for operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llm_serving.engine.receipts import RequestReceipt
from llm_serving.errors import RequestError
from llm_serving.server.fields.validation import short
from llm_serving.server.generation.scheduling import tenant_of
from llm_serving.server.http.body import json_response
from llm_serving.server.limits import MAX_SEQUENCES
from llm_serving.server.state import Endpoint, ServerState

DEFAULT_LISTED = 100
"""Default number of receipts that one request lists."""
MAX_LISTED = 500
"""Maximum number of receipts in a response of ``GET /requests``."""


class UnknownRequestError(RequestError):
    """The request is unknown, or it belongs to another tenant."""

    status = 404
    code = "request_not_found"


def receipt_json(request_id: str, receipts: Sequence[RequestReceipt]) -> dict[str, Any]:
    """Returns the receipt of an HTTP request. With several prompts or ``n > 1``, it has several sequences."""
    return {"id": request_id, "sequences": [receipt.to_json() for receipt in receipts]}


async def _get_request(state: ServerState, request: Request) -> Response:
    request_id = request.path_params["request_id"]
    tenant = tenant_of(request)
    receipts = [receipt for receipt in _receipts(state, request_id) if receipt.tenant in ("", tenant)]
    if not receipts:
        raise UnknownRequestError(
            f"This API key has no request {short(request_id)} that is running or ended recently. Use the id in the "
            "response or in its 'X-Request-Id' header, and the API key with which the request was sent."
        )
    return json_response(receipt_json(request_id, receipts))


async def _get_requests(state: ServerState, request: Request) -> Response:
    """Responds with the receipts of live and recent requests of all tenants, without any text."""
    stated = request.query_params.get("limit", str(DEFAULT_LISTED))
    limit = int(stated) if stated.isascii() and stated.isdecimal() and len(stated) < 6 else 0
    if not 1 <= limit <= MAX_LISTED:
        raise RequestError(
            f"'limit' is {short(stated)}; it must be a whole number from 1 to {MAX_LISTED}.",
            param="limit",
            code="invalid_value",
        )
    receipts = state.engine.receipts(limit)
    return json_response({"requests": [{"tenant": one.tenant, **one.to_json()} for one in receipts]})


def _receipts(state: ServerState, request_id: str) -> list[RequestReceipt]:
    """Returns the receipts of the HTTP request with this id, one for each sequence. The id may also name a sequence."""
    one = state.engine.receipt(request_id)
    if one is not None:
        return [one]
    several = (state.engine.receipt(f"{request_id}-{index}") for index in range(MAX_SEQUENCES))
    return [receipt for receipt in several if receipt is not None]


ENDPOINTS = (
    Endpoint(
        "GET", "/requests", _get_requests, "The receipts of all live and recent requests.", admin=True,
    ),
    Endpoint(
        "GET", "/requests/{request_id}", _get_request,
        "Where a request's time went: its receipt, while it is served and for some time after its end.",
    ),
)  # fmt: skip
