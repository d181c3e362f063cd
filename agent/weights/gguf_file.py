"""Reads a Llama from one GGUF file (llama.cpp's format), next to ``config.json`` and the tokenizer's files.

F32, F16 and BF16 tensors are floats. Q8_0 is int8 and Q4_0 is int4, both with groups of 32. A block has a float16 scale
d and the integers of 32 consecutive inputs of one output. The value is d * q for Q8_0 and d * (q - 8) for Q4_0. Byte i
of Q4_0 has input i in its low four bits and input i + 16 in its high four bits. Embedding and output layer may also be
Q6_K, which llama.cpp chooses for them in a Q4_0 file. They are dequantised to floats.

llama.cpp rotates pairs of neighbouring elements of queries and keys. Hugging Face rotates pairs of elements that are
half a head apart. Therefore llama.cpp's converter permutes the rows of both weights within each head, and this module
restores the order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from agent.weights.cuts import TensorCut, copy_cut
from agent.weights.layout import WeightPart
from agent.weights.quantized import QuantizedTensor, Scheme
from agent.weights.storage import Array, convert_into
from agent.weights.tensor_files import listed
from llm_serving.errors import CheckpointError
from llm_serving.formats.gguf_header import check_gguf_header
from llm_serving.model.number_formats import STORED_FORMATS
from llm_serving.model.quantization import GGUF_GROUP

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SCHEMES = {each.gguf_type: Scheme(each.name, GGUF_GROUP) for each in STORED_FORMATS if each.gguf_type}
_DEQUANTISED = ("Q6_K",)
_SCALE_BYTES = 2
_OUTSIDE_LAYERS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_IN_LAYERS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_IGNORED = ("rope_freqs.weight",)
"""Tensors that are not read: the frequencies of llama3 scaling, which follow from ``config.json``."""


def find_gguf(folder: Path) -> Path | None:
    """Returns the GGUF file of a folder without safetensors. Raises CheckpointError if there are several."""
    files = sorted(folder.glob("*.gguf"))
    if not files or any(folder.glob("*.safetensors")):
        return None
    if len(files) > 1:
        raise CheckpointError(f"{folder}: {listed([file.name for file in files])}; there must be exactly one GGUF file")
    return files[0]


class GGUFFile:
    """A WeightSource for one GGUF file, which it maps. Tensors have their Hugging Face names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors, self._fields = _open(path)
        self._check_architecture()

    def check(self, expected: Sequence[WeightPart], ignorable: Iterable[str] = ()) -> None:
        """Raises CheckpointError unless the file has exactly the ``expected`` tensors with their shapes and known
        types."""
        names = {gguf_name(part.name): part for part in expected}
        missing = [f"{name} ({part.name})" for name, part in names.items() if name not in self._tensors]
        if missing:
            raise CheckpointError(f"{self.path}: {listed(missing)} missing from the weights")
        ignored = {*_IGNORED, *(gguf_name(suffix) for suffix in ignorable if suffix in _OUTSIDE_LAYERS)}
        unexpected = [name for name in self._tensors if name not in names and name not in ignored]
        if unexpected:
            raise CheckpointError(f"{self.path}: {listed(unexpected)} in the weights but not in a model of config.json")
        for name, part in names.items():
            self._check_tensor(name, part)

    def scheme(self, part: WeightPart) -> Scheme | None:
        """Returns how a tensor is quantised, or None if it is read as floats."""
        return _SCHEMES.get(self._type_of(part.name))

    def float_dtype(self, name: str) -> str | None:
        """Returns the type of a tensor that is read as floats."""
        return _FLOATS.get(self._type_of(name), "float32")

    def read_quantised(self, part: WeightPart, cut: TensorCut | None = None) -> QuantizedTensor:
        """Reads a Q8_0 or Q4_0 tensor, or one part of it. Raises CheckpointError if a scale is not finite."""
        if cut is not None:
            return cut.of_quantised(self.read_quantised(WeightPart(part.name, cut.whole)))
        rows, type_name = part.shape[0], self._type_of(part.name)
        scheme, unpack = _SCHEMES[type_name], _UNPACKERS[type_name]
        size = _SCALE_BYTES + GGUF_GROUP * scheme.weights.bits // 8
        blocks = self._data(part.name).reshape(rows, -1, size)[self._row_order(part)]
        scales = np.ascontiguousarray(blocks[:, :, :_SCALE_BYTES]).view("<f2")[:, :, 0].astype(np.float32)
        if not np.isfinite(scales).all():
            raise CheckpointError(f"{self.path}: tensor {gguf_name(part.name)} has a scale that is not finite")
        values = np.empty((rows, blocks.shape[1], GGUF_GROUP), np.uint8)
        unpack(blocks[:, :, _SCALE_BYTES:], values)
        return QuantizedTensor(scheme, values.reshape(rows, -1).view(scheme.weights.storage), scales)

    def read_into(self, name: str, out: Array, dtype: str, cut: TensorCut | None = None) -> None:
        """Copies a tensor, or one part of the tensor, to ``out`` as elements of ``dtype``.

        Raises CheckpointError if a value does not fit ``dtype``.
        """
        part, type_name = WeightPart(name, out.shape if cut is None else cut.whole), self._type_of(name)
        try:
            if type_name in _SCHEMES:
                self.read_quantised(part, cut).dequantise_into(out, dtype)
            else:
                floats, stored = self._floats(name)
                if len(part.shape) == 2:
                    floats = floats.reshape(part.shape)[self._row_order(part)]
                if cut is None:
                    convert_into(floats, stored, out, dtype)
                else:
                    copy_cut(floats, stored, cut, out, dtype)
        except OverflowError as reason:
            raise CheckpointError(
                f"{self.path}: tensor {gguf_name(name)}: {reason}; use model_config.model_dtype bfloat16 or float32"
            ) from reason

    def close(self) -> None:
        """Forgets the tensors. The file stays mapped until the last view of a tensor is deleted."""
        self._tensors = {}

    def _type_of(self, name: str) -> str:
        type_name: str = self._tensors[gguf_name(name)].tensor_type.name
        return type_name

    def _data(self, name: str) -> npt.NDArray[np.uint8]:
        """Returns the stored bytes of a quantised or BF16 tensor."""
        return np.asarray(self._tensors[gguf_name(name)].data).reshape(-1).view(np.uint8)

    def _floats(self, name: str) -> tuple[Array, str]:
        from gguf import dequantize

        tensor, type_name = self._tensors[gguf_name(name)], self._type_of(name)
        if type_name in _DEQUANTISED:
            return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32), "float32"
        data = np.asarray(tensor.data)
        return (data.reshape(-1).view("<u2") if type_name == "BF16" else data), _FLOATS[type_name]

    def _row_order(self, part: WeightPart) -> Any:
        """Returns, for each row of a tensor in Hugging Face's order, its row number in the file."""
        for kind, key in (("q_proj", "llama.attention.head_count"), ("k_proj", "llama.attention.head_count_kv")):
            if part.name.endswith(f"{kind}.weight"):
                heads = self._fields.get(key, self._fields.get("llama.attention.head_count"))
                if not isinstance(heads, int) or heads < 1 or part.shape[0] % (2 * heads):
                    raise CheckpointError(f"{self.path}: {key} = {heads} does not fit {part.shape[0]} rows")
                order = np.arange(part.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2)
                return order.reshape(-1)
        return slice(None)

    def _check_architecture(self) -> None:
        found = self._fields.get("general.architecture")
        if found != "llama":
            raise CheckpointError(f"{self.path}: general.architecture is {found!r}; only llama is supported")

    def _check_tensor(self, name: str, part: WeightPart) -> None:
        tensor, type_name = self._tensors[name], self._tensors[name].tensor_type.name
        may_be_large = part.name in _OUTSIDE_LAYERS
        if type_name not in _FLOATS and type_name not in _SCHEMES and not (may_be_large and type_name in _DEQUANTISED):
            raise CheckpointError(
                f"{self.path}: tensor {name} has type {type_name}; supported are {', '.join((*_FLOATS, *_SCHEMES))} "
                f"(and {' and '.join(_DEQUANTISED)} for the embedding and the output layer)"
            )
        if len(part.shape) == 1 and type_name not in _FLOATS:
            raise CheckpointError(
                f"{self.path}: tensor {name} has type {type_name}; a vector must have one of {', '.join(_FLOATS)}"
            )
        shape = tuple(int(size) for size in reversed(tensor.shape))
        if shape != part.shape:
            raise CheckpointError(
                f"{self.path}: tensor {name} has shape {list(shape)}; config.json requires {list(part.shape)}"
            )


