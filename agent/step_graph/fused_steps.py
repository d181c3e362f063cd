"""Runs steps of fused operators. All steps have their inputs and results in the same memory.

This module does not import MindSpore.
"""

from __future__ import annotations

from abc import abstractmethod

from agent.backends.cpu.ops import FusedCpuOps
from agent.kernels import StepBuffers
from agent.run_ahead.inserted import InsertedIds
from agent.scores import StepLogits
from agent.step_graph.interface import StepGraph, empty_entry
from agent.step_inputs import StepInputs
from agent.weights.storage import Array

_MAX_STEP_NUMBER = 2**31 - 1
"""Largest number that a step can have. The step after it has the number 1."""


def next_number(number: int) -> int:
    """Returns the number of the step after the step ``number``. 0 stands for no step."""
    return number % _MAX_STEP_NUMBER + 1


class FusedStepGraph(StepGraph):
    """Runs steps of the fused operators. The step reader fills and checks buffers. The graph reads these buffers
    directly, so ``run`` copies no inputs.
    """

    def __init__(self, ops: FusedCpuOps, buffers: StepBuffers) -> None:
        """``buffers`` are the buffers into which the step reader copies the inputs of every step."""
        self._buffers = buffers
        self._logits, self._best_ids, self._stream = ops.logits, ops.best_ids, ops.stream
        self._taps = tuple(ops.taps)
        self._result = StepLogits(self._logits[:0], self._best_ids[:0])
        self._states = ops.states
        self._number = 0
        # These are memoryviews instead of arrays. With cold caches, NumPy takes tens of microseconds to read or write a
        # single number of an array.
        self._counts, self._done = buffers.counts.data, ops.best_ids.data
        self._entry: Array = buffers.token_ids if ops.rows is None else ops.rows
        self._copies_entry = not (ops.is_first_stage or ops.takes_rows)
        if self._copies_entry:
            self._entry = empty_entry(ops, buffers.token_ids.size)

    @abstractmethod
    def _compute(self, results: tuple[Array, ...], num_tokens: int) -> None:
        """Runs a step of ``num_tokens`` tokens with the inputs in the buffers, and fills the arrays ``results``."""

    def run(self, inputs: StepInputs, entry: Array, inserted: InsertedIds | None = None) -> StepLogits:
        assert inserted is None, "a fused step does not run ahead"
        seqs = inputs.query_lens.size
        self._run(inputs, entry, (self._logits[:seqs], self._best_ids[:seqs], *self.tapped(len(entry))))
        if self._done[-1] != self._number:
            raise RuntimeError(f"the output layer is at step {self._done[-1]}, the graph at step {self._number}")
        if seqs != len(self._result.values):
            self._result = StepLogits(self._logits[:seqs], self._best_ids[:seqs])
        return self._result

    def run_stage(self, inputs: StepInputs, entry: Array) -> Array:
        stream = self._stream[: len(entry)]
        self._run(inputs, entry, (stream,))
        return stream

    def tapped(self, num_tokens: int) -> tuple[Array, ...]:
        return tuple(tap[:num_tokens] for tap in self._taps)

    def _run(self, inputs: StepInputs, entry: Array, results: tuple[Array, ...]) -> None:
        assert inputs.positions.base is self._buffers.positions, "the step must be in the buffers of this graph"
        if self._states is not None:
            self._states.assign(inputs)
        if self._copies_entry:
            self._entry[: len(entry)] = entry
        self._number = next_number(self._number)
        self._counts[3] = self._number
        self._compute(results, len(entry))
