"""Defines the networks of heads for the code that loads models. Imports MindSpore only to build a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agent.backends.base import OpTable
from agent.models.head_names import eagle_specs, mtp_specs
from agent.weights import WeightSpec
from llm_serving.config import Config
from llm_serving.config.draft_model import EAGLE, Head
from llm_serving.model.shape import ModelShape

EMBEDDING = "embedding.weight"
"""Name of the parameter that a head shares with the model. The head does not load this parameter."""


@dataclass(frozen=True, slots=True)
class HeadDefinition:
    """Defines the network of a head. Implements ``agent.models.registry.ModelDefinition``."""

    head: Head
    prefix: str = ""
    layer: str = "midlayer"
    """The prefix of the names of an EAGLE-3 head's tensors, and the name of its layer after this prefix."""

    def weight_specs(self, shape: ModelShape) -> Sequence[WeightSpec]:
        """Returns every parameter to load, in the order of the layers."""
        if self.head.kind == EAGLE:
            return eagle_specs(shape, self.head, self.prefix, self.layer)
        return mtp_specs(shape, self.head)

    def ignorable_suffixes(self, shape: ModelShape) -> tuple[str, ...]:
        """Returns the endings of the names of tensors that the checkpoint may have and the head does not load.

        The checkpoint of an MTP layer also has all tensors of the model. Therefore the result for an MTP layer is the
        ending "", which fits every name.
        """
        if self.head.kind == EAGLE:
            return ("embed_tokens.weight", "rotary_emb.inv_freq", "t2d", "d2t")
        return ("",)

    def build(self, config: Config, ops: OpTable) -> Any:
        """Builds the network as a MindSpore Cell. Its parameters have no memory yet. Imports mindspore."""
        from agent.models.heads import EagleHead, MtpHead

        return (EagleHead if self.head.kind == EAGLE else MtpHead)(config, self.head, ops)
