"""Weights of a model: where they come from, how they are checked and converted. Imports no mindspore."""

from agent.weights.layout import WeightPart, WeightSpec
from agent.weights.loader import WeightSource, load_weights, open_weights

__all__ = ["WeightPart", "WeightSource", "WeightSpec", "load_weights", "open_weights"]
