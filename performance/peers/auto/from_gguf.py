"""Converts a GGUF file for other engines. The program runs in the Python of OpenVINO's environment, which has
transformers.

    python from_gguf.py FILE.gguf FOLDER

writes FOLDER/bfloat16 (a Hugging Face folder) and FOLDER/w8a8 (int8 weights in the format of compressed-tensors).
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from w8a8 import INT8_LIMIT, w8a8_config


def main(file: Path, folder: Path) -> None:
    plain, quantised = folder / "bfloat16", folder / "w8a8"
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.bfloat16)
    model.config.tie_word_embeddings = False  # compressed-tensors needs a matrix for lm_head
    model.lm_head.weight = torch.nn.Parameter(model.get_input_embeddings().weight.detach().clone())
    model.save_pretrained(plain, max_shard_size="100GB")
    AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(plain)
    write_w8a8(plain, quantised)


def write_w8a8(plain: Path, quantised: Path) -> None:
    """Copies a model folder and quantises the matrices of the decoder layers to int8, with one scale for each row."""
    shutil.copytree(plain, quantised, dirs_exist_ok=True)
    tensors = {}
    for name, value in load_file(plain / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = value
            continue
        scale = value.float().abs().amax(dim=1, keepdim=True) / INT8_LIMIT
        tensors[name] = torch.round(value.float() / scale).to(torch.int8)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, quantised / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = w8a8_config()
    (quantised / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
