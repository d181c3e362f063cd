"""The two implementations of Tokenizer, with the libraries ``tokenizers`` and ``sentencepiece``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import sentencepiece
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from llm_serving.config import Config
from llm_serving.engine.gguf_tokenizer import read_gguf_tokenizer
from llm_serving.engine.token_table import decode_rule, sentencepiece_rule
from llm_serving.engine.tokenizer import Tokenizer
from llm_serving.engine.tokenizer_files import (
    BPE_FILE,
    MERGES_FILE,
    AddedToken,
    TokenizerFiles,
    find_vocabulary,
    read_tokenizer_files,
)
from llm_serving.errors import CheckpointError
from llm_serving.gguf.place import own_config

MAX_VOCABULARY_BYTES = 256 * 1024 * 1024
"""Maximum size of a vocabulary file."""

# These bytes mean ``normalizer_spec { add_dummy_prefix: false }``. They are appended to a serialised ModelProto, which
# may have a ``normalizer_spec`` already. Protocol buffers merge both, so the bytes change only this flag.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"

# Turn off the library's own threads. They would only add cost, because each call encodes a single text.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Regular expression by which Qwen2's tokenizer splits a text into words. Each digit is a word, unlike in GPT-4."""


def load_tokenizer(config: Config) -> Tokenizer:
    """Loads the tokenizer of a config. Raises CheckpointError if the tokenizer is wrong, or if the draft model has
    other tokens.
    """
    tokenizer = _read(Path(config.tokenizer_file), config.tokenizer.type, config.end_token_ids)
    draft = config.draft
    if draft is not None and draft.head is None:
        assert draft.path is not None, "a draft model has files"
        _check_same_tokens(tokenizer, _read_draft_tokenizer(Path(draft.path)), draft.path)
    return tokenizer


def _read(place: Path, kind: str, eos_token_ids: Sequence[int]) -> Tokenizer:
    vocabulary = find_vocabulary(place, kind)
    read = read_gguf_tokenizer if vocabulary.suffix == ".gguf" else read_tokenizer_files
    return make_tokenizer(read(vocabulary), eos_token_ids)


def _read_draft_tokenizer(path: Path) -> Tokenizer:
    return _read(own_config(path) or path, "auto", ())


def _check_same_tokens(tokenizer: Tokenizer, draft: Tokenizer, path: str) -> None:
    """Raises CheckpointError with the first difference if the draft model in ``path`` has other tokens."""
    key = "speculative_config.model"
    if draft.vocab_size != tokenizer.vocab_size:
        raise CheckpointError(
            f"{key}: {path}: its tokenizer has {draft.vocab_size} tokens, and the model's has {tokenizer.vocab_size}; "
            "a draft model needs the same tokenizer"
        )
    for token_id in range(tokenizer.vocab_size):
        own, other = tokenizer.piece(token_id), draft.piece(token_id)
        if own != other:
            raise CheckpointError(
                f"{key}: {path}: token {token_id} of its tokenizer is {other!r}, and {own!r} in the model's; "
                "a draft model needs the same tokenizer"
            )


def make_tokenizer(files: TokenizerFiles, eos_token_ids: Sequence[int] = ()) -> Tokenizer:
    """Makes the tokenizer of a model folder. See ``Tokenizer`` for ``eos_token_ids``."""
    make = SentencePieceTokenizer if files.is_sentencepiece else FastTokenizer
    return make(files, eos_token_ids)


