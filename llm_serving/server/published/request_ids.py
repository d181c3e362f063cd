"""Keeps the ids that clients chose for their active requests to ``/chat``, so that no id is used twice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from llm_serving.errors import RequestError
from llm_serving.server.fields.validation import short


class DuplicateRequestError(RequestError):
    """The client uses this id for another request, which has not ended."""

    status = 409
    code = "duplicate_request_id"


class RequestIds:
    """The request ids that are in use. The ids of different tenants are separate, so they may be equal."""

    def __init__(self) -> None:
        self._used: set[tuple[str, str]] = set()

    def __len__(self) -> int:
        return len(self._used)

    def claim(self, tenant: str, request_id: str) -> Callable[[], None]:
        """Marks an id as used, and returns a function that releases it. Raises DuplicateRequestError."""
        used = (tenant, request_id)
        if used in self._used:
            raise DuplicateRequestError(
                f"A request with the request_id {short(request_id)} is being served. Wait until it has ended, or use "
                "another request_id.",
                param="request_id",
            )
        self._used.add(used)
        return partial(self._used.discard, used)
