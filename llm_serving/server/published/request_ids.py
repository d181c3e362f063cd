"""The ids that clients gave to the requests of ``/chat`` that are being served."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from llm_serving.errors import RequestError
from llm_serving.server.fields.validation import short


class DuplicateRequestError(RequestError):
    """The same client has a request with this id in flight."""

    status = 409
    code = "duplicate_request_id"


class RequestIds:
    """The ids in use. Each tenant has its own, so the ids of other clients do not matter."""

    def __init__(self) -> None:
        self._used: set[tuple[str, str]] = set()

    def __len__(self) -> int:
        return len(self._used)

    def claim(self, tenant: str, request_id: str) -> Callable[[], None]:
        """Mark an id as used, and return the function that gives it free. Raises DuplicateRequestError."""
        used = (tenant, request_id)
        if used in self._used:
            raise DuplicateRequestError(
                f"A request with the request_id {short(request_id)} is being served. Wait until it has ended, or use "
                "another request_id.",
                param="request_id",
            )
        self._used.add(used)
        return partial(self._used.discard, used)
