"""The configuration of a deployment. ``load_config`` reads a YAML file and returns a ``Config``, a frozen dataclass."""

from llm_serving.config.config import Config
from llm_serving.config.loader import load_config
from llm_serving.config.model_section import ModelConfig
from llm_serving.config.parallel_section import ParallelConfig

__all__ = ["Config", "ModelConfig", "ParallelConfig", "load_config"]
