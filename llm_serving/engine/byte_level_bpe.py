"""Byte-level BPE (GPT-2, Radford et al. 2019) from ``vocab.json`` and ``merges.txt``, for folders without a
``tokenizer.json``: how text is cut before the merges is then not in a file, but known by the tokenizer's class."""

from __future__ import annotations

import tokenizers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from llm_serving.engine.tokenizer_files import MERGES_FILE, TokenizerFiles
from llm_serving.errors import CheckpointError

_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen2's words: as GPT-4's, with digits one by one."""


def byte_level_bpe(files: TokenizerFiles) -> Tokenizer:
    """The tokenizer of a folder, without its added tokens. Raises CheckpointError for a class that is not known."""
    merges = files.vocabulary.with_name(MERGES_FILE)
    if not merges.is_file():
        raise CheckpointError(f"{files.vocabulary}: there is no {MERGES_FILE} beside it")
    name = files.settings.text("tokenizer_class", "").removesuffix("Fast")
    cutters = {"Qwen2Tokenizer": _as_qwen2, "GPT2Tokenizer": _as_gpt2}
    if name not in cutters:
        raise files.settings.fail("tokenizer_class", f"must be {' or '.join(cutters)} where there is no tokenizer.json")
    tokenizer = tokenizers.Tokenizer(models.BPE.from_file(str(files.vocabulary), str(merges)))
    tokenizer.decoder = decoders.ByteLevel()
    cutters[name](tokenizer)
    return tokenizer


def _as_qwen2(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated", invert=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _as_gpt2(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
