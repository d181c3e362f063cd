#!/usr/bin/env python3
"""Writes a shape of ``models/shapes`` as a Hugging Face folder with random weights, for peers that load folders.

For example::

    python performance/peers/model_folder.py models/shapes/llama_160m /tmp/peers/llama-160m [--w8a8]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agent.weights.seeded import fill_seeded
from agent.weights.storage import Array, allocate
from performance.models.folders import tensor_shapes, write_safetensors
from performance.peers.w8a8 import INT8_LIMIT, w8a8_config

TOKENIZER = Path(__file__).resolve().parents[2] / "models" / "shapes" / "tokenizer"
BFLOAT16_ONE = 0x3F80


def write_model_folder(shape: Path, folder: Path, *, w8a8: bool = False, seed: int = 0) -> None:
    """Writes ``config.json`` of ``shape``, one safetensors file, and the tokenizer of the shapes.

    Random matrices have a standard deviation of depth ** -0.5, so that activations neither grow nor vanish. Weights of
    norms are 1. With ``w8a8`` the decoder layers' matrices are stored in the format of compressed-tensors, with int8
    weights and dynamic int8 activations.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((shape / "config.json").read_text(encoding="utf-8"))
    tensors: dict[str, Array] = {}
    for name, dimensions in tensor_shapes(config).items():
        values = allocate(dimensions, "bfloat16")
        if len(dimensions) == 1:
            values.fill(BFLOAT16_ONE)
        else:
            fill_seeded(name, values, "bfloat16", seed=seed, std=dimensions[1] ** -0.5)
        if w8a8 and name.endswith("_proj.weight"):
            tensors[name], tensors[f"{name}_scale"] = _quantize(values)
        else:
            tensors[name] = values
    if w8a8:
        config["quantization_config"] = w8a8_config()
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for file in TOKENIZER.iterdir():
        shutil.copyfile(file, folder / file.name)
    write_safetensors(folder / "model.safetensors", tensors)


def _quantize(bits: Array) -> tuple[Array, Array]:
    """Quantises a bfloat16 matrix to int8, symmetrically with one scale per row. Returns integers and scales."""
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    scale = np.abs(values).max(axis=1, keepdims=True) / INT8_LIMIT
    return np.rint(values / scale).astype(np.int8), scale.astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", type=Path, help="folder with a config.json")
    parser.add_argument("folder", type=Path, help="folder to write")
    parser.add_argument("--w8a8", action="store_true", help="int8 weights and activations, compressed-tensors")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_model_folder(arguments.shape, arguments.folder, w8a8=arguments.w8a8, seed=arguments.seed)


if __name__ == "__main__":
    main()
