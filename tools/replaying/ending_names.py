"""Defines the set of tokens that end a request in a replay."""

from __future__ import annotations

from typing import Any

from llm_serving.flight.pseudonyms import ENDING_TOKEN

__all__ = ["EndingNames"]


class EndingNames(frozenset[int]):
    """A set of ending tokens that grows during the replay.

    When the scheduler adds a request, it must know the tokens that end the request. But a recording names an ending
    token only later, in the result that contains it. The replay then adds the token to ``names``. A union with another
    set returns this object itself, so that the scheduler sees later additions.
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
