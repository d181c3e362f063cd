"""Lists variants of configs whose graphs are also checked. A variant is a config with some changed settings.

To add a variant, add a row to ``VARIANTS``, and write its listings with ``check_ascend_graph.py NAME --write``.
"""

from __future__ import annotations

from typing import NamedTuple


class Variant(NamedTuple):
    """A config, and settings that change its graphs. A setting has the form ``section.key=value``."""

    config: str
    settings: tuple[str, ...]


_ADAPTERS = ("lora_config.max_adapters=4", "lora_config.max_rank=16")

VARIANTS = {
    "llama_tiny_cpu+adapters": Variant("llama_tiny_cpu.yaml", _ADAPTERS),
    "llama_tiny_cpu+int8_cache": Variant("llama_tiny_cpu.yaml", ("model_config.kv_format=int8",)),
    "llama_160m_tp2_cpu+adapters": Variant("llama_160m_tp2_cpu.yaml", _ADAPTERS),
    "llama_7b_kbk_pa_dyn+adapters": Variant("llama_7b_kbk_pa_dyn.yaml", _ADAPTERS),
    "llama_7b_kbk_pa_dyn+int8_cache": Variant("llama_7b_kbk_pa_dyn.yaml", ("model_config.kv_format=int8",)),
    "llama_70b_int8_tp8_kbk_pa_dyn+adapters": Variant("llama_70b_int8_tp8_kbk_pa_dyn.yaml", _ADAPTERS),
    "qwen3_30b_a3b_int8_kbk_pa_dyn+adapters": Variant("qwen3_30b_a3b_int8_kbk_pa_dyn.yaml", _ADAPTERS),
}
"""Variants by name. A name consists of the config's name, ``+`` and the name of the changed feature."""
