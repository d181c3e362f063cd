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
