"""``GET /requests/{id}``: where a request's time went, while it is served and for a while after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llm_serving.engine.receipts import RequestReceipt
from llm_serving.errors import RequestError
from llm_serving.server.limits import MAX_SEQUENCES
from llm_serving.server.responses import json_response
from llm_serving.server.scheduling import tenant_of
from llm_serving.server.state import ServerState
from llm_serving.server.validation import short

__all__ = ["UnknownRequestError", "get_request", "receipt_json"]


class UnknownRequestError(RequestError):
    """No such request is known, or it is somebody else's."""

    status = 404
    code = "request_not_found"


def receipt_json(request_id: str, receipts: Sequence[RequestReceipt]) -> dict[str, Any]:
    """One HTTP request's receipt: its sequences, of which there are several with ``n`` or a list of prompts."""
    return {"id": request_id, "sequences": [receipt.to_json() for receipt in receipts]}


async def get_request(state: ServerState, request: Request) -> Response:
    """Why it was slow: the parts of its time."""
    request_id = request.path_params["request_id"]
    tenant = tenant_of(request.headers)
    receipts = [receipt for receipt in _receipts(state, request_id) if receipt.tenant in ("", tenant)]
    if not receipts:
        raise UnknownRequestError(
            f"No request {short(request_id)} of yours is being served, nor did one end lately. The id is that of the "
            "answer or its 'X-Request-Id' header; ask with the API key the request was sent with."
        )
    return json_response(receipt_json(request_id, receipts))


def _receipts(state: ServerState, request_id: str) -> list[RequestReceipt]:
    """Of the one sequence of this name, or of all that a request of this name made."""
    one = state.engine.receipt(request_id)
    if one is not None:
        return [one]
    several = (state.engine.receipt(f"{request_id}-{index}") for index in range(MAX_SEQUENCES))
    return [receipt for receipt in several if receipt is not None]
