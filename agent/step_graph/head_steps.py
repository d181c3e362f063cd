"""Runs steps of a head with fused operators. All steps have their inputs and results in the same memory.

Also defines the interface of all graphs of heads. This module does not import MindSpore.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from agent.backends.cpu.ops import FusedCpuOps
from agent.kernels import StepBuffers
from agent.step_graph.fused_steps import next_number
from agent.step_inputs import Int32Array, StepInputs
from agent.weights.storage import Array, allocate
from llm_serving.config import Config
from llm_serving.config.draft_model import EAGLE, Head

_NAMES = {False: "step/states", True: "step/own_states"}
"""The names of the arrays of hidden states in a stored program. The keys are the argument ``own`` of a step."""


class HeadGraph(ABC):
    """Runs the steps of a head."""

    @abstractmethod
    def compile(self) -> None:
        """Compiles the graphs and runs each of them once."""

    @abstractmethod
    def run(self, inputs: StepInputs, states: Array, *, own: bool) -> tuple[Int32Array, Array]:
        """Runs a step. Returns the best guess of each sequence [seqs], and the head's hidden states [tokens, width].

        ``states`` are the model's hidden states [tokens, layers x width]: of three layers for an EAGLE-3 head, of one
        layer for an MTP head. With ``own``, ``states`` are the head's own hidden states [tokens, width]. Both results
        are valid until the next run. bfloat16 is returned as uint16. Raises RuntimeError if an operator refuses its
        inputs.
        """


def state_widths(config: Config, head: Head) -> dict[bool, int]:
    """Returns the width of the hidden states that each graph of a head takes. ``config`` is the config of the head.

    The key is True for the graph that takes the head's own hidden states. An MTP head has no such graph: its own hidden
    states have the size of the model's.
    """
    widths = {False: len(head.layers) * head.hidden_size}
    return widths | {True: config.shape.hidden_size} if head.kind == EAGLE else widths


class HeadStates:
    """The memory from which the graphs of a head read hidden states: an array [most tokens, width] for each graph."""

    def __init__(self, config: Config, head: Head) -> None:
        """``config`` is the config of the head, as ``draft_config`` returns it."""
        dtype, widths = config.model_config.model_dtype, state_widths(config, head)
        self.arrays = {own: allocate((config.max_num_batched_tokens, width), dtype) for own, width in widths.items()}
        """The key is True for the graph that takes the head's own hidden states."""

    @property
    def by_name(self) -> dict[str, Array]:
        """The arrays by the names that stand for them in a stored program."""
        return {_NAMES[own]: array for own, array in self.arrays.items()}


class FusedHeadGraph(HeadGraph):
    """Runs steps of the fused operators over the buffers of the step reader."""

    def __init__(self, ops: FusedCpuOps, buffers: StepBuffers, states: HeadStates) -> None:
        """``buffers`` are the buffers into which the step reader copies the inputs of every step."""
        self._buffers, self._states = buffers, states.arrays
        self._logits, self._best_ids, self._own = ops.logits, ops.best_ids, ops.taps[0]
        self._number = 0

    @abstractmethod
    def _compute(self, results: tuple[Array, ...], num_tokens: int, *, own: bool) -> None:
        """Runs a step of ``num_tokens`` tokens with the inputs in the buffers, and fills the arrays ``results``.

        ``own`` selects the graph that takes the head's own hidden states.
        """

    def run(self, inputs: StepInputs, states: Array, *, own: bool) -> tuple[Int32Array, Array]:
        tokens, seqs = len(states), inputs.query_lens.size
        own = own and True in self._states
        self._states[own][:tokens] = states
        self._number = next_number(self._number)
        self._buffers.counts[3] = self._number
        results = (self._logits[:seqs], self._best_ids[:seqs], self._own[:tokens])
        self._compute(results, tokens, own=own)
        if self._best_ids[-1] != self._number:
            raise RuntimeError(f"the head's output is of step {self._best_ids[-1]}, the graph's of {self._number}")
        return results[1], results[2]
