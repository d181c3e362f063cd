"""Finds the module with the network of a model, by ``architectures`` of its ``config.json``.

The network in ``agent/models/llama.py`` serves all families of ``llm_serving/model/families.py``. A family with another
network needs a module with the functions of ``ModelDefinition``. ``find_model`` must then return this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

from agent.backends.base import OpTable
from agent.weights import WeightSpec
from llm_serving.config import Config
from llm_serving.errors import AgentStartError
from llm_serving.model.families import FAMILIES
from llm_serving.model.shape import ModelShape


class ModelDefinition(Protocol):
    """The functions that a module with a network must have."""

    def weight_specs(self, shape: ModelShape) -> Sequence[WeightSpec]:
        """Returns every parameter to load, in the order of the layers."""

    def ignorable_suffixes(self, shape: ModelShape) -> tuple[str, ...]:
        """Returns the endings of the names of tensors in a checkpoint that the model does not need."""

    def build(self, config: Config, ops: OpTable) -> Any:
        """Builds the network as a MindSpore Cell. Its parameters have no memory yet."""


def find_model(architecture: str, model_type: str = "dyn") -> ModelDefinition:
    """Returns the module with the network: this project's, or MindFormers' if ``model_type`` is ``mindformers``.

    Imports mindspore. Raises AgentStartError if the architecture is not supported.
    """
    if architecture not in FAMILIES:
        raise AgentStartError(f"no model for architecture {architecture!r}; there are: {', '.join(FAMILIES)}")
    name = "agent.mindformers.model" if model_type == "mindformers" else "agent.models.llama"
    module: Any = import_module(name)
    definition: ModelDefinition = module
    return definition
