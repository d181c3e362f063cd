"""Formats log-probabilities for OpenAI's endpoints, and raw logits for ``/generate`` and ``/chat``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from llm_serving.engine.detokenizer import IncrementalDetokenizer
from llm_serving.engine.logit_columns import LogitColumns
from llm_serving.engine.tokenizer import Tokenizer
from llm_serving.request import TokenLogits
from llm_serving.server.generation.sampling import Choice
from llm_serving.server.http.json_pieces import EncodedList

LOWEST = -9999.0
"""Log-probability of an impossible token, as in OpenAI's API, because JSON has no infinity."""


def token_string(tokenizer: Tokenizer, token_id: int) -> str:
    """Returns the token's text, or ``bytes:\\xe4\\xbd`` for part of a character."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_entries(tokenizer: Tokenizer, logits: Iterable[TokenLogits], count: int) -> Iterator[dict[str, Any]]:
    """Yields the members of ``content`` in a chat's ``logprobs``. Each token has its ``count`` best alternatives."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {"token": token_string(tokenizer, token_id), "logprob": logprob, "bytes": list(data)}

    for token in logits:
        top = [entry(token_id, logprob) for token_id, logprob in _top(token, count)]
        yield {**entry(token.token_id, _finite(token.logprob)), "top_logprobs": top}


class CompletionLogprobs:
    """Formats the member ``logprobs`` of one choice of ``/v1/completions``, piece by piece.

    The list ``text_offset`` has the position of each token's text in the choice's text. ``top_logprobs`` has, for each
    token, the most likely tokens at its position and the sampled token.
    """

    def __init__(self, tokenizer: Tokenizer, choice: Choice, count: int) -> None:
        self._tokenizer = tokenizer
        self._count = count
        self._text = IncrementalDetokenizer(
            tokenizer,
            skip_special_tokens=choice.sampling.skip_special_tokens,
            prompt_token_ids=choice.prompt.token_ids,
        )
        self._offset = 0
        self._first_token = choice.prompt.token_ids[0]
        self._echoed_text = IncrementalDetokenizer(tokenizer, skip_special_tokens=choice.sampling.skip_special_tokens)

    def encoded(self, logits: LogitColumns) -> dict[str, EncodedList]:
        """Returns ``logprobs`` for all tokens of the choice. The lists are already encoded as JSON."""
        return {
            "text_offset": EncodedList(map(self._next_offset, logits.token_ids)),
            "token_logprobs": EncodedList(map(_finite, logits.logprobs)),
            "tokens": EncodedList(token_string(self._tokenizer, token_id) for token_id in logits.token_ids),
            "top_logprobs": EncodedList(map(self._top, logits)),
        }

    def echoed(self, prompt: LogitColumns, output: LogitColumns) -> dict[str, EncodedList]:
        """Returns ``logprobs`` for the prompt and all tokens of the choice.

        ``prompt`` begins with the second token of the prompt, because the first token has no log-probability.
        """
        logits = LogitColumns(prompt)
        logits.extend(output)
        first = self._first_token
        self._text = self._echoed_text
        self._offset = len(self._text.append((first,))[0])
        return {
            "text_offset": EncodedList(chain([0], map(self._next_offset, logits.token_ids))),
            "token_logprobs": EncodedList(chain([None], map(_finite, logits.logprobs))),
            "tokens": EncodedList(token_string(self._tokenizer, one) for one in chain([first], logits.token_ids)),
            "top_logprobs": EncodedList(chain([None], map(self._top, logits))),
        }

    def take(self, logits: Sequence[TokenLogits]) -> dict[str, Any]:
        """Returns ``logprobs`` for the tokens of the choice's next piece."""
        return {
            "text_offset": [self._next_offset(token.token_id) for token in logits],
            "token_logprobs": [_finite(token.logprob) for token in logits],
            "tokens": [token_string(self._tokenizer, token.token_id) for token in logits],
            "top_logprobs": [self._top(token) for token in logits],
        }

    def _next_offset(self, token_id: int) -> int:
        """Returns the position of the next token's text in the choice's text."""
        offset = self._offset
        self._offset += len(self._text.append((token_id,))[0])
        return offset

    def _top(self, token: TokenLogits) -> dict[str, float]:
        best: dict[str, float] = {}
        for token_id, logprob in [*_top(token, self._count), (token.token_id, _finite(token.logprob))]:
            best.setdefault(token_string(self._tokenizer, token_id), logprob)
        return best


def step_logits(entries: Iterable[TokenLogits]) -> Iterator[dict[str, Any]]:
    """Yields the members of ``logits``: for each token, its logit and the logits of the best tokens, best first."""
    for entry in entries:
        yield {
            "token_id": entry.token_id,
            "logit": entry.logprob + entry.logsumexp,
            "top_token_ids": [token_id for token_id, _ in entry.top],
            "top_logits": [logit for _, logit in entry.top],
        }


def prompt_entries(tokenizer: Tokenizer, logits: Iterable[TokenLogits], count: int) -> Iterator[dict[str, Any] | None]:
    """Yields the members of vLLM's ``prompt_logprobs``: null for the first token, then an object for each token.

    The keys of an object are token ids: those of the ``count`` most likely tokens, and that of the prompt's token. If
    the prompt's token is not among the most likely ones, its rank is null.
    """
    yield None
    for token in logits:
        best = _top(token, count)
        entries: dict[int, tuple[float, int | None]] = {
            one: (logprob, rank) for rank, (one, logprob) in enumerate(best, 1)
        }
        entries.setdefault(token.token_id, (_finite(token.logprob), None))
        yield {
            str(one): {"logprob": logprob, "rank": rank, "decoded_token": token_string(tokenizer, one)}
            for one, (logprob, rank) in entries.items()
        }


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST


def _top(entry: TokenLogits, count: int) -> list[tuple[int, float]]:
    """Returns the ids and log-probabilities of the ``count`` best tokens."""
    return [(token_id, _finite(logit - entry.logsumexp)) for token_id, logit in entry.top[:count]]
