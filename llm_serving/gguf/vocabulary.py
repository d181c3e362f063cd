"""Creates the content of vocabulary files for tokenizer libraries from the metadata of a GGUF file.

The metadata names one of llama.cpp's tokenizers. ``gpt2`` is a byte-level BPE, for which this module creates a
``tokenizer.json`` (library ``tokenizers``). ``llama`` (SentencePiece's BPE) and ``t5`` (a unigram model, Kudo 2018)
become a ``tokenizer.model`` for SentencePiece.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llm_serving.errors import CheckpointError
from llm_serving.gguf.header import Header

MAX_TOKENS = 4 * 1024 * 1024
"""Maximum number of tokens of a vocabulary."""
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SENTENCEPIECE_KINDS = {"llama": 2, "t5": 1}
"""Maps llama.cpp's name of a tokenizer to SentencePiece's number of the model type (``TrainerSpec.model_type``)."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_ENDS}"
_QWEN2_WORDS = _GPT4_WORDS.replace("{1,3}", "")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35_WORDS = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""The letters that have an upper and a lower case, as a rule of DeepSeek's first tokenizer lists them."""
_DEEPSEEK_CHINESE = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


@dataclass(frozen=True, slots=True)
class WordRule:
    """The rule by which a byte-level BPE splits a text into words, as in the ``tokenizer.json`` of the model's
    publisher.
    """

    patterns: tuple[str, ...] = ()
    """Regular expressions that split the text one after the other. Empty: the rule of GPT-2."""
    single_digits: bool = False
    """If True, each digit is a word, and GPT-2's rule splits the text between the digits."""
    normalises: bool = False
    """If True, the text is first normalised to Unicode NFC."""
    whole_words: bool = False
    """If True, a word that is in the vocabulary becomes one token, even if the merges would not produce this token."""
    begins_text: bool = False
    """If True, the token BOS is added before a text, unless the file states ``add_bos_token``."""


_LLAMA3 = WordRule((_GPT4_WORDS,), whole_words=True, begins_text=True)
_QWEN2 = WordRule((_QWEN2_WORDS,), normalises=True)
WORD_RULES = {
    "gpt-2": WordRule(),
    "gpt2": WordRule(),
    "smollm": WordRule(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "dbrx": WordRule((_GPT4_WORDS,)),
    "gpt-4o": WordRule((_GPT4O_WORDS,)),
    "tekken": WordRule((_TEKKEN_WORDS,), whole_words=True, begins_text=True),
    "qwen35": WordRule((_QWEN35_WORDS,), normalises=True),
    "deepseek-llm": WordRule(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _DEEPSEEK_CHINESE,
            r"\p{N}",
        )
    ),
    "deepseek-coder": WordRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CHINESE, r"\p{N}")),
    "deepseek-v3": WordRule((r"\p{N}{1,3}", r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3_WORDS)),
}
"""Maps llama.cpp's name of the pre-tokenizer (``tokenizer.ggml.pre``) to its rule."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a GGUF file. ``kind`` is llama.cpp's name of the tokenizer."""

    header: Header
    kind: str
    tokens: list[str]
    types: list[int]

    @property
    def is_sentencepiece(self) -> bool:
        return self.kind in _SENTENCEPIECE_KINDS

    def added(self) -> Iterator[tuple[int, str, bool]]:
        """Yields the tokens whose text is found in the input before it is split into words.

        For each, yields its id, its text, and True if it is a special token.
        """
        for token_id, kind in enumerate(self.types):
            if kind in (_CONTROL, _USER_DEFINED):
                yield token_id, self.tokens[token_id], kind == _CONTROL

    def special(self, name: str) -> str | None:
        """Returns the text of a named special token, for example of ``bos``.

        None if the file does not name this token.
        """
        token_id = self.header.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is None:
            return None
        if not isinstance(token_id, int) or not 0 <= token_id < len(self.tokens):
            raise _error(self.header, f"{name}_token_id", token_id, f"must be below {len(self.tokens)}")
        return self.tokens[token_id]

    def flag(self, name: str, default: bool) -> bool:
        """Returns a boolean of the tokenizer's metadata, for example ``add_bos_token``. Raises CheckpointError for
        another type.
        """
        value = self.header.metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise _error(self.header, name, value, "must be true or false")
        return value

    @property
    def begins_text(self) -> bool:
        """True if the tokenizer adds BOS before a text."""
        default = True if self.is_sentencepiece else self.word_rule.begins_text
        return self.flag("add_bos_token", default)

    @property
    def word_rule(self) -> WordRule:
        """The rule of a byte-level BPE. Raises CheckpointError if the file names an unknown rule."""
        name = self.header.metadata.get("tokenizer.ggml.pre", "gpt-2")
        if name not in WORD_RULES:
            known = ", ".join(sorted(WORD_RULES))
            problem = f"is not supported; only {known}. Set tokenizer.vocab_file to the model's tokenizer.json"
            raise _error(self.header, "pre", name, problem)
        return WORD_RULES[name]


