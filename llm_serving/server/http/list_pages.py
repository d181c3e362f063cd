"""Cuts lists into pages, as OpenAI's API does with the query parameters ``limit``, ``after`` and ``order``."""

from __future__ import annotations

from typing import Any, TypeVar

from starlette.requests import Request

from llm_serving.errors import RequestError
from llm_serving.server.fields.validation import short

T = TypeVar("T")


def in_order(request: Request, items: list[T]) -> list[T]:
    """Returns ``items`` in the order of the request's query parameter ``order``. The default is newest first.

    The caller passes the ``items`` with the oldest first. Raises RequestError for an unknown order.
    """
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError(
            f"'order' is {short(order)}; it must be 'asc' or 'desc'.", param="order", code="invalid_value"
        )
    return items if order == "asc" else items[::-1]


def page_of(request: Request, items: list[dict[str, Any]], default: int, most: int) -> dict[str, Any]:
    """Returns one page of a list: at most ``limit`` items after the item with the id ``after``. Raises RequestError."""
    text, after = request.query_params.get("limit", str(default)), request.query_params.get("after")
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= most):
        raise RequestError(
            f"'limit' is {short(text)}; it must be from 1 to {most}.", param="limit", code="invalid_value"
        )
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise RequestError(f"'after' is {short(after)}, which is not in the list.", param="after", code="invalid_value")
    begin = 0 if after is None else ids.index(after) + 1
    page = items[begin : begin + int(text)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": begin + len(page) < len(items),
    }
