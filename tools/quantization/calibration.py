"""Reads the calibration text: token ids [sequences, length] from a JSONL file or the tiny Llama's generator."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llm_serving.engine.tokenizer import Tokenizer
from llm_serving.engine.tokenizer_backends import make_tokenizer
from llm_serving.engine.tokenizer_files import find_vocabulary, read_tokenizer_files
from llm_serving.errors import CheckpointError
from tools.tiny_llama.corpus import training_documents
from tools.tiny_llama.data import is_held_out
from tools.tiny_llama.tokenizer import BOS, ROLE_TOKENS, render

BUILTIN = "builtin"
BUILTIN_SEED = 77
"""Seed of the built-in calibration text. The tiny model in ``models/`` was trained with texts of other seeds."""


def calibration_tokens(folder: Path, source: str, sequences: int, length: int) -> NDArray[np.int32]:
    """Returns calibration token ids [at most ``sequences``, length] from ``source``: ``builtin`` or a JSONL file.

    Raises CheckpointError if the file is wrong or the text is too short.
    """
    tokenizer = make_tokenizer(read_tokenizer_files(find_vocabulary(folder)))
    documents = builtin_documents(tokenizer) if source == BUILTIN else _file_documents(Path(source), tokenizer)
    tokens = list(itertools.islice(itertools.chain.from_iterable(documents), sequences * length))
    whole = len(tokens) // length
    if whole == 0:
        raise CheckpointError(f"{source}: {len(tokens)} tokens, too few to calibrate, at least {length} are needed")
    return np.array(tokens[: whole * length], np.int32).reshape(whole, length)


def builtin_documents(tokenizer: Tokenizer, seed: int = BUILTIN_SEED, *, held_out: bool = False) -> Iterator[list[int]]:
    """Yields an endless stream of documents, as token ids, from the generator of the tiny Llama's training text.

    With ``held_out``, these are the documents that are never used for training, otherwise the training documents. If
    the vocabulary has no tokens for the roles of a conversation (user, assistant), the roles are left out.
    """
    has_roles = len(tokenizer.encode("".join(ROLE_TOKENS.values()), False)) == len(ROLE_TOKENS)
    for document in training_documents(seed):
        if is_held_out(render(document)) != held_out:
            continue
        if has_roles:
            yield tokenizer.encode(render(document).removeprefix(BOS))
        else:
            yield tokenizer.encode("\n".join(text for _, text in document))


def _file_documents(path: Path, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yields the token ids of each line of a JSONL file, from the line's field ``text``."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as reason:
        raise CheckpointError(f"{path}: cannot be read: {reason}") from reason
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as reason:
            raise CheckpointError(f"{path}:{number}: not valid JSON: {reason}") from reason
        text = value.get("text") if isinstance(value, dict) else None
        if not isinstance(text, str):
            raise CheckpointError(f'{path}:{number}: there is no "text" in {line[:80]}')
        yield tokenizer.encode(text)
