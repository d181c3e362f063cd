"""Writes the model as a Hugging Face folder: bfloat16 weights, config, and a picture of the losses."""

import json
import os
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from .model import ModelShape, TinyLlama
from .tokenizer import BOS_ID, EOS_ID, PAD_ID
from .trainer import History

matplotlib.use("Agg")
from matplotlib import pyplot
from numpy.typing import NDArray

from performance.models.folders import write_safetensors


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Converts finite float32 values to the bits of bfloat16 (uint16), rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Converts the bits of bfloat16 to float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def weights(network: TinyLlama) -> dict[str, NDArray[np.float32]]:
    """Returns the float32 parameters by their Hugging Face names."""
    return {name: parameter.asnumpy() for name, parameter in network.parameters_and_names()}


def save_weights(tensors: dict[str, NDArray[np.float32]], path: Path) -> None:
    """Writes ``tensors`` as bfloat16. The file is renamed when it is complete, so that no partial file is visible."""
    temporary = path.with_suffix(".partial")
    write_safetensors(temporary, {name: to_bfloat16(values) for name, values in tensors.items()})
    os.replace(temporary, path)


def model_config(shape: ModelShape) -> dict[str, Any]:
    """Returns the content of ``config.json``."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "pad_token_id": PAD_ID,
        "pretraining_tp": 1,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }


def save_config(shape: ModelShape, folder: Path) -> None:
    """Writes ``config.json`` and ``generation_config.json``."""
    generation = {
        "bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID,
        "do_sample": True, "temperature": 0.7, "top_p": 0.9, "max_length": shape.max_position_embeddings,
    }  # fmt: skip
    for name, content in (("config.json", model_config(shape)), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


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
