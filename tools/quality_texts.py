"""Provides the texts on which tools/quality_gate.py measures a number format.

``general_texts`` has three kinds of text in equal parts: this project's documentation, and docstrings and source code
of Python's standard library. These texts are on every machine that runs the tool. ``generated_texts`` is for the
embedded model, which was trained only on generated text.
"""

from __future__ import annotations

import ast
import itertools
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llm_serving.engine.tokenizer import Tokenizer
from llm_serving.errors import CheckpointError
from tools.quantization.calibration import builtin_documents

HELD_OUT_SEED = 4242
"""Seed of the texts that the tiny model has not seen in training."""
SHORTEST_DOCUMENT = 24
"""Minimum number of tokens of a generated document. Shorter documents are left out."""
SHORTEST_TEXT = 800
"""Minimum number of characters of a docstring, a page, or the code of a module. Shorter texts are left out."""
_CALIBRATION_PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "urllib")
_DOCS = Path(__file__).resolve().parent.parent / "docs"


@dataclass(frozen=True)
class Texts:
    """Texts to measure: token ids [texts, length]. ``counted`` is True at positions that have a next token."""

    tokens: NDArray[np.int32]
    counted: NDArray[np.bool_]


MakeTexts = Callable[[Tokenizer, int, int], Texts]
"""Type of functions that return texts. They take a tokenizer, the number of texts, and the number of tokens of each
text.
"""


def generated_texts(tokenizer: Tokenizer, count: int, length: int) -> Texts:
    """Returns texts of the tiny Llama's generator that were not used to train it."""
    documents = (each for each in builtin_documents(tokenizer, HELD_OUT_SEED, held_out=True))
    return _as_texts(itertools.islice((each for each in documents if len(each) >= SHORTEST_DOCUMENT), count), length)


def general_texts(tokenizer: Tokenizer, count: int, length: int) -> Texts:
    """Returns ``count`` texts of the documentation and of Python's standard library.

    Raises CheckpointError if there are fewer texts.
    """
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parsed = [_parts_of_module(path) for path in library]
    pages = [path.read_text(encoding="utf-8") for path in sorted(_DOCS.glob("*.md"))]
    kinds = [pages, [docstring for docstring, _ in parsed], [code for _, code in parsed]]
    share = -(-count // len(kinds))
    chosen = [_spread([text for text in texts if len(text) >= SHORTEST_TEXT], share) for texts in kinds]
    mixed = [text for texts in itertools.zip_longest(*chosen, fillvalue="") for text in texts if text]
    if len(mixed) < count:
        raise CheckpointError(f"{len(mixed)} texts are on this machine; --texts {count} needs more")
    return _as_texts((tokenizer.encode(text[: 8 * length]) for text in mixed[:count]), length)


def calibration_texts(tokenizer: Tokenizer, count: int, length: int) -> Texts:
    """Returns source code from packages of Python's standard library. ``general_texts`` does not use these packages."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [path for package in _CALIBRATION_PACKAGES for path in sorted((library / package).glob("*.py"))]
    texts = [path.read_text(encoding="utf-8") for path in files if path.stat().st_size >= 8 * length]
    return _as_texts((tokenizer.encode(text[: 8 * length]) for text in _spread(texts, count)), length)


SOURCES: dict[str, MakeTexts] = {"general": general_texts, "generated": generated_texts}
"""The function that returns the texts, for each value of the tool's option ``--source``."""


def _parts_of_module(path: Path) -> tuple[str, str]:
    """Returns the docstring of a Python module, and its code from the first function or class on."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    definitions = (node.lineno for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef)))
    first = next(definitions, None)
    code = "" if first is None else "\n".join(source.splitlines()[first - 1 :])
    return ast.get_docstring(tree) or "", code


def _spread(texts: Sequence[str], count: int) -> list[str]:
    """Returns ``count`` evenly spaced elements of ``texts``, or all texts if there are fewer."""
    if len(texts) <= count:
        return list(texts)
    return [texts[index * len(texts) // count] for index in range(count)]


def _as_texts(documents: Iterator[list[int]], length: int) -> Texts:
    """Cuts or pads each document to ``length`` tokens."""
    chosen = list(documents)
    tokens, counted = np.zeros((len(chosen), length), np.int32), np.zeros((len(chosen), length), np.bool_)
    for row, ids in enumerate(chosen):
        size = min(len(ids), length)
        tokens[row, :size] = ids[:size]
        counted[row, : size - 1] = True
    return Texts(tokens, counted)
