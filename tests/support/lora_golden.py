"""Reads the golden files of LoRA adapters, which the library PEFT computed (``tools/make_lora_golden.py``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "lora"


def lora_golden(model: str) -> dict[str, Any]:
    """Returns the content of the golden file of the seeded model ``model``."""
    document: dict[str, Any] = json.loads((GOLDEN / f"{model}.json").read_text(encoding="utf-8"))
    return document
