#!/usr/bin/env python3
"""Writes ``models/shapes/tokenizer``: the tiny model's tokenizer, extended by invented words to 32000 entries.

Benchmark models with random weights have a vocabulary as large as Llama 2's. Their output has no meaning, but
detokenizing it must take as much time as for real text. Therefore every additional token is an invented word of four to
eight letters. Prompts are divided into tokens by the tiny model's merges. The invented words have no merges, so they
occur only in the model's output.

    python tools/shape_tokenizer.py
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path

MODELS = Path(__file__).resolve().parent.parent / "models"
TINY, SHAPES = MODELS / "tiny_llama", MODELS / "shapes" / "tokenizer"
VOCAB_SIZE = 32_000
"""Number of entries of the vocabulary."""
SYLLABLES = [consonant + vowel for vowel in "aeiou" for consonant in "bdfghjklmnprstvz"]
WORD_MARK = "\u2581"


def made_up_words() -> Iterator[str]:
    """Yields invented words of two syllables, then of three and more. Each has the tokenizer's mark for a word's
    beginning.
    """
    for length in count(2):
        for index in range(len(SYLLABLES) ** length):
            syllables = []
            for _ in range(length):
                index, syllable = divmod(index, len(SYLLABLES))
                syllables.append(SYLLABLES[syllable])
            yield WORD_MARK + "".join(syllables)


def main() -> None:
    tokenizer = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    words = made_up_words()
    while len(vocab) < VOCAB_SIZE:
        vocab.setdefault(next(words), len(vocab))
    SHAPES.mkdir(parents=True, exist_ok=True)
    text = json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))
    (SHAPES / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(TINY / name, SHAPES / name)


if __name__ == "__main__":
    main()
