"""The tokens that end a request in a replay."""

from __future__ import annotations

from typing import Any

from llm_serving.flight.pseudonyms import ENDING_TOKEN

__all__ = ["EndingNames"]


class EndingNames(frozenset[int]):
    """A set of ending tokens that grows during the replay.

    The recording names the token that ended a request only with the result that contains it. When a request arrives,
    the scheduler unites this set with the ending tokens of the sampling parameters. A replay has none of those, so
    the union is this set itself.
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
