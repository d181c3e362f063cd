"""Qwen3's mixtures of experts (Yang et al. 2025): Qwen3 with an expert MLP (``agent.layers.experts``) in all layers but
those that config.json names."""

from __future__ import annotations

from agent.models.llama import build, ignorable_suffixes, weight_specs

__all__ = ["build", "ignorable_suffixes", "weight_specs"]
