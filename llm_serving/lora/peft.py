"""Reads a LoRA adapter from the folder that the library PEFT writes, and checks it against the served model.

The arithmetic of an adapted layer is ``y = W x + scale * B (A x)``. ``A`` is [rank, inputs] and ``B`` [outputs, rank].
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llm_serving.errors import AdapterError, CheckpointError
from llm_serving.formats.safetensors_index import TensorInfo, read_index
from llm_serving.lora.peft_config import ALL_LINEAR, PeftConfig, read_peft_config
from llm_serving.lora.targets import Target, largest_adapter, lora_targets
from llm_serving.model.families import LANGUAGE_MODEL
from llm_serving.model.shape import ModelShape

Array = npt.NDArray[Any]

WEIGHTS_FILE = "adapter_model.safetensors"
_HEADER_ROOM = 16 * 1024 * 1024
"""Bytes by which an adapter's file may exceed the size of the largest matrices, because the file also has a header."""
_NAME = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<matrix>[AB])\.weight")
_STORED: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_OTHER_TENSORS = {
    "lora_magnitude_vector": "DoRA is not supported",
    "lora_embedding_": "adapters of the embedding are not supported",
    "lora_A.bias": "biases of adapters are not supported",
    "lora_B.bias": "biases of adapters are not supported",
    "modules_to_save": "whole modules in an adapter are not supported",
}
"""Parts of tensor names that belong to unsupported adapters, each with the reason for the refusal."""


@dataclass(frozen=True, slots=True)
class LoraModule:
    """The adapter of one linear layer. The matrices are rounded to the type of the model's activations."""

    name: str
    """Name of the layer in a checkpoint, without ``.weight``."""
    scale: float
    a: Array
    """Matrix A, [rank, inputs]. The bits of bfloat16 are stored as uint16."""
    b: Array
    """Matrix B, [outputs, rank]."""

    @property
    def rank(self) -> int:
        return int(self.a.shape[0])


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """A LoRA adapter: the adapted layers, in the order of the model."""

    digest: bytes
    """Digest of the settings and of the file with the weights. Adapters with equal digests produce equal keys and
    values.
    """
    modules: tuple[LoraModule, ...]


def read_adapter(folder: Path, shape: ModelShape, *, max_rank: int, dtype: str) -> LoraAdapter:
    """Reads the adapter in a folder.

    ``dtype`` is the type of the model's activations. Raises AdapterError if the adapter does not fit the model, needs
    an unsupported feature, or has a rank above ``max_rank``.
    """
    if not folder.is_dir():
        raise AdapterError(f"{folder} is not a folder on the server's machine.")
    config = read_peft_config(folder)
    targets = lora_targets(shape)
    if config.names_all_layers:
        # Check the ranks before the size of the file. A rank above the limit also makes the file too large, but an
        # error about the rank is more useful.
        for name in targets:
            if config.is_target(name):
                _checked_rank(config, name, max_rank)
    content = _read_file(folder, _HEADER_ROOM + 4 * largest_adapter(shape, max_rank))
    try:
        start, tensors = read_index(folder / WEIGHTS_FILE, content, len(content))
    except CheckpointError as problem:
        raise AdapterError(f"{problem}.") from None
    targets = _as_named(shape, tensors, targets)
    pairs = _pairs(tensors, targets)
    _check_targets(config, pairs, targets)
    reader = _Reader(content, start, config, max_rank, dtype)
    modules = tuple(reader.module(name, target, *pairs[name]) for name, target in targets.items() if name in pairs)
    digest = hashlib.blake2b(len(config.content).to_bytes(8, "little") + config.content, digest_size=32)
    digest.update(content)
    return LoraAdapter(digest.digest(), modules)


def _as_named(shape: ModelShape, tensors: dict[str, TensorInfo], targets: dict[str, Target]) -> dict[str, Target]:
    """Returns ``targets`` by the names that an adapter uses.

    Adapters of Qwen2.5-VL that were trained with transformers before version 4.52 use the names of the checkpoint, and
    not those of the modules in transformers. An adapter of a text model beside an encoder may have been trained on the
    text model, or on the whole model. Then the names are those of the checkpoint, or begin with ``LANGUAGE_MODEL``.
    """
    if shape.vision is not None and not any(shape.vision.text_module in name for name in tensors):
        return {target.name: target for target in targets.values()}
    if shape.encoder_beside is not None:
        stored = shape.encoder_beside.text_prefix
        for prefix in (stored, LANGUAGE_MODEL):
            if any(prefix in name for name in tensors):
                return {prefix + target.name.removeprefix(stored): target for target in targets.values()}
    return targets


def _read_file(folder: Path, max_bytes: int) -> bytes:
    """Returns the bytes of the adapter's weights. Raises AdapterError if they are missing or too large."""
    path = folder / WEIGHTS_FILE
    if not path.exists():
        pickles = sorted(each.name for each in folder.glob("*.bin"))
        found = f" It has {pickles[0]}, a pickle, which could run code; save it as safetensors." if pickles else ""
        raise AdapterError(f"{folder} has no {WEIGHTS_FILE}.{found}")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as reason:
        raise AdapterError(f"{path} cannot be read: {reason.strerror}.") from None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise AdapterError(f"{path} is not a regular file.")
        if status.st_size > max_bytes:
            raise AdapterError(
                f"{path} has {status.st_size} bytes; an adapter of this model with lora_config.max_rank has at most "
                f"{max_bytes}."
            )
        return file.read(max_bytes)