def read_vocabulary(header: Header) -> Vocabulary:
    """Returns the vocabulary of a GGUF file.

    Raises CheckpointError if the file has no tokens or an unsupported tokenizer.
    """
    kind = header.metadata.get("tokenizer.ggml.model")
    if kind != "gpt2" and kind not in _SENTENCEPIECE_KINDS:
        problem = f"is not supported; only gpt2, {', '.join(_SENTENCEPIECE_KINDS)}. Set tokenizer.vocab_file"
        raise _error(header, "model", kind, problem)
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise _error(header, "tokens", type(tokens).__name__, "must be a list of text")
    types = header.metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise _error(header, "token_type", type(types).__name__, f"must be a list of {len(tokens)} numbers")
    return Vocabulary(header, str(kind), tokens, types)


def tokenizer_json(vocabulary: Vocabulary) -> bytes:
    """Returns the content of a ``tokenizer.json`` for a byte-level BPE. Raises CheckpointError if the file has no
    merges.
    """
    merges = vocabulary.header.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not all(isinstance(merge, str) for merge in merges):
        raise _error(vocabulary.header, "merges", type(merges).__name__, "must be a list of text")
    rule = vocabulary.word_rule
    added = [
        {
            "id": token_id,
            "content": content,
            "special": special,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for token_id, content, special in vocabulary.added()
    ]
    content = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if rule.normalises else None,
        "pre_tokenizer": _pre_tokenizer(rule),
        "post_processor": _post_processor(vocabulary),
        "decoder": _byte_level(splits=True),
        "model": {
            "type": "BPE",
            "vocab": _unique(vocabulary),
            "merges": merges,
            "ignore_merges": rule.whole_words,
        },
    }
    return json.dumps(content, ensure_ascii=False).encode()


def _unique(vocabulary: Vocabulary) -> dict[str, int]:
    vocab = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    if len(vocab) != len(vocabulary.tokens):
        raise _error(
            vocabulary.header,
            "tokens",
            f"{len(vocabulary.tokens)} tokens",
            f"only {len(vocab)} of them have different texts",
        )
    return vocab


def _pre_tokenizer(rule: WordRule) -> dict[str, Any]:
    if not rule.patterns and not rule.single_digits:
        return _byte_level(splits=True)
    if rule.single_digits:
        steps: list[dict[str, Any]] = [{"type": "Digits", "individual_digits": True}]
    else:
        steps = [
            {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
            for each in rule.patterns
        ]
    return {"type": "Sequence", "pretokenizers": [*steps, _byte_level(splits=rule.single_digits)]}


def _byte_level(*, splits: bool) -> dict[str, Any]:
    """Returns the entry of a ``tokenizer.json`` that replaces bytes by printable characters.

    If ``splits`` is True, the entry also splits the text into words, as GPT-2 does.
    """
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": splits}


def _post_processor(vocabulary: Vocabulary) -> dict[str, Any] | None:
    """Returns the entry of a ``tokenizer.json`` that adds BOS before a text and EOS after it.

    Returns None if the GGUF file asks for neither token.
    """
    before = vocabulary.special("bos") if vocabulary.begins_text else None
    after = vocabulary.special("eos") if vocabulary.flag("add_eos_token", False) else None
    if before is None and after is None:
        return None
    first, last = (
        [] if token is None else [{"SpecialToken": {"id": token, "type_id": 0}}] for token in (before, after)
    )
    texts = [{"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B")]
    ids = {token: vocabulary.tokens.index(token) for token in (before, after) if token is not None}
    return {
        "type": "TemplateProcessing",
        "single": [*first, texts[0], *last],
        "pair": [*first, *texts, *last],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]} for token, number in ids.items()},
    }


def sentencepiece_model(vocabulary: Vocabulary) -> bytes:
    """Returns a serialised ModelProto of SentencePiece (sentencepiece_model.proto): pieces, type and normalisation.

    Raises CheckpointError if the file has no scores.
    """
    scores = vocabulary.header.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary.tokens):
        problem = f"must be a list of {len(vocabulary.tokens)} numbers"
        raise _error(vocabulary.header, "scores", type(scores).__name__, problem)
    pieces = b"".join(
        _message(1, _message(1, token.encode()) + b"\x15" + struct.pack("<f", score) + _number(3, kind))
        for token, score, kind in zip(vocabulary.tokens, scores, vocabulary.types, strict=True)
    )
    has_bytes = _BYTE in vocabulary.types
    trainer = _number(3, _SENTENCEPIECE_KINDS[vocabulary.kind]) + _number(35, int(has_bytes))
    for field, name in ((40, "unknown"), (41, "bos"), (42, "eos"), (43, "padding")):
        token_id = vocabulary.header.metadata.get(f"tokenizer.ggml.{name}_token_id")
        trainer += _number(field, token_id if isinstance(token_id, int) else -1)
    keeps = not vocabulary.flag("remove_extra_whitespaces", False)
    normalizer = _number(3, int(vocabulary.flag("add_space_prefix", True))) + _number(4, int(not keeps)) + _number(5, 1)
    return pieces + _message(2, trainer) + _message(3, _message(1, b"identity") + normalizer)


def _message(field: int, content: bytes) -> bytes:
    """Returns a field of bytes in the wire format of Protocol Buffers."""
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _number(field: int, value: int) -> bytes:
    """Returns a field with an integer in the wire format of Protocol Buffers. Negative integers are 64 bits wide."""
    return _varint(field << 3) + _varint(value & (1 << 64) - 1)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def _error(header: Header, key: str, value: object, problem: str) -> CheckpointError:
    return CheckpointError(f"{header.path}: tokenizer.ggml.{key} = {value!r}: {problem}")
