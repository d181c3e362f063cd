"""What stands in place of tokens and texts when the scheduler's state is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llm_serving.flight.facts import without_texts
from llm_serving.flight.pseudonyms import ENDING_TOKEN, PLAIN_TOKEN
from llm_serving.request import Request

__all__ = ["StateDisguise"]

_ENDING = frozenset({ENDING_TOKEN})


class StateDisguise:
    """Replaces token ids by pseudonyms, or by zeros where nobody compares tokens.

    ``names_of`` gives the pseudonyms of a request's known tokens, prompt and output, or None.
    """

    def __init__(self, names_of: Callable[[Request], Sequence[int] | None]) -> None:
        self._names_of = names_of

    def __call__(self, owner: object, name: str, value: Any) -> Any:
        if name in ("prompt_token_ids", "output_token_ids"):
            return self._known_tokens(owner, name, value)
        if name == "token_ids":  # of steps in flight and histories: nobody looks at them again
            return [PLAIN_TOKEN] * len(value)
        if name in ("end_token_ids", "ending_token_ids"):
            return _ENDING
        if name == "sampling" and value is not None:
            return without_texts(value)
        if name == "error" and isinstance(value, str):
            return ""
        return value

    def _known_tokens(self, owner: object, name: str, value: Sequence[int]) -> list[int]:
        names = self._names_of(owner) if isinstance(owner, Request) else None
        if names is None:
            return [PLAIN_TOKEN] * len(value)
        num_prompt_tokens = len(owner.prompt_token_ids) if isinstance(owner, Request) else 0
        return list(names[:num_prompt_tokens] if name == "prompt_token_ids" else names[num_prompt_tokens:])
