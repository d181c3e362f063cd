"""A table of the bytes of every token, so that decoding only joins bytes.

In the supported tokenizers, the bytes of a sequence's tokens, one after the other, are its text. Only a leading space
that the tokenizer has added must be removed. Decoding is therefore exact, needs no window over earlier tokens, and
costs the same for each token. There are two kinds of these tokenizers. In byte-level BPE (GPT-2, Radford et al. 2019),
the vocabulary has a printable character for each byte. In SentencePiece models with byte fallback (Kudo and Richardson
2018), a space is U+2581, and an unknown character is a series of tokens ``<0xNN>``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from llm_serving.errors import CheckpointError

WORD_MARK = "\u2581"
"""The character that SentencePiece writes for a space."""

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class DecodeRule:
    """The rule that turns a vocabulary entry into bytes.

    ``strip_spaces`` is the number of spaces that decoding removes at the start of a text, because the tokenizer has
    added them. With ``strip_first_token``, decoding instead removes all word marks (U+2581) from the first token, as a
    Metaspace decoder does.
    """

    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip_spaces: int = 0
    strip_first_token: bool = False


BYTE_LEVEL = DecodeRule(byte_level=True)


def sentencepiece_rule(*, add_dummy_prefix: bool) -> DecodeRule:
    """Returns the rule that turns the vocabulary entries of a SentencePiece model into bytes."""
    return DecodeRule(replacements=((WORD_MARK, " "),), byte_fallback=True, strip_spaces=1 if add_dummy_prefix else 0)


def decode_rule(decoder: Mapping[str, Any] | None, source: str) -> DecodeRule:
    """Returns the rule for the ``decoder`` of a ``tokenizer.json``.

    The decoder must join the bytes of the tokens without other changes. Otherwise raises CheckpointError, which names
    the unsupported part.
    """
    if decoder is None:
        raise CheckpointError(f"{source}: the tokenizer has no decoder, so its tokens cannot be turned into text")
    parts = decoder.get("decoders", []) if decoder["type"] == "Sequence" else [decoder]
    rule = DecodeRule()
    fused = False
    for part in parts:
        rule = _add_part(rule, part, fused, source)
        fused = fused or part["type"] == "Fuse"
    return rule


def _add_part(rule: DecodeRule, part: Mapping[str, Any], fused: bool, source: str) -> DecodeRule:
    kind, replacements = part["type"], rule.replacements
    if kind == "ByteLevel":
        return replace(rule, byte_level=True)
    if kind == "ByteFallback":
        return replace(rule, byte_fallback=True)
    if kind == "Replace" and "String" in part["pattern"] and not fused:
        return replace(rule, replacements=(*replacements, (part["pattern"]["String"], part["content"])))
    if kind == "Metaspace":
        strip_first_token = part.get("prepend_scheme", "always") != "never"
        replacements = (*replacements, (part["replacement"], " "))
        return replace(rule, replacements=replacements, strip_first_token=strip_first_token)
    if kind == "Strip" and fused and part["content"] == " " and not part["stop"]:
        return replace(rule, strip_spaces=rule.strip_spaces + int(part["start"]))
    if kind == "Fuse":
        return rule
    raise CheckpointError(
        f"{source}: decoder {kind!r} with {dict(part)!r} is not supported; supported are ByteLevel, Metaspace, and "
        "sequences of Replace (a string), ByteFallback, Fuse and Strip (spaces at the start, after Fuse)"
    )


def _byte_level_alphabet() -> dict[str, int]:
    """Returns the alphabet of GPT-2's byte-level BPE, which writes each byte as one printable character: {character:
    byte}.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet


_ALPHABET = _byte_level_alphabet()


class TokenTable:
    """Maps token ids to bytes. Entries are computed on first use. Threads may share a table.

    ``piece(id)`` returns the vocabulary entry, or None outside the vocabulary. ``added`` maps the ids of added tokens
    to their literal text. These include special tokens. ``special`` has the ids of the tokens that are omitted with
    ``skip_special_tokens``.
    """

    def __init__(
        self,
        rule: DecodeRule,
        piece: Callable[[int], str | None],
        added: Mapping[int, str],
        special: frozenset[int],
    ) -> None:
        self.rule = rule
        self.special = special
        self._piece = piece
        self._added = dict(added)
        self._bytes: dict[int, bytes] = {}
        self.texts: dict[int, str] = {}
        """Texts by token id, for tokens that have occurred and whose bytes are complete characters."""

    def bytes_of(self, token_id: int) -> bytes:
        """Returns the bytes of a token. The result is empty for an id that only pads the model's vocabulary."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._encode(token_id)
        return data

    def remember_text(self, token_id: int) -> None:
        """Adds the text of a token to ``texts``. Skips a token whose bytes are not complete UTF-8 characters."""
        with contextlib.suppress(UnicodeDecodeError):
            self.texts[token_id] = self.bytes_of(token_id).decode()

    def bytes_at_start(self, token_id: int) -> bytes:
        """Returns the bytes of a token that begins a text, without word marks. Use it with ``strip_first_token``."""
        piece = self._piece(token_id) or ""
        mark = self.rule.replacements[-1][0]
        return self.bytes_of(token_id) if token_id in self._added else piece.replace(mark, "").encode()

    def _encode(self, token_id: int) -> bytes:
        piece = self._added.get(token_id)
        if piece is None:
            piece = self._piece(token_id)
            if piece is None:
                return b""
            if self.rule.byte_fallback and (match := _BYTE_PIECE.fullmatch(piece)):
                return bytes([int(match[1], 16)])
        if self.rule.byte_level:
            return bytes(_ALPHABET[char] for char in piece) if all(c in _ALPHABET for c in piece) else piece.encode()
        for old, new in self.rule.replacements:
            piece = piece.replace(old, new)
        return piece.encode()
