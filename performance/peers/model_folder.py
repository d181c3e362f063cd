#!/usr/bin/env python3
"""Writes a shape of ``models/shapes`` as a Hugging Face folder with random weights, for peers that load such folders.

python performance/peers/model_folder.py models/shapes/llama_160m /tmp/peers/llama-160m
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agent.weights.seeded import fill_seeded
from agent.weights.storage import allocate
from tools.seeded_model import tensor_shapes, write_safetensors

TOKENIZER = Path(__file__).resolve().parents[2] / "models" / "shapes" / "tokenizer"
DTYPE = "bfloat16"


def write_model_folder(shape: Path, folder: Path, seed: int = 0) -> None:
    """``config.json`` of ``shape``, one bfloat16 safetensors file, the tokenizer of the shapes.

    Matrices are normal with a deviation of depth ** -0.5, which keeps activations of ordinary size; norms are 1.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((shape / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for file in TOKENIZER.iterdir():
        shutil.copyfile(file, folder / file.name)
    tensors = {}
    for name, dimensions in tensor_shapes(config).items():
        tensors[name] = allocate(dimensions, DTYPE)
        if len(dimensions) == 1:
            tensors[name].fill(0x3F80)  # 1.0
        else:
            fill_seeded(name, tensors[name], DTYPE, seed=seed, std=dimensions[1] ** -0.5)
    write_safetensors(folder / "model.safetensors", tensors, DTYPE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", type=Path, help="folder with a config.json")
    parser.add_argument("folder", type=Path, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_model_folder(arguments.shape, arguments.folder, arguments.seed)


if __name__ == "__main__":
    main()
