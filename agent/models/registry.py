"""Which class serves which ``architectures`` entry of a ``config.json``. A model's code is imported when it is used."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

from agent.backends.base import OpTable
from agent.weights import WeightSpec
from llm_serving.config import Config
from llm_serving.errors import AgentStartError
from llm_serving.model.shape import ModelShape

_MODULES = {
    "LlamaForCausalLM": "agent.models.llama",
    "MistralForCausalLM": "agent.models.mistral",
    "MixtralForCausalLM": "agent.models.mixtral",
    "Qwen2ForCausalLM": "agent.models.qwen2",
    "Qwen3ForCausalLM": "agent.models.qwen3",
    "Qwen3MoeForCausalLM": "agent.models.qwen3_moe",
}
"""The same as ``llm_serving.model.families.FAMILIES``, whose sizes the server knows; a test compares them."""

_MINDFORMERS = "agent.mindformers.model"


class ModelDefinition(Protocol):
    """What a model's module offers."""

    def weight_specs(self, shape: ModelShape) -> Sequence[WeightSpec]:
        """Every parameter to load, in the order of the layers."""

    def ignorable_suffixes(self, shape: ModelShape) -> tuple[str, ...]:
        """Ends of names that a checkpoint may hold and the model does not need."""

    def build(self, config: Config, ops: OpTable) -> Any:
        """The Cell, its parameters without memory yet."""


def find_model(architecture: str, model_type: str = "dyn") -> ModelDefinition:
    """The module of a model: ours, or MindFormers' where ``model_type`` says so. Raises AgentStartError for an
    architecture that is not served."""
    if architecture not in _MODULES:
        raise AgentStartError(f"no model for architecture {architecture!r}; there are: {', '.join(_MODULES)}")
    module: Any = import_module(_MINDFORMERS if model_type == "mindformers" else _MODULES[architecture])
    definition: ModelDefinition = module
    return definition
