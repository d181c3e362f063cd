"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llm_serving.engine.detokenizer import IncrementalDetokenizer
from llm_serving.engine.tokenizer import Tokenizer
from llm_serving.request import TokenLogits
from llm_serving.server.choices import Choice

__all__ = ["CompletionLogprobs", "chat_logprobs", "token_string"]

LOWEST = -9999.0
"""JSON has no infinity; this stands for the logarithm of zero, as in OpenAI's API."""


def token_string(tokenizer: Tokenizer, token_id: int) -> str:
    """The token's text; ``bytes:\\xe4\\xbd`` for part of a character."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST


def _top(entry: TokenLogits, count: int) -> list[tuple[int, float]]:
    """The ``count`` best tokens with their log-probabilities."""
    return [(token_id, _finite(logit - entry.logsumexp)) for token_id, logit in entry.top[:count]]


def chat_logprobs(tokenizer: Tokenizer, logits: Sequence[TokenLogits], count: int) -> dict[str, Any]:
    """``logprobs`` of a chat choice, or of one piece of its stream."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {"token": token_string(tokenizer, token_id), "logprob": logprob, "bytes": list(data)}

    content = []
    for token in logits:
        top = [entry(token_id, logprob) for token_id, logprob in _top(token, count)]
        content.append({**entry(token.token_id, _finite(token.logprob)), "top_logprobs": top})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """``logprobs`` of one choice of ``/v1/completions``, piece by piece.

    ``text_offset`` is where the token's text starts in the choice's text. Besides the best tokens,
    ``top_logprobs`` always has the sampled one.
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

    def take(self, logits: Sequence[TokenLogits]) -> dict[str, Any]:
        """The next tokens."""
        offsets = []
        for token in logits:
            offsets.append(self._offset)
            self._offset += len(self._text.append((token.token_id,))[0])
        return {
            "text_offset": offsets,
            "token_logprobs": [_finite(token.logprob) for token in logits],
            "tokens": [token_string(self._tokenizer, token.token_id) for token in logits],
            "top_logprobs": [self._top(token) for token in logits],
        }

    def _top(self, token: TokenLogits) -> dict[str, float]:
        best: dict[str, float] = {}
        for token_id, logprob in [*_top(token, self._count), (token.token_id, _finite(token.logprob))]:
            best.setdefault(token_string(self._tokenizer, token_id), logprob)
        return best
