"""Writes the model as a Hugging Face folder: bfloat16 weights, config, and a picture of the losses."""

import json
import os
from pathlib import Path

import matplotlib
import numpy as np
import sentencepiece as spm

from .model import ModelShape, TinyLlama
from .tokenizer import merge_rules
from .trainer import History

matplotlib.use("Agg")
from matplotlib import pyplot
from numpy.typing import NDArray

from agent.weights.storage import from_float32
from performance.models.folders import write_safetensors

TEMPLATES = Path(__file__).parent / "templates"


def weights(network: TinyLlama) -> dict[str, NDArray[np.float32]]:
    """Returns the network's float32 parameters by their Hugging Face names."""
    return {name: parameter.asnumpy() for name, parameter in network.parameters_and_names()}


def save_weights(tensors: dict[str, NDArray[np.float32]], path: Path) -> None:
    """Writes ``tensors`` as bfloat16. Writes to a temporary file and renames it, so that no partial file is visible."""
    temporary = path.with_suffix(".partial")
    write_safetensors(temporary, {name: from_float32(values, "bfloat16") for name, values in tensors.items()})
    os.replace(temporary, path)


def save_fixed_files(shape: ModelShape, tokenizer_model: bytes, folder: Path) -> None:
    """Writes all files that do not depend on the training: the tokenizer and the configs, from ``templates/``.

    ``tokenizer.json`` gives the same ids as the sentencepiece model.
    """
    tokenizer = spm.SentencePieceProcessor(model_proto=tokenizer_model)
    contents = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in TEMPLATES.glob("*.json")}
    contents["config.json"] |= {
        "head_dim": shape.head_dim,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "vocab_size": shape.vocab_size,
    }
    contents["generation_config.json"]["max_length"] = shape.max_position_embeddings
    contents["tokenizer_config.json"]["model_max_length"] = shape.max_position_embeddings
    contents["tokenizer.json"]["model"] |= {
        "vocab": {tokenizer.IdToPiece(i): i for i in range(tokenizer.GetPieceSize())},
        "merges": merge_rules(tokenizer),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(tokenizer_model)
    for name, content in contents.items():
        text = json.dumps(content, ensure_ascii=False, indent=1 if "token" in name else 2)
        (folder / name).write_text(text + "\n", encoding="utf-8")


def save_curve(history: History, path: Path) -> None:
    """Draws the training loss and the held-out loss over the steps."""
    figure, axes = pyplot.subplots(figsize=(6, 3.6), dpi=90)
    for name, points in (("train", history.train), ("held-out", history.held_out)):
        axes.plot(*zip(*points, strict=True), label=f"{name} (last: {points[-1][1]:.3f})")
    axes.set(xlabel="step", ylabel="loss, nats per token", yscale="log", title="Tiny Llama")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
