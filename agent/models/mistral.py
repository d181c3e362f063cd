"""Mistral (Jiang et al. 2023): a Llama whose tokens see the last ``sliding_window`` tokens only, where config.json
states one (the first version does; later ones see everything)."""

from __future__ import annotations

from agent.models.llama import build, ignorable_suffixes, weight_specs

__all__ = ["build", "ignorable_suffixes", "weight_specs"]