class FastTokenizer(Tokenizer):
    """Reads ``tokenizer.json``, or ``vocab.json`` with ``merges.txt``, through the ``tokenizers`` library.

    Truncation and padding are off, even if the file turns them on.
    """

    def __init__(self, files: TokenizerFiles, eos_token_ids: Sequence[int] = ()) -> None:
        source = str(files.vocabulary)
        try:
            self._tokenizer = _fast_tokenizer(files)
        except CheckpointError:
            raise
        except Exception as reason:  # the library ``tokenizers`` raises errors of class Exception
            raise CheckpointError(f"{source}: not a valid {files.vocabulary.name}: {reason}") from reason
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._check_template(source)
        self._add_missing(files)
        decoder = self._tokenizer.decoder
        entries = self._tokenizer.get_added_tokens_decoder()
        named = (self._tokenizer.token_to_id(token) for token in files.special_tokens.values())
        super().__init__(
            files,
            eos_token_ids,
            rule=decode_rule(None if decoder is None else json.loads(decoder.__getstate__()), source),
            added={token_id: token.content for token_id, token in entries.items()},
            special=frozenset(i for i, token in entries.items() if token.special)
            | {token_id for token_id in named if token_id is not None},
            vocab_size=self._tokenizer.get_vocab_size(with_added_tokens=True),
        )

    def _check_template(self, source: str) -> None:
        """Raises CheckpointError if the library cannot encode a test text, so that the fault is found at the start.

        For example, the library panics if its post-processor names a special token that the file does not define.
        """
        try:
            self._tokenizer.encode_batch_fast(["a"])
        except BaseException as reason:
            # Catch the library's PanicException, too. It is not a subclass of Exception.
            if isinstance(reason, Exception) or type(reason).__name__ == "PanicException":
                raise CheckpointError(f"{source}: the tokenizer cannot encode a text: {reason}") from reason
            raise

    def _add_missing(self, files: TokenizerFiles) -> None:
        """Adds the tokens that ``tokenizer_config.json`` lists but the vocabulary file lacks, as transformers does."""
        known = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        for token in files.added_tokens:
            if token.content in known:
                continue
            entry = tokenizers.AddedToken(
                token.content,
                lstrip=token.strip_left,
                rstrip=token.strip_right,
                normalized=False,
                special=token.special,
            )
            self._tokenizer.add_special_tokens([entry]) if token.special else self._tokenizer.add_tokens([entry])
            if self._tokenizer.token_to_id(token.content) != token.token_id:
                raise CheckpointError(
                    f"{files.settings.source}: added token {token.content!r} has id {token.token_id}, but "
                    f"{files.vocabulary.name} gives it {self._tokenizer.token_to_id(token.content)}"
                )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        # ``encode_batch_fast`` returns the same ids as ``encode``, but releases the interpreter lock. So other requests
        # continue while a long text is encoded.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def piece(self, token_id: int) -> str | None:
        piece: str | None = self._tokenizer.id_to_token(token_id)
        return piece

    def token_id(self, piece: str) -> int | None:
        token_id: int | None = self._tokenizer.token_to_id(piece)
        return token_id


class SentencePieceTokenizer(Tokenizer):
    """Reads ``tokenizer.model`` through sentencepiece, with the added tokens of ``tokenizer_config.json``.

    As in transformers' LlamaTokenizer, a text is first divided at the added tokens. Sentencepiece then encodes the
    parts between them, and puts the mark of a new word before each part. With ``legacy: false``, only the start of the
    text gets this mark.
    """

    def __init__(self, files: TokenizerFiles, eos_token_ids: Sequence[int] = ()) -> None:
        proto = _read_model(files)
        self._processor = _processor(proto, files)
        self._plain = _processor(proto + _NO_DUMMY_PREFIX, files)
        has_dummy_prefix = self._processor.encode("a") != self._plain.encode("a")
        self._legacy = files.settings.boolean("legacy", True)
        self._prefix_first = files.settings.boolean("add_prefix_space", True)
        self._add_bos = files.settings.boolean("add_bos_token", True)
        self._add_eos = files.settings.boolean("add_eos_token", False)
        self._size = self._processor.get_piece_size()
        self._check_pieces(files)
        self._check_ids(files)
        tokens = self._literal_tokens(files)
        self._tokens = {token.content: token for token in tokens}
        self._splitter = _splitter(tokens)
        self._bos = self._end_of_text(files, "bos_token", self._processor.bos_id())
        self._eos = self._end_of_text(files, "eos_token", self._processor.eos_id())
        self._added = {token.token_id: token.content for token in tokens}
        control = (i for i in range(self._size) if self._processor.is_control(i) or self._processor.is_unknown(i))
        super().__init__(
            files,
            eos_token_ids,
            rule=sentencepiece_rule(add_dummy_prefix=has_dummy_prefix),
            added=self._added,
            special=frozenset(token.token_id for token in tokens if token.special) | frozenset(control),
            vocab_size=max([self._size - 1, *self._added]) + 1,
        )

    def _check_pieces(self, files: TokenizerFiles) -> None:
        """Raises CheckpointError if a vocabulary entry is not valid UTF-8, so that the fault is found at the start."""
        try:
            self._processor.id_to_piece(list(range(self._size)))
        except UnicodeDecodeError as reason:
            raise CheckpointError(f"{files.vocabulary}: a piece of the vocabulary is not UTF-8: {reason}") from reason

    def _check_ids(self, files: TokenizerFiles) -> None:
        for token in files.added_tokens:
            if token.token_id < self._size and self._processor.id_to_piece(token.token_id) != token.content:
                raise CheckpointError(
                    f"{files.settings.source}: added token {token.content!r} has id {token.token_id}, which is "
                    f"{self._processor.id_to_piece(token.token_id)!r} in {files.vocabulary.name}"
                )

    def _literal_tokens(self, files: TokenizerFiles) -> tuple[AddedToken, ...]:
        """Returns the tokens at which a text is divided before SentencePiece encodes the parts between them.

        These are the added tokens, and the named special tokens (``bos_token``, ...) of SentencePiece's vocabulary.
        """
        listed = {token.content for token in files.added_tokens}
        named = []
        for content in dict.fromkeys(files.special_tokens.values()):
            token_id = self._piece_id(content)
            if content not in listed and token_id is not None:
                named.append(AddedToken(token_id, content, special=True))
        return (*files.added_tokens, *named)

    def _piece_id(self, piece: str) -> int | None:
        # For an unknown piece, ``piece_to_id`` returns the id of the unknown token.
        token_id: int = self._processor.piece_to_id(piece)
        return token_id if self._processor.id_to_piece(token_id) == piece else None

    def _end_of_text(self, files: TokenizerFiles, name: str, default: int) -> int | None:
        token = self._tokens.get(files.special_tokens.get(name, ""))
        if token is not None:
            return token.token_id
        return default if default >= 0 else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        if add_special_tokens and self._add_bos and self._bos is not None:
            ids.append(self._bos)
        for position, part in enumerate(self._splitter.split(text) if self._splitter else [text]):
            if position % 2:
                ids.append(self._tokens[part.strip() if part not in self._tokens else part].token_id)
            elif part:
                with_prefix = self._legacy or (position == 0 and self._prefix_first)
                ids.extend((self._processor if with_prefix else self._plain).encode(part))
        if add_special_tokens and self._add_eos and self._eos is not None:
            ids.append(self._eos)
        return ids

    def piece(self, token_id: int) -> str | None:
        if token_id in self._added:
            return self._added[token_id]
        if not 0 <= token_id < self._size:
            return None
        piece: str = self._processor.id_to_piece(token_id)
        return piece

    def token_id(self, piece: str) -> int | None:
        return self._tokens[piece].token_id if piece in self._tokens else self._piece_id(piece)


