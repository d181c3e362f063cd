"""Finds the tokens of an answer that belong to its message, with their log-probabilities."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from llm_serving.engine.detokenizer import IncrementalDetokenizer
from llm_serving.engine.logit_columns import LogitColumns
from llm_serving.engine.tokenizer import Tokenizer
from llm_serving.request import TokenLogits
from llm_serving.server.generation.logprobs import chat_entries
from llm_serving.server.generation.sampling import Choice


class MessageLogprobs:
    """Keeps the log-probabilities of one answer's tokens, with the position of each token's text in the answer.

    An answer consists of reasoning, tool calls, markers and messages. Only messages have log-probabilities in the
    response. So the caller takes the tokens in the text of a message, and the tokens before it are dropped.
    """

    def __init__(self, tokenizer: Tokenizer, choice: Choice, count: int) -> None:
        """``count`` is the number of most likely tokens to report at each position."""
        self._tokenizer, self._count = tokenizer, count
        # This detokenizer gets no stop strings, because it would hold back text that may begin a stop string. So the
        # position of a token's text is known immediately. The caller takes no text after a stop string.
        sampling = replace(choice.sampling, stop=())
        self._text = IncrementalDetokenizer.for_request(tokenizer, choice.prompt.token_ids, sampling)
        self._num_chars = 0
        self._kept = LogitColumns()
        self._waiting: deque[tuple[int, int, int]] = deque()
        """For each token that was not taken: begin and end of its text, and its position in ``_kept``."""

    def add(self, logits: Sequence[TokenLogits]) -> None:
        """Adds the next tokens of the answer. Call this method before ``take`` for the text of these tokens."""
        if not self._waiting:
            self._kept = LogitColumns()
        for position, token in enumerate(logits, len(self._kept)):
            begin = self._num_chars
            self._num_chars += len(self._text.append((token.token_id,))[0])
            # A token with only a part of a character adds no text yet. The token gets the position of the next
            # character.
            self._waiting.append((begin, max(self._num_chars, begin + 1), position))
        self._kept.extend(logits)

    def take(self, begin: int, end: int) -> Iterator[dict[str, Any]]:
        """Yields the log-probabilities of the tokens in the characters ``begin`` to ``end`` of the answer.

        Each token is taken only once. Tokens before ``begin`` are dropped. An entry has the same members as in the
        ``logprobs`` of a chat.
        """
        return chat_entries(self._tokenizer, self._taken(begin, end), self._count)

    def _taken(self, begin: int, end: int) -> Iterator[TokenLogits]:
        while self._waiting and self._waiting[0][0] < end:
            _, token_end, position = self._waiting.popleft()
            if token_end > begin:
                yield self._kept[position]


def without_bytes(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns log-probabilities as OpenAI's events have them: without the bytes of the tokens."""
    return [
        {name: _short(value) if name == "top_logprobs" else value for name, value in entry.items() if name != "bytes"}
        for entry in entries
    ]


def _short(best: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"token": one["token"], "logprob": one["logprob"]} for one in best]
