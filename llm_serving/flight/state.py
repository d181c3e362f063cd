"""Removes tokens and texts from a snapshot of the scheduler, so that a recording contains neither.

If the prefix cache is on, pseudonyms replace the tokens. A pseudonym depends on all tokens before it. So the pseudonyms
of a cached block can be computed only if its parent block (the block before it in the sequence) is cached, too.
Otherwise zeros replace the block's tokens. These tokens are not needed, because no request can find a block without its
parent. If the prefix cache is off, a recording has only the number of tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from llm_serving.flight.facts import is_gone, make_request, request_facts
from llm_serving.flight.format import FlightRecordingError
from llm_serving.flight.pseudonyms import PLAIN_TOKEN, TokenChain
from llm_serving.flight.requests import TokenNames
from llm_serving.kvcache.block_hash import TOKEN_BYTES, pack_tokens
from llm_serving.kvcache.prefix_chain import PrefixChain
from llm_serving.kvcache.prefix_index import PrefixIndex
from llm_serving.request import Request, RequestStatus
from llm_serving.scheduler.scheduler import Scheduler


class ReplayCodec:
    """Saves and restores requests and blocks in a replay. The tokens of a replay are already pseudonyms, so they are
    saved unchanged. If ``keeps_tokens`` is False, only the numbers of tokens are saved, because the recording has no
    pseudonyms.
    """

    def __init__(self, keeps_tokens: bool) -> None:
        self._keeps_tokens = keeps_tokens

    def save_request(self, request: Request) -> list[Any]:
        """Returns ``[map of request_facts, status, number of output tokens, tokens]``.

        The last entry is None if tokens are not saved.
        """
        tokens = self._tokens_of(request) if self._keeps_tokens and not is_gone(request) else None
        return [request_facts(request), request.status.name, len(request.output_token_ids), tokens]

    def load_request(self, state: list[Any]) -> Request:
        """Restores a request from the list that ``save_request`` returned. Tokens that were not saved become zeros."""
        facts, status, num_output_tokens, tokens = state
        num_prompt_tokens = facts["num_prompt_tokens"]
        if tokens is None:
            tokens = [PLAIN_TOKEN] * (num_prompt_tokens + num_output_tokens)
        request = make_request(facts, tokens[:num_prompt_tokens])
        request.output_token_ids += tokens[num_prompt_tokens:]
        request.status = RequestStatus[status]
        return request

    def block_contents(self, index: PrefixIndex) -> list[bytes]:
        """Returns a list with the packed tokens of each block, indexed by block id. Blocks without cached content have
        no bytes.

        If the parent of a block (the block before it) is no longer cached, zeros replace the tokens of the block.
        """
        contents = [b""] * len(index.entries)
        known: set[int | bytes] = set()
        for entry, block, parent, content in index.in_order():
            reachable = isinstance(parent, bytes) or parent in known
            contents[block] = content if reachable else bytes(len(content))
            if reachable:
                known.add(entry)
        return contents

    def chain_tokens(self, chain: PrefixChain, request: Request) -> bytes:
        """Returns the packed tokens of a prefix chain."""
        return chain.tokens(0, chain.num_tokens)

    def _tokens_of(self, request: Request) -> list[int]:
        return [*request.prompt_token_ids, *request.output_token_ids]


class RecordingCodec(ReplayCodec):
    """Saves requests and blocks for a recording. The pseudonyms in ``names`` replace the tokens.

    ``names`` is None if the recording has no pseudonyms.
    """

    def __init__(self, names: TokenNames | None) -> None:
        super().__init__(names is not None)
        self._names = names

    def block_contents(self, index: PrefixIndex) -> list[bytes]:
        contents = [b""] * len(index.entries)
        chains: dict[int | bytes, TokenChain] = {}
        for entry, block, parent, content in index.in_order():
            before = self._new_chain(parent) if isinstance(parent, bytes) else chains.get(parent)
            if before is None:
                contents[block] = bytes(len(content))
                continue
            chain = chains[entry] = before.copy()
            contents[block] = pack_tokens(chain.extend(_unpack(content)))
        return contents

    def chain_tokens(self, chain: PrefixChain, request: Request) -> bytes:
        names = None if self._names is None else self._names.of(request)
        if names is None:
            return pack_tokens(self._new_chain(chain.salt).extend(_unpack(chain.tokens(0, chain.num_tokens))))
        return pack_tokens(names[: chain.num_tokens])

    def _tokens_of(self, request: Request) -> list[int]:
        names = None if self._names is None else self._names.of(request)
        return [PLAIN_TOKEN] * request.num_tokens if names is None else names

    def _new_chain(self, salt: bytes) -> TokenChain:
        assert self._names is not None, "a prefix cache needs pseudonyms"
        return self._names.pseudonyms.chain(salt)


def restore_state(scheduler: Scheduler, state: dict[str, Any], codec: ReplayCodec) -> int:
    """Gives a new scheduler the state that a recording saved at the beginning of a segment.

    Returns the number of cached blocks that no lookup can find any more, because the block before each of them is not
    cached. Raises FlightRecordingError if another version of the scheduler saved the state.
    """
    try:
        return scheduler.restore(deepcopy(state), codec)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise FlightRecordingError(
            f"the recorded state does not fit this version of the scheduler ({type(error).__name__}: {error})."
            " Replay it with the version that recorded it."
        ) from error


def first_difference(recorded: Any, replayed: Any, path: str = "") -> tuple[str, object, object] | None:
    """Returns (path, recorded value, replayed value) of the first difference between two states, or None if they are
    equal.
    """
    if isinstance(recorded, dict) and isinstance(replayed, dict) and recorded.keys() == replayed.keys():
        pairs = [(f"{path}.{key}".lstrip("."), recorded[key], replayed[key]) for key in recorded]
    elif _is_list(recorded) and _is_list(replayed) and len(recorded) == len(replayed):
        pairs = [(f"{path}[{i}]", *pair) for i, pair in enumerate(zip(recorded, replayed, strict=True))]
    else:
        return None if recorded == replayed else (path, recorded, replayed)
    return next((found for name, one, other in pairs if (found := first_difference(one, other, name))), None)


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _unpack(packed: bytes) -> Sequence[int]:
    return struct.unpack(f"<{len(packed) // TOKEN_BYTES}i", packed)
