"""Describes how to make Hugging Face's tensors if a GGUF file stores them in another form (DeepSeek, Qwen's hybrids).

Source: the converters of https://github.com/ggml-org/llama.cpp (``conversion/deepseek.py``, ``conversion/qwen.py``).

- DeepSeek: newer files have two tensors instead of ``kv_b_proj``. ``attn_k_b`` is [heads, rank, key] and ``attn_v_b``
  is [heads, value, rank].
- Qwen3-Next: ``attn_qkv`` and ``attn_gate`` have the rows of ``in_proj_qkvz``. All queries come first, then all keys,
  values and output gates. Hugging Face groups the rows by key head.
- Qwen3.5: value heads have another order. The file first has value head 0 of every key head, then value head 1 of every
  key head, and so on. Hugging Face has all value heads of key head 0 first.
- All hybrids store -exp(A_log) instead of A_log.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from agent.weights.quantized import QuantizedTensor
from llm_serving.errors import CheckpointError
from llm_serving.gguf.header import Header
from llm_serving.gguf.hybrid import HYBRIDS, TILED, delta_sizes
from llm_serving.model.gated_delta import GatedDelta
from llm_serving.model.quantization import GGUF_GROUP

Floats = npt.NDArray[np.float32]
Order = npt.NDArray[np.intp]
_LAYER = re.compile(r"model\.layers\.(\d{1,5})\.(self_attn|linear_attn)\.([\w.]+)\Z")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Describes how to make a tensor of a Hugging Face folder from the tensors ``names`` of a GGUF file.

    If ``combine`` is None, the rows of the file's tensors are concatenated, then reordered by ``rows`` and ``columns``.
    Otherwise the function ``combine`` makes the tensor from the floats of the file's tensors.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    """The shapes that the tensors of the file must have. Leading dimensions of size 1 are ignored."""
    rows: Order | None = None
    """For each row of the made tensor, its index in the concatenated rows of the file. None: the file's order."""
    columns: Order | None = None
    """For each column of the made tensor, its index in the file. None: the file's order."""
    combine: Callable[[Sequence[Floats]], Floats] | None = None

    def of_floats(self, tensors: Sequence[Floats]) -> Floats:
        """Makes the tensor from the floats of the file's tensors, which have the shapes ``shapes``."""
        if self.combine is not None:
            return self.combine(tensors)
        joined = np.concatenate(tensors)
        joined = joined if self.rows is None else joined[self.rows]
        return joined if self.columns is None else joined[:, self.columns]

    def of_integers(self, tensors: Sequence[QuantizedTensor]) -> QuantizedTensor:
        """Makes the tensor from the integers of the file's tensors, which all have the same scheme.

        Raises CheckpointError if the new order of the columns would separate columns that share a scale.
        """
        values = np.concatenate([each.values for each in tensors])
        scales = np.concatenate([each.scales for each in tensors])
        if self.rows is not None:
            values, scales = values[self.rows], scales[self.rows]
        if self.columns is not None:
            groups = self.columns.reshape(-1, GGUF_GROUP)
            if (groups != groups[:, :1] + np.arange(GGUF_GROUP)).any() or (groups[:, 0] % GGUF_GROUP).any():
                raise CheckpointError(
                    f"the size of a value head is not a multiple of {GGUF_GROUP}; use model_config.weight_format bf16"
                )
            values, scales = values[:, self.columns], scales[:, groups[:, 0] // GGUF_GROUP]
        return QuantizedTensor(tensors[0].scheme, np.ascontiguousarray(values), np.ascontiguousarray(scales))


def recipe_of(header: Header, name: str) -> Recipe | None:
    """Returns the recipe of the tensor with this Hugging Face name, or None if the file stores it in the same form.

    Raises CheckpointError if a size in the metadata is missing or wrong.
    """
    found = _LAYER.match(name)
    if found is None:
        return None
    block, kind = f"blk.{int(found[1])}", f"{found[2]}.{found[3]}"
    if header.architecture == "deepseek2":
        is_split = kind == "self_attn.kv_b_proj.weight" and f"{block}.attn_kv_b.weight" not in header.tensors
        return _split_key_values(header, block) if is_split else None
    if header.architecture in HYBRIDS and found[2] == "linear_attn":
        return _delta_recipe(header, block, found[3])
    return None


def _split_key_values(header: Header, block: str) -> Recipe:
    """Returns the recipe of ``kv_b_proj``: for each head, the rows of its key, followed by the rows of its value."""
    heads = _integer(header, "attention.head_count")
    rank, value = _integer(header, "attention.kv_lora_rank"), _integer(header, "attention.value_length_mla")
    key = _integer(header, "attention.key_length_mla") - _integer(header, "rope.dimension_count")

    def combine(tensors: Sequence[Floats]) -> Floats:
        keys, values = tensors
        joined: Floats = np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, rank)
        return joined

    names = (f"{block}.attn_k_b.weight", f"{block}.attn_v_b.weight")
    return Recipe(names, ((heads, rank, key), (heads, value, rank)), combine=combine)