def _unpack_bytes(packed: Array, values: npt.NDArray[np.uint8]) -> None:
    values[:] = packed


def _unpack_halves(packed: Array, values: npt.NDArray[np.uint8]) -> None:
    """Unpacks blocks of Q4_0: byte i has input i in its low four bits and input i + 16 in its high four bits."""
    np.bitwise_and(packed, 15, out=values[:, :, : GGUF_GROUP // 2])
    np.right_shift(packed, 4, out=values[:, :, GGUF_GROUP // 2 :])


_UNPACKERS = {"Q8_0": _unpack_bytes, "Q4_0": _unpack_halves}


def gguf_name(name: str) -> str:
    """Returns llama.cpp's name of a Hugging Face tensor.

    Example: ``blk.0.attn_q.weight`` for ``model.layers.0.self_attn.q_proj.weight``. An unknown name is returned as it
    is.
    """
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    if match and match[2] in _IN_LAYERS:
        return f"blk.{match[1]}.{_IN_LAYERS[match[2]]}.weight"
    return _OUTSIDE_LAYERS.get(name, name)


def _open(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Opens a GGUF file. Returns its tensors by name, and the metadata of a Llama."""
    try:
        from gguf import GGUFReader
    except ImportError as reason:
        raise CheckpointError(
            f"{path}: the package gguf is needed to read GGUF files: pip install gguf==0.19.0"
        ) from reason
    if not path.is_file():
        raise CheckpointError(f"{path}: not a regular file")
    try:
        check_gguf_header(path)
        with np.errstate(over="ignore"):
            reader = GGUFReader(path)
        keys = ("general.architecture", "llama.attention.head_count", "llama.attention.head_count_kv")
        fields = {key: field.contents() for key in keys if (field := reader.get_field(key)) is not None}
    except (ValueError, KeyError, IndexError, OverflowError, TypeError, OSError, MemoryError) as reason:
        raise CheckpointError(f"{path}: not a valid GGUF file, or truncated: {reason}") from reason
    return {tensor.name: tensor for tensor in reader.tensors}, fields
