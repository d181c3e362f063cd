"""Packs documents into training rows without padding, and separates held-out documents from training documents."""

import zlib
from collections.abc import Iterator

import numpy as np
import sentencepiece as spm
from numpy.typing import NDArray

from .corpus import training_documents
from .tokenizer import BOS_ID, encode_document, render

HELD_OUT_SHARE = 32
"""The held-out fraction of the documents is 1 divided by this number."""
PACKING_BUFFER = 200
"""Number of documents from which a training row is packed."""

Batch = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]
"""Token ids, document numbers and labels, each int32 ``[batch, length]``."""


def is_held_out(text: str) -> bool:
    """Returns True for one document in 32, chosen by its text. Held-out texts are never used for training."""
    return zlib.crc32(text.encode()) % HELD_OUT_SHARE == 0


def encoded_documents(tokenizer: spm.SentencePieceProcessor, seed: int, held_out: bool) -> Iterator[list[int]]:
    """Yields token ids of documents without end: only the held-out documents, or only the training documents."""
    for document in training_documents(seed):
        if is_held_out(render(document)) == held_out:
            yield encode_document(tokenizer, document)


def take(buffer: list[list[int]], space: int) -> list[int]:
    """Removes a document from ``buffer`` to fill the remaining ``space`` tokens of a row.

    Takes the oldest document if it fits, else the longest that fits, else the beginning of the shortest one.
    """
    if len(buffer[0]) <= space:
        return buffer.pop(0)
    fitting = [i for i, ids in enumerate(buffer) if len(ids) <= space]
    if fitting:
        return buffer.pop(max(fitting, key=lambda i: len(buffer[i])))
    return buffer.pop(min(range(len(buffer)), key=lambda i: len(buffer[i])))[:space]


def rows(source: Iterator[list[int]], length: int) -> Iterator[list[int]]:
    """Yields rows of exactly ``length`` ids. Each row begins with a document."""
    buffer: list[list[int]] = []
    while True:
        row: list[int] = []
        while len(row) < length:
            while len(buffer) < PACKING_BUFFER:
                buffer.append(next(source))
            row += take(buffer, length - len(row))
        yield row


def batches(
    tokenizer: spm.SentencePieceProcessor, seed: int, held_out: bool, batch: int, length: int
) -> Iterator[Batch]:
    """Yields batches of packed rows. A token's label is the next token of its row (after EOS, the next BOS)."""
    source = rows(encoded_documents(tokenizer, seed, held_out), length + 1)
    while True:
        ids = np.array([next(source) for _ in range(batch)], np.int32)
        numbers = np.cumsum(ids == BOS_ID, axis=1, dtype=np.int32)
        yield ids[:, :-1], numbers[:, :-1], ids[:, 1:]
