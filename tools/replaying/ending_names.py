"""The tokens that end a request, in a replay."""

from __future__ import annotations

from typing import Any

from llm_serving.flight.pseudonyms import ENDING_TOKEN

__all__ = ["EndingNames"]


class EndingNames(frozenset[int]):
    """A set that learns when it is time: which token ended a request is known with the answer that had it.

    The scheduler unites a request's own set with that of its sampling parameters when the request comes, which in a
    replay is empty: the union is this set itself.
    """

    names: set[int]

    def __new__(cls) -> EndingNames:
        made = super().__new__(cls)
        made.names = {ENDING_TOKEN}
        return made

    def __contains__(self, token: object) -> bool:
        return token in self.names

    def __or__(self, other: Any) -> EndingNames:  # type: ignore[override]
        return self

    __ror__ = __or__
