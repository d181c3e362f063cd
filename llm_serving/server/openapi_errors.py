"""The parts of the OpenAPI document about access: how a client authenticates, and the responses to refused requests."""

from __future__ import annotations

from typing import Any

from llm_serving.access.control import OPEN_FOLDER, OPEN_PATHS

SCHEME = "bearer"
HEADER_SCHEME = "api_key"

ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
ANTHROPIC_ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {"type": {"const": "error"}, "error": ERROR_SCHEMA["properties"]["error"]},
}
KSERVE_ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string"}, "type": {"type": "string"}, "param": {"type": ["string", "null"]},
                   "code": {"type": ["string", "null"]}},
}
_REF = "#/components/responses/"
_NAMES = {"401": "Unauthorized", "403": "Forbidden", "429": "TooManyRequests"}


def components(error_ref: str, *, has_keys: bool) -> dict[str, Any]:
    """Returns the members of ``components`` in the OpenAPI document.

    These are the responses to refused requests and, if the server has keys, the security scheme. ``error_ref`` is the
    reference to ``ERROR_SCHEMA`` in the document.
    """
    retry = {
        "Retry-After": {"description": "Seconds until another attempt may succeed.", "schema": {"type": "integer"}}
    }
    scheme = {"WWW-Authenticate": {"description": "Always `Bearer`.", "schema": {"type": "string"}}}
    found: dict[str, Any] = {
        "responses": {
            "Unauthorized": _response(
                "The request has no API key, or one that is not valid.", error_ref,
                {"wrong key": _error("The API key is not valid.", "invalid_request_error", "invalid_api_key")}, scheme,
            ),
            "Forbidden": _response(
                "The API key does not have the right, or the request comes from a foreign web page or host.", error_ref,
                {"right": _error("The key 'alice' may not administrate the server.", "invalid_request_error",
                                 "not_permitted"),
                 "origin": _error("The host 'evil.example' is not a name of this server.", "invalid_request_error",
                                  "forbidden")},
            ),
            "TooManyRequests": _response(
                "The API key has used its quota, or the queue of the server is full.", error_ref,
                {"quota": _error("The key 'alice' has sent its 60 requests per minute; try again later.",
                                 "rate_limit_error", "rate_limit_exceeded"),
                 "queue": _error("1024 requests are waiting and 0 can start; the queue takes 1024.", "rate_limit_error",
                                 "queue_full")}, retry,
            ),
        }
    }  # fmt: skip
    if has_keys:
        found["securitySchemes"] = {
            SCHEME: {"type": "http", "scheme": "bearer", "description": "An API key: `Authorization: Bearer KEY`."},
            HEADER_SCHEME: {
                "type": "apiKey", "in": "header", "name": "X-Api-Key", "description": "An API key: `X-Api-Key: KEY`.",
            },
        }
    return found


def security(*, has_keys: bool) -> dict[str, Any]:
    """Returns the member ``security`` of the document. Empty if the server has no keys."""
    return {"security": [{SCHEME: []}, {HEADER_SCHEME: []}]} if has_keys else {}


def of_operation(path: str, *, generates: bool, has_keys: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns two parts of an operation in the OpenAPI document: its responses to refused requests, and its
    ``security``.

    ``generates`` is True if the operation passes requests to the engine's queue, and may refuse them because the queue
    is full.
    """
    if path in OPEN_PATHS or path.startswith(OPEN_FOLDER):
        return _responses("403"), {"security": []} if has_keys else {}
    if has_keys:
        return _responses("401", "403", "429"), {}
    return _responses("403", "429") if generates else _responses("403"), {}


def _responses(*statuses: str) -> dict[str, Any]:
    return {status: {"$ref": _REF + _NAMES[status]} for status in statuses}


def _header(description: str, kind: str) -> dict[str, Any]:
    return {"description": description, "schema": {"type": kind}}


def _error(message: str, kind: str, code: str) -> dict[str, Any]:
    return {"value": {"error": {"message": message, "type": kind, "param": None, "code": code}}}


def _response(
    description: str, error_ref: str, examples: dict[str, Any], headers: dict[str, Any] | None = None
) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": error_ref}, "examples": examples}}
    return {"description": description, "content": content, **({} if headers is None else {"headers": headers})}