def _fast_tokenizer(files: TokenizerFiles) -> tokenizers.Tokenizer:
    if files.content is not None:
        return tokenizers.Tokenizer.from_buffer(files.content)
    _check_size(files)
    is_bpe = files.vocabulary.name == BPE_FILE
    return _byte_level_bpe(files) if is_bpe else tokenizers.Tokenizer.from_file(str(files.vocabulary))


def _check_size(files: TokenizerFiles) -> None:
    size = files.vocabulary.stat().st_size
    if size > MAX_VOCABULARY_BYTES:
        raise CheckpointError(f"{files.vocabulary}: has {size} bytes; the maximum is {MAX_VOCABULARY_BYTES}")


def _read_model(files: TokenizerFiles) -> bytes:
    if files.content is not None:
        return files.content
    _check_size(files)
    try:
        return files.vocabulary.read_bytes()
    except OSError as reason:
        raise CheckpointError(f"{files.vocabulary}: cannot be read: {reason.strerror}") from reason


def _processor(proto: bytes, files: TokenizerFiles) -> sentencepiece.SentencePieceProcessor:
    try:
        processor = sentencepiece.SentencePieceProcessor()
        processor.LoadFromSerializedProto(proto)
    except (RuntimeError, OSError, ValueError) as reason:
        raise CheckpointError(f"{files.vocabulary}: not a valid sentencepiece model: {reason}") from reason
    return processor


def _splitter(tokens: tuple[AddedToken, ...]) -> re.Pattern[str] | None:
    """Returns a pattern that matches any added token, with the white space that the token removes.

    Longer tokens are matched first.
    """
    if not tokens:
        return None
    ordered = sorted(tokens, key=lambda token: -len(token.content))
    patterns = (
        (r"\s*" if t.strip_left else "") + re.escape(t.content) + (r"\s*" if t.strip_right else "") for t in ordered
    )
    return re.compile(f"({'|'.join(patterns)})")


def _byte_level_bpe(files: TokenizerFiles) -> tokenizers.Tokenizer:
    """Makes a byte-level BPE (GPT-2, Radford et al. 2019) from ``vocab.json`` and ``merges.txt``, without added tokens.

    A folder without ``tokenizer.json`` does not describe how text is split into words. The name of the tokenizer's
    class determines this. Raises CheckpointError for an unknown class.
    """
    merges = files.vocabulary.with_name(MERGES_FILE)
    if not merges.is_file():
        raise CheckpointError(f"{files.vocabulary}: there is no {MERGES_FILE} in the same folder")
    name = files.settings.text("tokenizer_class", "").removesuffix("Fast")
    if name not in ("Qwen2Tokenizer", "GPT2Tokenizer"):
        raise files.settings.fail(
            "tokenizer_class", "must be Qwen2Tokenizer or GPT2Tokenizer if there is no tokenizer.json"
        )
    tokenizer = tokenizers.Tokenizer(models.BPE.from_file(str(files.vocabulary), str(merges)))
    tokenizer.decoder = decoders.ByteLevel()
    if name == "GPT2Tokenizer":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return tokenizer
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated", invert=False)
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_of_words])
    return tokenizer
