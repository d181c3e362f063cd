"""Writes model folders with the files of sentence-transformers, and computes their results in float32 with NumPy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from agent.weights.tensor_files import TensorFiles
from performance.models.folders import write_model, write_safetensors
from performance.models.variants import VARIANTS
from support.llama_in_numpy import NumpyLlama

Floats = npt.NDArray[np.float32]

VARIANT = "gqa_tied"
UNTIED_VARIANT = "mha"
DENSE_WIDTH = 48
PROMPTS = {"query": "t7 t8 ", "document": ""}


def write_embedding_folder(
    folder: Path,
    pooling_mode: str,
    *,
    dense: bool = False,
    dimensions: Sequence[int] = (),
    has_prefix: bool = True,
    prompts: bool = False,
) -> Path:
    """Writes a small Llama with ``modules.json``. With ``dense``, a Dense layer follows the pooling.

    Without ``has_prefix``, the folder has a network without an output layer, whose tensors have shorter names.
    """
    write_model(VARIANTS[VARIANT if has_prefix else UNTIED_VARIANT], folder)
    config = json.loads((folder / "config.json").read_text())
    hidden = config["hidden_size"]
    if dimensions:
        (folder / "config.json").write_text(json.dumps({**config, "matryoshka_dimensions": list(dimensions)}))
    kinds = ["Transformer", "Pooling", *(["Dense"] if dense else []), "Normalize"]
    modules = []
    for index, kind in enumerate(kinds):
        path = f"{index}_{kind}" if index else ""
        modules.append(
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        )
        (folder / path).mkdir(exist_ok=True)
    (folder / "modules.json").write_text(json.dumps(modules))
    modes = ("cls_token", "mean_tokens", "max_tokens", "weightedmean_tokens", "lasttoken")
    pooling = {"word_embedding_dimension": hidden} | {f"pooling_mode_{mode}": mode == pooling_mode for mode in modes}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if dense:
        values = {"in_features": hidden, "out_features": DENSE_WIDTH, "bias": True}
        tanh = {"activation_function": "torch.nn.modules.activation.Tanh"}
        (folder / "2_Dense" / "config.json").write_text(json.dumps({**values, **tanh}))
        weight, bias = dense_weights(hidden)
        write_safetensors(folder / "2_Dense" / "model.safetensors", {"linear.weight": weight, "linear.bias": bias})
    if prompts:
        settings = {"prompts": PROMPTS, "default_prompt_name": None, "similarity_fn_name": "cosine"}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    if not has_prefix:
        _remove_prefix(folder)
    return folder


def write_classifier_folder(folder: Path, labels: Sequence[str], **values: object) -> Path:
    """Writes a small classifier: a Llama without output layer, with a row of ``score.weight`` for each label.

    ``values`` are further members of ``config.json``.
    """
    write_model(VARIANTS[UNTIED_VARIANT], folder)
    config = json.loads((folder / "config.json").read_text())
    names = [name.replace("ForCausalLM", "ForSequenceClassification") for name in config["architectures"]]
    classes = {"id2label": {str(index): label for index, label in enumerate(labels)}}
    (folder / "config.json").write_text(json.dumps({**config, "architectures": names, **classes, **values}))
    files = TensorFiles(folder)
    tensors = {name: files.read(name)[0].copy() for name in files.names() if name != "lm_head.weight"}
    files.close()
    tensors["score.weight"] = class_weights(len(labels), config["hidden_size"])
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def class_weights(num_labels: int, hidden: int) -> Floats:
    """Returns the last layer of the classifier."""
    return np.random.default_rng(6).standard_normal((num_labels, hidden)).astype(np.float32)


def dense_weights(hidden: int) -> tuple[Floats, Floats]:
    """Returns the weight and the bias of the Dense layer."""
    random = np.random.default_rng(5)
    weight = (random.standard_normal((DENSE_WIDTH, hidden)) * hidden**-0.5).astype(np.float32)
    return weight, (random.standard_normal(DENSE_WIDTH) * 0.1).astype(np.float32)


def expected_embedding(
    llama: NumpyLlama, tokens: list[int], pooling_mode: str, *, dense: bool = False, dimensions: int | None = None
) -> Floats:
    """Returns the embedding of a text as sentence-transformers computes it, in float32."""
    hidden = llama.hidden(tokens)
    if pooling_mode == "lasttoken":
        pooled = hidden[-1]
    elif pooling_mode == "mean_tokens":
        pooled = hidden.mean(axis=0)
    else:
        weights = np.arange(1, len(tokens) + 1, dtype=np.float32)[:, None]
        pooled = (hidden * weights).sum(axis=0) / weights.sum()
    if dense:
        weight, bias = dense_weights(len(pooled))
        pooled = np.tanh(weight @ pooled + bias)
    pooled = pooled[:dimensions]
    return pooled / np.linalg.norm(pooled)


def _remove_prefix(folder: Path) -> None:
    files = TensorFiles(folder)
    tensors = {name: files.read(name)[0].copy() for name in files.names() if name != "lm_head.weight"}
    files.close()
    write_safetensors(
        folder / "model.safetensors", {name.removeprefix("model."): array for name, array in tensors.items()}
    )
