"""Follows the tokens of a sequence and counts the tokens of its reasoning."""

from __future__ import annotations

from collections.abc import Callable

from llm_serving.parsing.formats import ReasoningFormat


class ThinkingWatch:
    """Tracks whether a sequence is before, inside or after its reasoning. The input is the bytes of each token.

    The reasoning begins and ends at the same places as in ``OutputParser``, which reads the text.
    """

    def __init__(
        self, reasoning: ReasoningFormat, token_bytes: Callable[[int], bytes], *, is_thinking: bool = False
    ) -> None:
        """``is_thinking`` is True if the prompt ends inside the reasoning, so that the output begins with reasoning."""
        self.is_thinking = is_thinking
        self.num_tokens = 0
        """Number of tokens in the reasoning, including the marker at its end."""
        self._open, self._close = reasoning.open.encode(), reasoning.close.encode()
        self._repeats = reasoning.is_in_channels
        self._token_bytes = token_bytes
        self._is_over = False
        self._tail = b""

    def advance(self, token_id: int) -> None:
        """Processes the next token of the sequence."""
        if self._is_over:
            return
        self._tail += self._token_bytes(token_id)
        if self.is_thinking:
            self.num_tokens += 1
            self._look_for_end()
        else:
            self._look_for_start()

    def _look_for_end(self) -> None:
        place = self._tail.find(self._close)
        if place < 0:
            self._tail = self._tail[-len(self._close) :]
            return
        self.is_thinking = False
        self._tail = self._tail[place + len(self._close) :]
        self._is_over = not self._repeats

    def _look_for_start(self) -> None:
        if self._repeats:
            place = self._tail.find(self._open)
            self._tail = self._tail[-len(self._open) :] if place < 0 else self._tail[place + len(self._open) :]
            self.is_thinking = place >= 0
            return
        text = self._tail.lstrip()
        if text.startswith(self._open):
            self.is_thinking = True
            self._tail = text[len(self._open) :]
        elif not self._open.startswith(text):
            self._is_over = True
