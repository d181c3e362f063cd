"""Whose a request is and how urgent: from the fields of its body and its headers to ``SchedulingParams``."""

from __future__ import annotations

from hashlib import blake2b

from pydantic import Field
from starlette.datastructures import Headers

from llm_serving.request import SchedulingParams
from llm_serving.server.protocol import Milliseconds, Priority, SchedulingFields
from llm_serving.server.state import ServerSettings
from llm_serving.server.validation import LaxModel, parse

__all__ = ["SCHEDULING_HEADERS", "scheduling_of", "tenant_of"]


class SchedulingHeaders(LaxModel):
    """The same as ``SchedulingFields``, for clients whose library leaves the body to itself."""

    priority: Priority = Field(default=None, alias="X-Priority")
    ttft_objective_ms: Milliseconds = Field(default=None, alias="X-TTFT-Objective-Ms")
    tbt_objective_ms: Milliseconds = Field(default=None, alias="X-TBT-Objective-Ms")
    deadline_ms: Milliseconds = Field(default=None, alias="X-Deadline-Ms")


SCHEDULING_HEADERS = {name: str(field.alias) for name, field in SchedulingHeaders.model_fields.items()}
"""Field of the body -> the header that says the same."""


def scheduling_of(fields: SchedulingFields, headers: Headers, settings: ServerSettings) -> SchedulingParams:
    """What the request says; a field of its body goes before the header. Raises RequestError naming a wrong header."""
    given = {alias: headers[alias] for alias in SCHEDULING_HEADERS.values() if alias in headers}
    from_headers = parse(SchedulingHeaders, given)
    values = {name: getattr(fields, name) for name in SCHEDULING_HEADERS}
    values = {name: getattr(from_headers, name) if value is None else value for name, value in values.items()}
    key = _api_key(headers)
    return SchedulingParams(
        priority=values["priority"] or 0,
        tenant=_tenant(key),
        cache_salt=_cache_salt(fields.cache_salt, key if settings.cache_salt == "tenant" else b""),
        ttft_objective=_seconds(values["ttft_objective_ms"]),
        tbt_objective=_seconds(values["tbt_objective_ms"]),
        deadline=_seconds(values["deadline_ms"]),
    )


def tenant_of(headers: Headers) -> str:
    """A short hash of the API key: it tells requests of one key from those of others, and not the key. Empty without
    a key."""
    return _tenant(_api_key(headers))


def _api_key(headers: Headers) -> bytes:
    """What follows ``Bearer``; empty without."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip().encode() if scheme.lower() == "bearer" else b""


def _tenant(key: bytes) -> str:
    return blake2b(key, digest_size=8, person=b"llm-tenant").hexdigest() if key else ""


def _cache_salt(salt: str | None, key: bytes) -> bytes:
    """One salt of the client's and the tenant's, where there is either: nobody who lacks one of them can make it."""
    if not salt and not key:
        return b""
    tenant = blake2b(key, digest_size=32, person=b"llm-cache-key").digest() if key else b""
    return blake2b((salt or "").encode(), digest_size=16, key=tenant, person=b"llm-cache-salt").digest()


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000.0
