"""The golden file of a LoRA adapter, which the library PEFT computed (``tools/make_lora_golden.py``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "lora.json"


def lora_golden() -> dict[str, Any]:
    """Returns the content of the golden file."""
    document: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return document
