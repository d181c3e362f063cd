"""Reads the scheduling parameters of a request from its body and its headers: priority, objectives, deadline, tenant.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Annotated, Any

from pydantic import Field, ValidationError
from starlette.datastructures import Headers
from starlette.requests import Request

from llm_serving.access.control import VISIT, Visit
from llm_serving.request import SchedulingParams
from llm_serving.server.fields.validation import LaxModel, RequestModel, request_error
from llm_serving.server.limits import MAX_MILLISECONDS, MAX_NAME_CHARS, MAX_PRIORITY
from llm_serving.server.state import ServerSettings
from llm_serving.sessions.book import ID_PATTERN
from llm_serving.tracing.trace import TRACE

Priority = Annotated[
    int | None,
    Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="Of equally urgent requests, the smaller number goes first."),
]
Milliseconds = Annotated[float | None, Field(gt=0, le=MAX_MILLISECONDS)]
SessionId = Annotated[str | None, Field(pattern=f"^{ID_PATTERN}$")]


class SchedulingFields(RequestModel):
    """Body fields of all endpoints that generate text. They control the scheduling, the prefix cache and the receipt.

    These fields do not change the generated text.
    """

    priority: Priority = None
    ttft_objective_ms: Milliseconds = Field(
        default=None, description="Objective for the time to the first token (default: the server's)."
    )
    tbt_objective_ms: Milliseconds = Field(
        default=None, description="Objective for the time between tokens (default: the server's)."
    )
    deadline_ms: Milliseconds = Field(
        default=None, description="Drop the request (504) if it has not started this long after its arrival."
    )
    cache_salt: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_NAME_CHARS,
        description="Share the prefix cache only with requests that have the same salt.",
    )
    cache_keep_s: float | None = Field(
        default=None, gt=0, description="Keep the KV blocks of this request in host memory for this many seconds."
    )
    pool: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_NAME_CHARS,
        description="Use this pool of replicas, not the one for the length of the prompt.",
    )
    session_id: SessionId = Field(
        default=None, description="Id of the conversation, see `/v1/sessions`. It changes no text."
    )
    return_receipt: bool | None = Field(default=None, description="Add `receipt`: where the request's time went.")


class SchedulingHeaders(LaxModel):
    """Headers with the same meaning as body fields, for clients whose library cannot add fields to the body."""

    priority: Priority = Field(default=None, alias="X-Priority")
    ttft_objective_ms: Milliseconds = Field(default=None, alias="X-TTFT-Objective-Ms")
    tbt_objective_ms: Milliseconds = Field(default=None, alias="X-TBT-Objective-Ms")
    deadline_ms: Milliseconds = Field(default=None, alias="X-Deadline-Ms")
    session_id: SessionId = Field(default=None, alias="X-Session-Id")


SCHEDULING_HEADERS = {name: str(field.alias) for name, field in SchedulingHeaders.model_fields.items()}
"""Maps the name of a body field to the name of the header with the same meaning."""


def scheduling_of(fields: SchedulingFields, request: Request, settings: ServerSettings) -> SchedulingParams:
    """Returns the scheduling parameters of a request. A body field takes precedence over its header.

    Raises RequestError with the name of a wrong header, and NotPermittedError for a priority that the key may not use.
    """
    visit, values = visit_of(request), _urgency(fields, request)
    has_keys = visit is not None and bool(visit.name)
    is_separate = settings.cache_salt == "tenant" or (settings.cache_salt == "auto" and has_keys)
    return SchedulingParams(
        priority=(values["priority"] or 0) if visit is None else visit.priority(values["priority"]),
        tenant=tenant_of(request),
        cache_salt=_cache_salt(fields.cache_salt, _owner(request) if is_separate else b""),
        ttft_objective=_seconds(values["ttft_objective_ms"]),
        tbt_objective=_seconds(values["tbt_objective_ms"]),
        deadline=_seconds(values["deadline_ms"]),
        pool=fields.pool or "",
        trace=request.scope.get(TRACE),
    )


def session_id_of(fields: RequestModel, request: Request) -> str | None:
    """Returns the id of the session of a request, or None. Raises RequestError with the name of a wrong header."""
    found: str | None = _urgency(fields, request)["session_id"]
    return found


def deadline_of(fields: RequestModel | None, request: Request) -> float | None:
    """Returns the deadline of a request in seconds after its arrival, or None without a deadline.

    ``fields`` is the request body. If it is None or does not set a deadline, the header is used. Raises RequestError,
    which names the header, if a header is wrong.
    """
    return _seconds(_urgency(fields, request)["deadline_ms"])


def _urgency(fields: RequestModel | None, request: Request) -> dict[str, Any]:
    """Returns the values of the body fields in ``SCHEDULING_HEADERS``, by name.

    The value of a field that the body does not set comes from its header. The value is None if the body and the headers
    lack the field.
    """
    given = {alias: request.headers[alias] for alias in SCHEDULING_HEADERS.values() if alias in request.headers}
    try:
        from_headers = SchedulingHeaders.model_validate(given)
    except ValidationError as error:
        raise request_error(error) from None
    values = {name: getattr(fields, name, None) for name in SCHEDULING_HEADERS}
    return {name: getattr(from_headers, name) if value is None else value for name, value in values.items()}


def visit_of(request: Request) -> Visit | None:
    """Returns the record that the access control keeps of a request: its API key, its quotas and its audit log entry.

    None if the server has neither API keys nor an audit log.
    """
    visit: Visit | None = request.scope.get(VISIT)
    return visit


def tenant_of(request: Request) -> str:
    """Returns the tenant of a request, see ``tenant_name``."""
    return tenant_name(visit_of(request), request.headers)


def tenant_name(visit: Visit | None, headers: Headers) -> str:
    """Returns the tenant of a request: the name of its API key.

    If the server has no keys, the tenant is a short hash of the bearer token, or an empty text without a token. The
    hash separates the requests of different tokens and does not reveal the token.
    """
    return visit.name if visit is not None and visit.name else _tenant(_api_key(headers))


def _owner(request: Request) -> bytes:
    """Returns the name of the request's API key, or the bearer token if the server has no keys.

    The cache salt is made from the result, so that requests with different keys do not share blocks of the prefix
    cache.
    """
    visit = visit_of(request)
    return visit.name.encode() if visit is not None and visit.name else _api_key(request.headers)


def _api_key(headers: Headers) -> bytes:
    """Returns the API key after ``Bearer`` in the header ``Authorization``, or in ``X-Api-Key``. Empty without these
    headers.
    """
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if not scheme:
        return headers.get("x-api-key", "").strip().encode()
    return key.strip().encode() if scheme.lower() == "bearer" else b""


def _tenant(key: bytes) -> str:
    return blake2b(key, digest_size=8, person=b"llm-tenant").hexdigest() if key else ""


def _cache_salt(salt: str | None, key: bytes) -> bytes:
    """Returns a hash of the client's salt and the tenant's API key. Empty if both are empty.

    Two requests share blocks of the prefix cache only if their hashes are equal.
    """
    if not salt and not key:
        return b""
    tenant = blake2b(key, digest_size=32, person=b"llm-cache-key").digest() if key else b""
    return blake2b((salt or "").encode(), digest_size=16, key=tenant, person=b"llm-cache-salt").digest()


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000.0