def _delta_recipe(header: Header, block: str, kind: str) -> Recipe | None:
    """Returns the recipe of a tensor of Gated DeltaNet, or None if the file stores it in the same form.

    ``kind`` is the end of the tensor's Hugging Face name, and ``block`` the beginning of the layer's names in the file.
    """
    sizes, hidden = delta_sizes(header), _integer(header, "embedding_length")
    heads, values, all_channels = sizes.value_heads, sizes.values, sizes.channels
    is_tiled = header.architecture in TILED
    by_head = _tiled(sizes, 1) if is_tiled else None
    by_row = _tiled(sizes, sizes.value_dim) if is_tiled else None
    channels = None if by_row is None else _after(2 * sizes.keys, by_row)
    if kind == "in_proj_qkvz.weight" and f"{block}.ssm_in.weight" not in header.tensors:
        names = (f"{block}.attn_qkv.weight", f"{block}.attn_gate.weight")
        return Recipe(names, ((all_channels, hidden), (values, hidden)), _grouped(sizes))
    usual: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
        "A_log": ("ssm_a", (heads,), {"combine": _log_rates(header, by_head)}),
        "dt_bias": ("ssm_dt.bias", (heads,), {"rows": by_head}),
        "conv1d.weight": ("ssm_conv1d.weight", (all_channels, sizes.taps), {"rows": channels}),
        "in_proj_qkv.weight": ("attn_qkv.weight", (all_channels, hidden), {"rows": channels}),
        "in_proj_z.weight": ("attn_gate.weight", (values, hidden), {"rows": by_row}),
        "in_proj_b.weight": ("ssm_beta.weight", (heads, hidden), {"rows": by_head}),
        "in_proj_a.weight": ("ssm_alpha.weight", (heads, hidden), {"rows": by_head}),
        "out_proj.weight": ("ssm_out.weight", (hidden, values), {"columns": by_row}),
    }
    if kind not in usual:
        return None
    name, shape, order = usual[kind]
    return Recipe((f"{block}.{name}",), (shape,), **order)


def _log_rates(header: Header, order: Order | None) -> Callable[[Sequence[Floats]], Floats]:
    def combine(tensors: Sequence[Floats]) -> Floats:
        (rates,) = tensors
        if not (rates < 0).all():
            raise CheckpointError("the values must be negative, because they are decay rates")
        logarithms = np.log(-rates.astype(np.float64)).astype(np.float32)
        return logarithms if order is None else logarithms[order]

    return combine


def _tiled(sizes: GatedDelta, rows: int) -> Order:
    """Returns, for each row of the value heads in Hugging Face's order, the index of this row in the file.

    A value head has ``rows`` rows. In the file, value head i of key head k is value head i * ``key_heads`` + k.
    """
    stored = np.arange(sizes.value_heads * rows).reshape(-1, sizes.key_heads, rows)
    return stored.swapaxes(0, 1).reshape(-1)


def _after(first: int, order: Order) -> Order:
    """Returns an order in which the first ``first`` rows keep their places, and ``order`` applies to the other rows."""
    return np.concatenate([np.arange(first), first + order])


def _grouped(sizes: GatedDelta) -> Order:
    """Returns, for each row of ``in_proj_qkvz``, its index in the file. The rows of ``in_proj_qkvz`` are grouped by key
    head.
    """
    groups, first = [], 0
    for rows in (sizes.keys, sizes.keys, sizes.values, sizes.values):
        groups.append(np.arange(first, first + rows).reshape(sizes.key_heads, -1))
        first += rows
    order: Order = np.concatenate(groups, axis=1).reshape(-1)
    return order


def _integer(header: Header, key: str) -> int:
    value = header.metadata.get(f"{header.architecture}.{key}")
    if not isinstance(value, int) or not 1 <= value < 1 << 20:
        raise CheckpointError(f"{header.path}: {header.architecture}.{key} = {value!r}: must be a positive number")
    return value
