"""Translates Hugging Face's names of tensors into llama.cpp's, with the table of the ``gguf`` library."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from agent.weights.gguf.recipes import Recipe, recipe_of
from agent.weights.layout import WeightPart
from llm_serving.errors import CheckpointError
from llm_serving.gguf.header import Header, TensorEntry
from llm_serving.gguf.hybrid import HYBRIDS, num_model_layers
from llm_serving.gguf.model_config import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, check_architecture
from llm_serving.model.shape import MAX_LAYERS

OUTPUT = "output.weight"
IGNORED = frozenset((ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS))
"""Tensors with factors of rotary scaling. They are not read, because this project takes the factors from the
configuration.
"""
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_SINKS = ".sinks"
"""The last part of Hugging Face's name of attention sinks. In a GGUF file, their name ends in ``.weight``."""
_CORRECTION = ".e_score_correction_bias"
"""The last part of Hugging Face's name of the correction of DeepSeek's router."""
_HALVES = ("ffn_gate_exps.weight", "ffn_up_exps.weight")
_BOTH_HALVES = "ffn_gate_up_exps.weight"
"""Last parts of tensor names. A file has the gate weights and the up weights of all experts of a layer either in the
two tensors ``_HALVES``, or in one tensor, ``_BOTH_HALVES``.
"""
_JOINED = (
    ("attn_q", "attn_q_a", "attn_k", "attn_v", "attn_kv_a_mqa"),
    ("attn_qkv", "attn_gate", "ssm_in", "ssm_ba", "ssm_beta", "ssm_alpha"),
    ("ffn_gate", "ffn_up"),
    ("ffn_gate_exps", "ffn_up_exps"),
    ("ffn_gate_shexp", "ffn_up_shexp"),
)
"""Each entry lists tensors of a layer that this project joins to one weight. A layer has only some of them."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a Hugging Face tensor in a GGUF file. ``name`` is the name of the file's tensor."""

    name: str
    expert: int | None = None
    """Index of the expert, if the file's tensor holds the weights of all experts. Otherwise None."""
    recipe: Recipe | None = None
    """Describes how to make the Hugging Face tensor from tensors of the file.

    None if the file's tensor ``name`` has the values of the Hugging Face tensor. ``GGUFFile`` then undoes at most two
    changes by llama.cpp. They are the order of query and key rows, and the 1 that is added to weights of norms."""
    half: int | None = None
    """0 for the gate and 1 for the up, if the file's tensor has both for each expert. Otherwise None."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the file's tensors."""
        return (self.name,) if self.recipe is None else self.recipe.names


def name_table(header: Header) -> Callable[[str], Place]:
    """Returns a function that maps the Hugging Face name of a tensor to its ``Place`` in the file.

    If the function does not know the name, the ``Place`` has the Hugging Face name. Raises CheckpointError if the
    architecture of the model is not supported.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    check_architecture(header)
    architectures = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    table = get_tensor_name_map(architectures[header.architecture], min(_num_blocks(header), MAX_LAYERS))

    @cache
    def place(name: str) -> Place:
        recipe = recipe_of(header, name)
        if recipe is not None:
            return Place(name, recipe=recipe)
        if name.endswith(_CORRECTION):
            name = name.removesuffix(_CORRECTION) + ".e_score_correction.bias"
        found = _EXPERT.search(name)
        whole = table.get_name(_EXPERT.sub(".experts.", name), try_suffixes=(".weight", ".bias"))
        if whole is not None and name.endswith(_SINKS):
            whole += ".weight"
        expert = None if found is None else int(found[1])
        if whole is not None and whole not in header.tensors and whole.endswith(_HALVES):
            block, _, kind = whole.partition(".ffn")
            both = f"{block}.{_BOTH_HALVES}"
            if both in header.tensors:
                return Place(both, expert, half=_HALVES.index(f"ffn{kind}"))
        return Place(whole or name, expert)

    return place


def _num_blocks(header: Header) -> int:
    """Returns the number of layers for which the file has tensors."""
    numbers = (re.match(r"blk\.(\d{1,5})\.", name) for name in header.tensors)
    return max((int(number[1]) + 1 for number in numbers if number is not None), default=0)


def joined_with(name: str) -> tuple[str, ...]:
    """Returns the names of the file's tensors that this project joins to one weight, such as q, k and v.

    The result contains ``name``. If this project does not join the tensor ``name``, returns only ``name``.
    """
    block, _, kind = name.removesuffix(".weight").rpartition(".")
    for group in _JOINED:
        if kind in group:
            return tuple(f"{block}.{each}.weight" for each in group)
    return (name,)


def adds_one(header: Header, entry: TensorEntry) -> bool:
    """Returns True if each value of a tensor in the file is 1 larger than the value in Hugging Face's folder.

    This applies to the norms of Gemma and of hybrids, except the norm of linear attention (``ssm_norm``).
    """
    is_norm = entry.name.endswith("norm.weight") and not entry.name.endswith("ssm_norm.weight")
    return is_norm and header.architecture in ("gemma3", *HYBRIDS)


def predicts_further(header: Header, name: str) -> bool:
    """Returns True if a tensor belongs to a layer for multi-token prediction (MTP). These layers are not loaded."""
    layers, found = num_model_layers(header), re.match(r"blk\.(\d{1,5})\.", name)
    return header.architecture in HYBRIDS and layers is not None and found is not None and int(found[1]) >= layers


def row_heads(header: Header, part: WeightPart) -> int | None:
    """Returns the number of heads of a weight if its rows are in llama.cpp's order, or None for Hugging Face's order.

    llama.cpp rotates pairs of neighbouring elements of queries and keys. Hugging Face rotates pairs of elements that
    are half a head apart. Therefore llama.cpp's converter permutes the rows of the query and key weights within each
    head, for the architecture ``llama`` only. Raises CheckpointError if the heads do not fit the rows.
    """
    keys = {"q_proj": "llama.attention.head_count", "k_proj": "llama.attention.head_count_kv"}
    kind = part.name.rpartition(".")[0].rpartition(".")[2]
    if header.architecture != "llama" or kind not in keys:
        return None
    heads = header.metadata.get(keys[kind], header.metadata.get("llama.attention.head_count"))
    if not isinstance(heads, int) or heads < 1 or part.shape[0] % (2 * heads):
        raise CheckpointError(f"{header.path}: {keys[kind]} = {heads} does not fit {part.shape[0]} rows")
    return heads