def _pairs(tensors: dict[str, TensorInfo], targets: dict[str, Target]) -> dict[str, tuple[TensorInfo, TensorInfo]]:
    """Returns the tensors A and B of each adapted layer, by the layer's name. Raises AdapterError for other tensors."""
    found: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        for part, reason in _OTHER_TENSORS.items():
            if part in name:
                raise AdapterError(f"{WEIGHTS_FILE} has the tensor {name!r}: {reason}.")
        match = _NAME.fullmatch(name)
        if match is None:
            raise AdapterError(
                f"{WEIGHTS_FILE} has the tensor {name!r}; the names of a PEFT adapter are "
                "base_model.model.LAYER.lora_A.weight and lora_B.weight."
            )
        if match["layer"] not in targets:
            reason = _why_no_target(match["layer"])
            raise AdapterError(f"{WEIGHTS_FILE} has an adapter of {match['layer']!r}: {reason}.")
        found.setdefault(match["layer"], {})[match["matrix"]] = info
    if not found:
        raise AdapterError(f"{WEIGHTS_FILE} has no tensors.")
    for layer, matrices in found.items():
        if len(matrices) != 2:
            raise AdapterError(f"{WEIGHTS_FILE} has only lora_{next(iter(matrices))} of {layer!r}; it is incomplete.")
    return {layer: (matrices["A"], matrices["B"]) for layer, matrices in found.items()}


def _why_no_target(layer: str) -> str:
    if "expert" in layer or "block_sparse_moe" in layer or layer.endswith((".mlp.gate", ".mlp.router")):
        return "adapters of experts and their routers are not supported"
    if "visual." in layer or "vision_model." in layer or "connector." in layer:
        return "adapters of the vision encoder are not supported; train it with target_modules of the text model only"
    if layer.endswith(("lm_head", "embed_tokens")):
        return "adapters of the embedding and of the output layer are not supported"
    return "the served model has no such layer that may have an adapter; was it trained for another model?"


def _check_targets(config: PeftConfig, pairs: dict[str, Any], targets: dict[str, Target]) -> None:
    """Raises AdapterError if the adapted layers differ from the layers that ``target_modules`` names."""
    for name in targets:
        is_wanted = config.is_target(name)
        if name in pairs and not is_wanted:
            raise AdapterError(f"{WEIGHTS_FILE} has an adapter of {name!r}, which target_modules does not name.")
        if is_wanted and name not in pairs and config.names_all_layers and config.targets != ALL_LINEAR:
            raise AdapterError(f"target_modules names {name!r}, but {WEIGHTS_FILE} has no adapter of it.")


def _checked_rank(config: PeftConfig, name: str, max_rank: int) -> int:
    """Returns the rank of the adapter of layer ``name``. Raises AdapterError if it is above ``max_rank``."""
    rank = config.rank_of(name)
    if rank > max_rank:
        raise AdapterError(f"The rank of {name!r} is {rank}; lora_config.max_rank of this server is {max_rank}.")
    return rank


class _Reader:
    """Reads the matrices of an adapter from the bytes of its file."""

    def __init__(self, content: bytes, start: int, config: PeftConfig, max_rank: int, dtype: str) -> None:
        self._content = content
        self._start = start
        self._config = config
        self._max_rank = max_rank
        self._dtype = dtype

    def module(self, name: str, target: Target, a: TensorInfo, b: TensorInfo) -> LoraModule:
        """Returns the adapter of one layer. ``name`` is the name of the layer's module in transformers. Patterns in the
        settings are compared with this name.

        Raises AdapterError for a wrong rank, shape, type or value.
        """
        rank = _checked_rank(self._config, name, self._max_rank)
        for info, shape in ((a, (rank, target.inputs)), (b, (target.outputs, rank))):
            if info.shape != shape:
                raise AdapterError(
                    f"The tensor {info.name!r} has the shape {list(info.shape)}; the model and the rank need "
                    f"{list(shape)}."
                )
        scale = self._config.scale_of(name)
        if not math.isfinite(scale):
            raise AdapterError(f"The scale of {name!r} is {scale}; lora_alpha must be finite.")
        return LoraModule(target.name, scale, self._matrix(a), self._matrix(b))

    def _matrix(self, info: TensorInfo) -> Array:
        if info.dtype not in _STORED:
            raise AdapterError(f"The tensor {info.name!r} has the type {info.dtype}; it must be F32, F16 or BF16.")
        count = math.prod(info.shape)
        stored = np.frombuffer(self._content, _STORED[info.dtype], count, self._start + info.begin)
        values = as_float32(stored) if info.dtype == "BF16" else stored.astype(np.float32)
        if not np.isfinite(values).all():
            raise AdapterError(f"The tensor {info.name!r} has a NaN or an infinity.")
        rounded = rounded_to(values, self._dtype)
        if self._dtype == "float16" and not np.isfinite(rounded).all():
            raise AdapterError(f"The tensor {info.name!r} has a value that is too large for float16.")
        matrix: Array = rounded.reshape(info.shape)
        return matrix


def as_float32(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Converts bfloat16 numbers, given as their bits, to float32."""
    values: npt.NDArray[np.float32] = (bits.astype(np.uint32) << 16).view(np.float32)
    return values


def rounded_to(values: npt.NDArray[np.float32], dtype: str) -> Array:
    """Returns finite values as ``dtype``, rounded to nearest even. The bits of bfloat16 are stored as uint16."""
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        return values.astype(dtype)
