"""The interface of all graphs, which the model runner uses, and the result of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agent.backends.base import OpTable
from agent.step_inputs import Int32Array, StepInputs
from agent.weights.storage import STORAGE_DTYPES, Array


@dataclass(frozen=True, slots=True)
class StepLogits:
    """The result of one step. Valid until the graph runs again."""

    values: npt.NDArray[np.float32]
    """[S, vocabulary]: the logits of each sequence's last token. A row that does not sample may hold anything."""
    best_ids: Int32Array | None
    """[S]: the token with the largest logit, the smaller id on a tie. None if the graph does not compute it."""


class StepGraph(ABC):
    """Compiles the graphs that an op table needs, and runs steps."""

    @abstractmethod
    def compile(self) -> None:
        """Compiles the graphs and runs each of them once."""

    @abstractmethod
    def set_replaying(self, replaying: bool) -> None:
        """Turns replays of recorded launches on or off. A profile needs the launches that MindSpore makes.

        Steps have the same bits with and without replays. A graph without replays ignores the call.
        """

    @abstractmethod
    def run(self, inputs: StepInputs, entry: Array) -> StepLogits:
        """Runs a step of the last stage.

        In the first stage, ``entry`` are the token ids [T] without LAST_TOKEN. In a later stage, ``entry`` is the
        residual stream [T, hidden_size] of the stage before. Raises RuntimeError if an operator refuses its inputs.
        """

    @abstractmethod
    def run_stage(self, inputs: StepInputs, entry: Array) -> Array:
        """Runs a step of a stage that is not the last, and returns the residual stream [T, hidden_size].

        The result is valid until the next run. Otherwise like ``run``.
        """


def empty_entry(ops: OpTable, tokens: int) -> Array:
    """Returns zeros in the form of ``StepGraph.run``'s ``entry``, for the given number of tokens."""
    if ops.part is None or ops.is_first_stage:
        return np.zeros(tokens, np.int32)
    return np.zeros((tokens, ops.part.whole.hidden_size), STORAGE_DTYPES[ops.dtype])
