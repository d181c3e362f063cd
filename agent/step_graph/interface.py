"""What the runner knows of a graph, whatever its kind: here belongs what both kinds promise."""

from __future__ import annotations

from abc import ABC, abstractmethod

from agent.step_graph.logits import StepLogits
from agent.step_inputs import StepInputs
from agent.weights.storage import Array


class OperatorRefusedError(RuntimeError):
    """An operator refused its inputs; the graph is as good as before."""


class StepGraph(ABC):
    """Compiles what the op table needs and runs steps."""

    @abstractmethod
    def compile(self) -> None:
        """Compile, and run once."""

    @abstractmethod
    def run(self, inputs: StepInputs, entry: Array) -> StepLogits:
        """Run a step of the last stage. ``entry`` are the token ids [T] of ``inputs``, resolved, or in a later stage
        than the first the stream [T, hidden_size] of the one before.

        Raises RuntimeError when an operator refuses its inputs.
        """

    @abstractmethod
    def run_stage(self, inputs: StepInputs, entry: Array) -> Array:
        """The same of an earlier stage: the stream [T, hidden_size] for the next one, valid until the next run."""
