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
from tools.tiny_llama.data import is_held_out
from tools.tiny_llama.drills import training_documents
from tools.tiny_llama.tokenizer import BOS, ROLE_TOKENS, render

BUILTIN = "builtin"
BUILTIN_SEED = 77
"""Seed of the text; training used other seeds."""


def calibration_tokens(folder: Path, source: str, sequences: int, length: int) -> NDArray[np.int32]:
    """Returns token ids. ``source`` is ``builtin`` or a file. Raises CheckpointError if it is wrong or too short."""
    tokenizer = make_tokenizer(read_tokenizer_files(find_vocabulary(folder)))
    documents = builtin_documents(tokenizer) if source == BUILTIN else _file_documents(Path(source), tokenizer)
    tokens = list(itertools.islice(itertools.chain.from_iterable(documents), sequences * length))
    whole = len(tokens) // length
    if whole == 0:
        raise CheckpointError(f"{source}: {len(tokens)} tokens, too few to calibrate, at least {length} are needed")
    return np.array(tokens[: whole * length], np.int32).reshape(whole, length)


def builtin_documents(tokenizer: Tokenizer, seed: int = BUILTIN_SEED, *, held_out: bool = False) -> Iterator[list[int]]:
    """Yields the tiny Llama's text without end, either for training or held out from it.

    A vocabulary without role tokens gets only the text.
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
    """Yields the ``text`` of each line, which is a JSON object."""
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
