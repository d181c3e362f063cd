"""``load_config``: the one way to get a ``Config``."""

from __future__ import annotations

import os
from collections.abc import Sequence

from llm_serving.config.config import Config
from llm_serving.config.convert import build_sections
from llm_serving.config.lookup import find_config_file, has_ascend
from llm_serving.config.overrides import raw_config
from llm_serving.config.resolve import Resolver
from llm_serving.config.validation import check_cache, check_model_name, check_serving
from llm_serving.formats.strict_yaml import read_yaml_mapping


def load_config(path_or_name: str, overrides: Sequence[str] = (), *, ascend: bool | None = None) -> Config:
    """Read, check and resolve a config.

    ``path_or_name`` is a path, or a bare name to find under ``configs/``; each override is ``section.key=value``.
    ``ascend`` says whether the machine has an Ascend; None looks. Raises ConfigError, or CheckpointError about the
    model folder, naming file, key and value.
    """
    file = find_config_file(path_or_name)
    raw = raw_config(file, read_yaml_mapping(file), overrides)
    sections = build_sections(raw)
    check_serving(raw, sections["serving_config"], sections["parallel_config"])
    check_model_name(raw, sections["model_config"].model_name)
    check_cache(raw, sections["pa_config"])
    return Resolver(raw, sections, has_ascend(os.environ) if ascend is None else ascend).config()
