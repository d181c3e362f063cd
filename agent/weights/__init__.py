"""Reads a model's checkpoint, checks it, and converts the weights to the agent's parameters, without mindspore."""

from agent.weights.forms import LinearForm, LinearForms, linear_forms
from agent.weights.layout import WeightKind, WeightPart, WeightSpec
from agent.weights.loader import load_weights, open_weights
from agent.weights.packed import Packing
from agent.weights.source import WeightSource

__all__ = [
    "LinearForm",
    "LinearForms",
    "Packing",
    "WeightKind",
    "WeightPart",
    "WeightSource",
    "WeightSpec",
    "linear_forms",
    "load_weights",
    "open_weights",
]
