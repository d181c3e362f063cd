"""Keeps the data of the requests in a flight recording: their numbers, the tokens that end them, and the pseudonyms of
their tokens.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable

from llm_serving.flight.facts import ending_tokens, is_gone
from llm_serving.flight.pseudonyms import FIRST_PSEUDONYM, PLAIN_TOKEN, PSEUDONYM_MASK, Pseudonyms
from llm_serving.request import Request
from llm_serving.scheduler.output import RequestUpdate

_PACK = struct.Struct("<i").pack
_UNPACK = struct.Struct("<I").unpack


class TokenNames:
    """Keeps the pseudonyms (names) of all tokens of each request until ``forget`` is called for the request.

    A recording needs pseudonyms if the prefix cache is on, because the prefix cache compares tokens. Computing and
    storing a pseudonym takes about 0.7 us.
    """

    def __init__(self, pseudonyms: Pseudonyms | None = None) -> None:
        self.pseudonyms = pseudonyms or Pseudonyms()
        self._names: dict[Request, array[int]] = {}
        self._chains: dict[Request, tuple[Callable[[bytes], None], Callable[[], bytes], Callable[[int], None]]] = {}
        """Three bound methods for each request: ``update`` and ``digest`` of the hash of its tokens, and ``append`` of
        its array in ``_names``."""

    def add(self, request: Request) -> bytes:
        """Computes the pseudonyms of a new request's tokens. Returns them as packed 32-bit integers."""
        chain = self.pseudonyms.chain(request.cache_salt)
        names = self._names[request] = array("i", chain.extend(request.prompt_token_ids))
        if request.output_token_ids:
            names.extend(chain.extend(request.output_token_ids))
        self._chains[request] = (chain.update, chain.digest, names.append)
        return names.tobytes()

    def take(self, updates: list[RequestUpdate], num_sampled: int) -> list[int]:
        """Computes the pseudonyms of the tokens in a step's result.

        Returns one pseudonym for each of the ``num_sampled`` token ids in the result. ``PLAIN_TOKEN`` replaces each
        token that no request received, so that no update contains it.
        """
        step_names, chains = [PLAIN_TOKEN] * num_sampled, self._chains
        for update in updates:
            token_id = update.token_id
            if token_id is not None:
                feed, digest, append = chains[update.request]
                feed(_PACK(token_id))
                name = max(_UNPACK(digest())[0] & PSEUDONYM_MASK, FIRST_PSEUDONYM)
                append(name)
                step_names[update.index] = name
        return step_names

    def of(self, request: Request) -> list[int] | None:
        """Returns the pseudonyms of a request's prompt and output, or None for an unknown request."""
        names = self._names.get(request)
        return None if names is None else names.tolist()

    def forget(self, request: Request) -> None:
        """Removes the pseudonyms of a request's tokens from memory."""
        del self._names[request]
        del self._chains[request]


class KnownRequests:
    """Gives requests numbers in the order of their arrival, and finds them by id until they are forgotten.

    ``names`` is None if the recording has no pseudonyms. ``on_forget`` is called with the number of each forgotten
    request.
    """

    def __init__(self, names: TokenNames | None, on_forget: Callable[[int], None]) -> None:
        self.names = names
        self.endings: set[int] = set()
        """Token ids that end a known request. Ids of forgotten requests stay until ``settle_endings`` removes them."""
        self._on_forget = on_forget
        self._requests: dict[str, tuple[int, Request]] = {}
        self._num_requests = 0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def numbers(self) -> dict[str, int]:
        """The number that stands for each request in the recording, by request id.

        Only requests that the recorder still follows are included.
        """
        return {request_id: number for request_id, (number, _) in self._requests.items()}

    def add(self, request: Request, *, refused: bool) -> tuple[int, bytes | None]:
        """Gives a new request the next number. Returns the number and the packed pseudonyms of the request's tokens. A
        refused request is not kept and has no pseudonyms.
        """
        number = self._num_requests
        self._num_requests += 1
        if refused:
            return number, None
        self._requests[request.request_id] = (number, request)
        self.endings |= ending_tokens(request)
        return number, None if self.names is None else self.names.add(request)

    def number_of(self, request: Request) -> int:
        """Returns the number under which a request is recorded. The request must not have been forgotten."""
        return self._requests[request.request_id][0]

    def find(self, request_id: str) -> int | None:
        """Returns the number under which the request with this id is recorded, or None for an unknown id."""
        known = self._requests.get(request_id)
        return None if known is None else known[0]

    def forget(self, request_id: str) -> None:
        """Removes the number and the pseudonyms of a request from memory."""
        number, request = self._requests.pop(request_id)
        self._on_forget(number)
        if self.names is not None:
            self.names.forget(request)

    def forget_ended(self) -> None:
        """Forgets all requests that have ended and that no step in flight uses."""
        for request_id, (_, request) in list(self._requests.items()):
            if is_gone(request):
                self.forget(request_id)

    def settle_endings(self) -> None:
        """Recomputes ``endings``, the token ids that may end a known request. Ids of forgotten requests are removed."""
        self.endings = set().union(*(ending_tokens(request) for _, request in self._requests.values()))
