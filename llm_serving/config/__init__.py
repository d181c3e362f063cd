"""The config: frozen dataclasses from strict YAML. ``load_config`` makes a ``Config``. Imports here are fast."""

from llm_serving.config.config import Config
from llm_serving.config.loader import load_config
from llm_serving.config.mindformers import MindSporeContext
from llm_serving.config.sections import (
    BasicInputsConfig,
    ExtraInputsConfig,
    LogConfig,
    ModelConfig,
    PagedAttentionConfig,
    ParallelConfig,
    SchedulerConfig,
    ServingConfig,
    TokenizerConfig,
    WarmupInputsConfig,
)

__all__ = [
    "BasicInputsConfig",
    "Config",
    "ExtraInputsConfig",
    "LogConfig",
    "MindSporeContext",
    "ModelConfig",
    "PagedAttentionConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "ServingConfig",
    "TokenizerConfig",
    "WarmupInputsConfig",
    "load_config",
]
