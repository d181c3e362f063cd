"""Qwen3 (Yang et al. 2025): a Llama whose query and key heads go through RMSNorm before they are rotated. A head's
size is its own, not hidden size / heads."""

from __future__ import annotations

from agent.models.llama import build, ignorable_suffixes, weight_specs

__all__ = ["build", "ignorable_suffixes", "weight_specs"]
