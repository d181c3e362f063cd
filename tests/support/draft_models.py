"""Writes draft models for the tiny model: copies with fewer layers. They have the same tokenizer and often choose the
same tokens.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
from safetensors import deserialize

from agent.weights.storage import STORAGE_DTYPES
from performance.models.folders import write_safetensors
from support.small_configs import TINY_LLAMA, write_json

ALL_LAYERS = 5
"""Number of layers of the tiny model."""
DRAFT_METHODS = ("suffix", "draft")


def write_shorter_model(folder: Path, num_layers: int) -> Path:
    """Writes a copy of the tiny model that has only its first layers. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        shutil.copy(TINY_LLAMA / name, folder / name)
    config = json.loads((TINY_LLAMA / "config.json").read_text())
    write_json(folder / "config.json", config | {"num_hidden_layers": num_layers})
    kept = {}
    for name, tensor in deserialize((TINY_LLAMA / "model.safetensors").read_bytes()):
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer is None or int(layer[1]) < num_layers:
            kept[name] = np.frombuffer(tensor["data"], STORAGE_DTYPES["bfloat16"]).reshape(tensor["shape"])
    write_safetensors(folder / "model.safetensors", kept)
    return folder


def draft_settings(folder: Path, num_layers: int) -> list[str]:
    """Returns the settings for a draft model with the first layers of the tiny model, which always makes drafts."""
    model = TINY_LLAMA if num_layers == ALL_LAYERS else write_shorter_model(folder / "draft", num_layers)
    return [
        "speculative_config.method=draft",
        f"speculative_config.model={model}",
        "speculative_config.always=true",
        "speculative_config.max_draft_tokens=4",
    ]


def method_settings(folder: Path, method: str) -> list[str]:
    """Returns the settings for drafts that are made in every step, or for none (``off``)."""
    return draft_settings(folder, 2) if method == "draft" else [f"speculative_config.method={method}"]
