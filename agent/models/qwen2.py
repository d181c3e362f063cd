"""Qwen2 and Qwen2.5 (Yang et al. 2024): a Llama with biases on q, k and v; long-context versions stretch rotary by YaRN
and may have a sliding window in their upper layers."""

from __future__ import annotations

from agent.models.llama import build, ignorable_suffixes, weight_specs

__all__ = ["build", "ignorable_suffixes", "weight_specs"]
