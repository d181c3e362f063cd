"""Writes a seeded model twice: as a GGUF file, and as a Hugging Face folder with the values that this file stores."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from performance.models.folders import write_model, write_safetensors
from support.gguf_models import WIDE_FAMILIES, write_gguf_model


def write_pair(family: str, kind: str, scratch: Path) -> tuple[Path, Path]:
    """Writes the model ``family`` of ``WIDE_FAMILIES`` with matrices of a GGUF type. Returns folder and file."""
    folder, file = scratch / f"{family}-{kind}", scratch / f"{family}-{kind}.gguf"
    write_model(WIDE_FAMILIES[family], folder)
    stored = write_gguf_model(folder, file, kind)
    (folder / "model.safetensors").unlink()
    is_stacked = WIDE_FAMILIES[family].config["model_type"] == "gpt_oss"
    write_safetensors(folder / "model.safetensors", (_stacked_experts if is_stacked else _separate_experts)(stored))
    return folder, file


def remove_pair(folder: Path, file: Path) -> None:
    """Removes the folder and the file of ``write_pair``."""
    shutil.rmtree(folder)
    file.unlink()


def _stacked_experts(stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the tensors with gate and up in alternate outputs of one tensor, as gpt-oss's folders have them."""
    tensors = {name: values for name, values in stored.items() if ".experts." not in name}
    for name, values in stored.items():
        stem, _, end = name.rpartition(".")
        suffix = "_bias" if end == "bias" else ""
        if name.endswith(f"gate_proj.{end}"):
            both = np.stack([values, stored[f"{stem.removesuffix('gate_proj')}up_proj.{end}"]], 2)
            tensors[f"{stem.removesuffix('gate_proj')}gate_up_proj{suffix}"] = _inputs_first(
                both.reshape(len(values), -1, *values.shape[2:])
            )
        elif ".experts.down_proj" in name:
            tensors[stem + suffix] = _inputs_first(values)
    return {name: np.ascontiguousarray(values, np.float32) for name, values in tensors.items()}


def _inputs_first(values: np.ndarray) -> np.ndarray:
    """Returns matrices [experts, out, in] as [experts, in, out]. Biases [experts, out] stay."""
    return values.swapaxes(1, 2) if values.ndim == 3 else values


def _separate_experts(stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the tensors with one entry for each expert, as Hugging Face's folders have them."""
    tensors: dict[str, np.ndarray] = {}
    for name, values in stored.items():
        if ".experts." in name:
            pairs = ((name.replace(".experts.", f".experts.{index}."), each) for index, each in enumerate(values))
            tensors |= {each: np.ascontiguousarray(part, np.float32) for each, part in pairs}
        else:
            tensors[name] = np.ascontiguousarray(values, np.float32)
    return tensors
