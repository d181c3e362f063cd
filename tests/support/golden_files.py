"""Reads the golden files, which have the oracle's results for the seeded models.

The oracle is Hugging Face transformers in float32; see ``tools/make_golden.py``.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

LLAMAS = Path(__file__).resolve().parents[1] / "golden"
FAMILIES = LLAMAS / "families"


@cache
def golden_of(model: str) -> dict[str, Any]:
    """Returns the content of the golden file of this model.

    The file is in the folder of golden files for Llama models, or in the folder for all other model families.
    """
    path = LLAMAS / f"{model}.json"
    path = path if path.is_file() else FAMILIES / f"{model}.json"
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document
