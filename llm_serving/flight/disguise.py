"""What stands in place of tokens and texts when the scheduler's state is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llm_serving.flight.facts import is_gone, without_texts
from llm_serving.flight.prefix_state import HASHED, block_contents, chain_tokens
from llm_serving.flight.pseudonyms import ENDING_TOKEN, PLAIN_TOKEN, Pseudonyms
from llm_serving.kvcache.prefix_chain import PrefixChain
from llm_serving.kvcache.prefix_index import PrefixIndex
from llm_serving.request import Request, SamplingParams

__all__ = ["StateDisguise"]

_ENDING = frozenset({ENDING_TOKEN})


class StateDisguise:
    """Replaces token ids by pseudonyms, or by zeros where nobody compares tokens.

    ``names_of`` gives the pseudonyms of a request's known tokens, prompt and output, or None. ``pseudonyms`` is what
    they are made with; None where the tokens are pseudonyms themselves, as in a replay.
    """

    def __init__(self, names_of: Callable[[Request], Sequence[int] | None], pseudonyms: Pseudonyms | None) -> None:
        self._names_of = names_of
        self._pseudonyms = pseudonyms
        self._samplings: dict[SamplingParams, SamplingParams] = {}
        self._chain_owners: dict[int, Request] = {}

    def __call__(self, owner: object, name: str, value: Any) -> Any:
        if name in ("prompt_token_ids", "output_token_ids"):
            return self._known_tokens(owner, name, value)
        if name == "token_ids":  # of steps in flight and histories: nobody looks at them again
            return [PLAIN_TOKEN] * len(value)
        if name in ("end_token_ids", "ending_token_ids"):
            return _ENDING
        if name == "sampling" and value is not None:
            return self._sampling(value)
        if name == "receipt":  # tells people where time went; nothing is decided by it
            return None
        if name == "finish_reason":  # the engine may have set another one since
            return None
        if name == "error" and isinstance(value, str):
            return ""
        return self._prefix(owner, name, value)

    def _sampling(self, value: SamplingParams) -> SamplingParams:
        """One object for all that are equal."""
        plain = without_texts(value)
        return self._samplings.setdefault(plain, plain)

    def _known_tokens(self, owner: object, name: str, value: Sequence[int]) -> list[int]:
        if not isinstance(owner, Request) or is_gone(owner) or (names := self._names_of(owner)) is None:
            return [PLAIN_TOKEN] * len(value)
        num_prompt_tokens = len(owner.prompt_token_ids)
        return list(names[:num_prompt_tokens] if name == "prompt_token_ids" else names[num_prompt_tokens:])

    def _prefix(self, owner: object, name: str, value: Any) -> Any:
        """Attributes of the prefix cache."""
        if name == "prefix_chain" and value is not None:
            self._chain_owners[id(value)] = owner.request  # type: ignore[attr-defined]
        if name == "_hashes":
            return [] if isinstance(owner, PrefixChain) else [HASHED if block_hash else b"" for block_hash in value]
        if name == "_blocks" and isinstance(owner, PrefixIndex):
            return {}
        if name == "_announced":
            return {}
        if self._pseudonyms is not None and isinstance(owner, PrefixChain) and name == "_packed":
            request = self._chain_owners.get(id(owner))
            return chain_tokens(owner, None if request is None else self._names_of(request), self._pseudonyms)
        if name == "_contents" and isinstance(owner, PrefixIndex):
            return block_contents(owner, self._pseudonyms)
        return value
