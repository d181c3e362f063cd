"""The requests that a recording knows: their numbers, what ends them, and the names of their tokens."""

from __future__ import annotations

from collections.abc import Callable

from llm_serving.flight.facts import ending_tokens, is_gone
from llm_serving.flight.identities import Identities
from llm_serving.request import Request

__all__ = ["KnownRequests"]


class KnownRequests:
    """Gives each new request a number, the next one. ``identities`` name its tokens, where the recording has names.

    ``forgotten`` is told the number of a request that is gone.
    """

    def __init__(self, identities: Identities | None, forgotten: Callable[[int], None]) -> None:
        self.identities = identities
        self.endings: set[int] = set()
        """Tokens that end one of them, or one that there was since ``settle_endings``."""
        self._forgotten = forgotten
        self._requests: dict[str, tuple[int, Request]] = {}
        self._num_requests = 0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def numbers(self) -> dict[str, int]:
        """By request id."""
        return {name: number for name, (number, _) in self._requests.items()}

    def add(self, request: Request, *, refused: bool) -> tuple[int, bytes | None]:
        """A new request's number, and the names of its tokens where there are any. Who was refused is not known."""
        number = self._num_requests
        self._num_requests += 1
        if refused:
            return number, None
        self._requests[request.request_id] = (number, request)
        self.endings |= ending_tokens(request)
        return number, None if self.identities is None else self.identities.add(request)

    def number_of(self, request: Request) -> int:
        return self._requests[request.request_id][0]

    def find(self, request_id: str) -> int | None:
        """The number of the request with this id; None for an unknown one."""
        known = self._requests.get(request_id)
        return None if known is None else known[0]

    def forget(self, request_id: str) -> None:
        number, request = self._requests.pop(request_id)
        self._forgotten(number)
        if self.identities is not None:
            self.identities.forget(request)

    def forget_ended(self) -> None:
        """All that are gone."""
        for request_id, (_, request) in list(self._requests.items()):
            if is_gone(request):
                self.forget(request_id)

    def settle_endings(self) -> None:
        """``endings`` are those of the known requests alone."""
        self.endings = set().union(*(ending_tokens(request) for _, request in self._requests.values()))
