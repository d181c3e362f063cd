"""Lists the configs whose graphs are checked, and variants of them. A variant is a config with other settings.

To add a variant, add a row to ``VARIANTS``, and write its listings with ``check_ascend_graph.py NAME --write``.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from llm_serving.formats.strict_yaml import read_yaml_mapping

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


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


def deployments() -> list[str]:
    """Returns the file names of all configs in ``configs/`` that describe a deployment, without MindFormers' models.

    The graphs of MindFormers' models belong to that package. MindFormers YAML files have no section ``model_config``.
    """
    found = []
    for path in sorted(CONFIGS.rglob("*.yaml")):
        section = read_yaml_mapping(path).get("model_config")
        if isinstance(section, dict) and section.get("model_type") != "mindformers":
            found.append(path.name)
    return found


def variant_of(name: str) -> Variant:
    """Returns the config and the settings of a variant. A config's name gives this config without settings."""
    return VARIANTS.get(name, Variant(name, ()))
