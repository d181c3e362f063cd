"""The configuration of a deployment. ``load_config`` reads a YAML file and returns a ``Config``, a frozen dataclass."""

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
