"""Turns token ids into text, piece by piece, at a constant cost per token.

A piece never contains part of a character, and never part of a stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from llm_serving.engine.tokenizer import Tokenizer
from llm_serving.sampling_params import SamplingParams


class _Utf8Decoder(codecs.BufferedIncrementalDecoder):
    """The UTF-8 decoder of the standard library. ``buffer`` holds the bytes of an unfinished character."""

    buffer: bytes

    @staticmethod
    def _buffer_decode(data: bytes, errors: str, final: bool) -> tuple[str, int]:  # type: ignore[override]
        text, used = codecs.utf_8_decode(data, errors, final)
        # The bytes that are left may begin a surrogate. UTF-8 has no surrogates, but CPython waits for the third byte.
        if _begins_surrogate(data[used:]):
            rest, _ = codecs.utf_8_decode(data[used:], errors, True)
            return text + rest, len(data)
        return text, used


def _begins_surrogate(data: bytes) -> bool:
    return len(data) == 2 and data[0] == 0xED and data[1] >= 0xA0


class StopMatcher:
    """Finds the first of several stop strings in a stream of characters.

    The stop string that is complete first ends the text. If several stop strings are complete at the same character,
    the longest one counts. The result therefore does not depend on how the characters are split into pieces. Each stop
    string has a failure automaton (Knuth, Morris and Pratt 1977). So the cost of a character does not depend on the
    length of the text that is held back.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = [stop for stop in dict.fromkeys(stops) if stop]
        self._tables = [_failure_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Adds characters. Returns the characters that can no longer belong to a stop string, and holds back all later
        characters.

        The result begins with characters that earlier calls held back. If a stop string is complete, sets ``matched``
        and returns all remaining text before the stop string.
        """
        text = self._held + text
        for position in range(len(self._held), len(text)):
            if self._step(text[position]) and self.matched is not None:
                self._held = ""
                return text[: position + 1 - len(self.matched)]
        keep = len(text) - max(self._states, default=0)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """Returns the characters that were held back as the possible start of a stop string.

        Call this method at the end of the stream.
        """
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> bool:
        for i, stop in enumerate(self._stops):
            state = self._states[i]
            while state and stop[state] != char:
                state = self._tables[i][state - 1]
            if stop[state] == char:
                state += 1
            self._states[i] = state
            if state == len(stop):
                if self.matched is None or len(stop) > len(self.matched):
                    self.matched = stop
                self._states[i] = 0
        return self.matched is not None


def _failure_table(pattern: str) -> list[int]:
    """Returns the failure table of Knuth, Morris and Pratt.

    Entry ``i`` is the length of the longest proper prefix of ``pattern`` that is also a suffix of ``pattern[:i + 1]``.
    """
    table = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = table[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        table[i] = length
    return table


class IncrementalDetokenizer:
    """The text of one growing sequence.

    The joined pieces equal ``tokenizer.decode`` of all ids, with one exception. If the last character is unfinished,
    the pieces omit it, but ``decode`` returns U+FFFD for it. Invalid UTF-8 bytes become U+FFFD as in Python's decoder.

    SentencePiece puts a space before the first word of a text. This space is removed only if the prompt is empty or
    ends with a special token. Otherwise the space separates the prompt from the first word of the output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        include_stop_str_in_output: bool = False,
        prompt_token_ids: Sequence[int] = (),
        shown_token_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        """``stop`` strings are not searched in the text of the first ``min_tokens`` tokens."""
        self._min_tokens = min_tokens
        self._table = tokenizer.table
        self._skip = tokenizer.table.special - shown_token_ids if skip_special_tokens else frozenset()
        self._decoder = _Utf8Decoder("replace")
        self._matcher = StopMatcher(stop) if stop else None
        self._include_stop = include_stop_str_in_output
        at_start = not len(prompt_token_ids) or prompt_token_ids[-1] in tokenizer.table.special
        self._strip_spaces = tokenizer.table.rule.strip_spaces if at_start else 0
        self._strip_first_token = at_start and tokenizer.table.rule.strip_first_token
        self._is_plain = not self._strip_spaces and not self._strip_first_token
        """True if no space must be removed from the start of the next text. The text of tokens then comes from the
        token table.
        """
        self.num_tokens = 0
        """Number of tokens up to the stop string, or of all tokens so far. Stays 0 if there are no stop strings."""

    @classmethod
    def for_request(
        cls, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], sampling: SamplingParams
    ) -> IncrementalDetokenizer:
        """Makes the detokenizer of a request."""
        return cls(
            tokenizer,
            sampling.stop,
            skip_special_tokens=sampling.skip_special_tokens,
            include_stop_str_in_output=sampling.include_stop_str_in_output,
            prompt_token_ids=prompt_token_ids,
            shown_token_ids=sampling.shown_token_ids,
            min_tokens=sampling.min_tokens,
        )

    def append(self, token_ids: Sequence[int]) -> tuple[str, str | None]:
        """Adds tokens. Returns the text that these tokens complete, and the stop string that ended the text or None.

        Tokens after a stop string are ignored.
        """
        if self._matcher is None and len(token_ids) == 1:  # the common case: one token of a decode step
            [token_id] = token_ids
            if self._is_plain and not self._decoder.buffer and token_id not in self._skip:
                text = self._table.texts.get(token_id)
                if text is not None:
                    return text, None
            return self._text_of(token_id), None
        pieces = []
        for token_id in token_ids:
            text = self._text_of(token_id)
            if self._matcher is None:
                pieces.append(text)
                continue
            self.num_tokens += 1
            if self.num_tokens <= self._min_tokens or not text:
                pieces.append(text)
                continue
            pieces.append(self._matcher.feed(text))
            if self._matcher.matched is not None:
                if self._include_stop:
                    pieces.append(self._matcher.matched)
                return "".join(pieces), self._matcher.matched
        return "".join(pieces), None

    def flush(self) -> str:
        """Returns the text that was held back as the possible start of a stop string.

        Call this method when the sequence has ended.
        """
        return self._matcher.flush() if self._matcher is not None else ""

    def _text_of(self, token_id: int) -> str:
        """Returns the characters that a token completes."""
        if token_id in self._skip:
            return ""
        if self._is_plain and not self._decoder.buffer:
            text = self._table.texts.get(token_id)
            if text is not None:
                return text
            self._table.remember_text(token_id)
        return self._decode(token_id)

    def _decode(self, token_id: int) -> str:
        """Returns the characters that a token completes, decoded from its bytes."""
        if self._strip_first_token:
            self._strip_first_token = False
            self._is_plain = self._strip_spaces == 0
            return self._decoder.decode(self._table.bytes_at_start(token_id))
        text = self._decoder.decode(self._table.bytes_of(token_id))
        if self._strip_spaces and text:
            stripped = text
            while self._strip_spaces and stripped.startswith(" "):
                stripped = stripped[1:]
                self._strip_spaces -= 1
            if stripped:
                self._strip_spaces = 0
                self._is_plain = True
            return stripped
        return text
