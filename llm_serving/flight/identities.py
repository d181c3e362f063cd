"""The pseudonyms of all tokens of the requests that are being served."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from llm_serving.flight.pseudonyms import PLAIN_TOKEN, Pseudonyms, TokenChain
from llm_serving.request import Request
from llm_serving.scheduler.output import RequestUpdate

__all__ = ["Identities"]


class Identities:
    """By request number. Needed where the prefix cache compares tokens."""

    def __init__(self, pseudonyms: Pseudonyms | None = None) -> None:
        self.pseudonyms = pseudonyms or Pseudonyms()
        self._chains: dict[int, TokenChain] = {}
        self._names: dict[int, array[int]] = {}

    def add(self, number: int, request: Request) -> bytes:
        """A new request. The names of its prompt's tokens, packed as ``array('i')``."""
        chain = self._chains[number] = self.pseudonyms.chain(request.cache_salt)
        names = self._names[number] = array("i", chain.extend(request.prompt_token_ids))
        return names.tobytes()

    def take(self, updates: list[RequestUpdate], num_sampled: int, number_of: Callable[[Request], int]) -> list[int]:
        """Names of the tokens that a step's answer gave; at the places of its ``sampled_ids``."""
        step_names = [PLAIN_TOKEN] * num_sampled
        for update in updates:
            if update.token_id is not None:
                number = number_of(update.request)
                name = self._chains[number].extend((update.token_id,))[0]
                self._names[number].append(name)
                step_names[update.index] = name
        return step_names

    def names_of(self, number: int) -> list[int] | None:
        """Names of a request's known tokens."""
        names = self._names.get(number)
        return None if names is None else names.tolist()

    def forget(self, number: int) -> None:
        """A request has ended."""
        del self._chains[number]
        del self._names[number]
