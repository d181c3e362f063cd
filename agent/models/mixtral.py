"""Mixtral (Jiang et al. 2024): Mistral with experts in place of every layer's MLP, which its checkpoints call otherwise
than others do: w1 is the gate, w3 what it is multiplied with, w2 leads back."""

from __future__ import annotations

from agent.models import names
from agent.models.llama import build, ignorable_suffixes
from agent.weights import WeightSpec
from llm_serving.model.shape import ModelShape

__all__ = ["build", "ignorable_suffixes", "weight_specs"]

_EXPERTS = names.ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")


def weight_specs(shape: ModelShape) -> list[WeightSpec]:
    """Every parameter to load, in the order of the layers."""
    return names.weight_specs(shape, _EXPERTS)
