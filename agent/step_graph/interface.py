"""The interface of all graphs, which the model runner uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from agent.backends.base import OpTable
from agent.run_ahead.inserted import InsertedIds
from agent.scores import DeviceScores, StepLogits
from agent.step_inputs import StepInputs
from agent.weights.storage import STORAGE_DTYPES, Array


@dataclass(frozen=True, slots=True)
class Operators:
    """The operators that a graph launches in a step."""

    before: int
    """Their number without fusion."""
    fusions: tuple[str, ...] = ()
    """One name for each fusion: the operators that it replaces, joined by ``+``."""

    @property
    def after(self) -> int:
        """Their number with fusion."""
        return self.before - sum(name.count("+") for name in self.fusions)

    def __str__(self) -> str:
        """Returns a description of the effect of fusion for the log and the status page."""
        counts = Counter(self.fusions)
        names = ", ".join(f"{count} x {name}" for name, count in counts.items())
        return f"{self.before} operators before, {self.after} after{': ' + names if names else ''}"


class StepGraph(ABC):
    """Compiles the graphs that an op table needs, and runs steps."""

    keeps_logits = True
    """Whether the logits of a step stay on the device while the next step runs, if the device runs ahead."""

    @abstractmethod
    def compile(self) -> None:
        """Compiles the graphs and runs each of them once."""

    @abstractmethod
    def set_replaying(self, replaying: bool) -> None:
        """Turns replays of recorded launches on or off. A profile needs the launches that MindSpore makes.

        Steps have the same bits with and without replays. A graph without replays ignores the call.
        """

    @abstractmethod
    def run(self, inputs: StepInputs, entry: Array, inserted: InsertedIds | None = None) -> StepLogits | DeviceScores:
        """Runs a step of the last stage. Returns its scores, on the host or on the device.

        ``entry`` is the first input of the graph. In the first stage, it has the token ids [T] without LAST_TOKEN. In a
        later stage, ``entry`` is the residual stream [T, hidden_size] of the stage before. ``inserted`` completes the
        token ids on the device, if the graph ``inserts`` them. Raises RuntimeError if an operator refuses its inputs.

        If the device runs ahead, the call returns early. All arrays must then keep their values until the scores are
        computed.
        """

    def inserts(self, inputs: StepInputs, num_ids: int) -> bool:
        """Returns whether the graph of this step can insert some of ``num_ids`` token ids on the device."""
        del inputs, num_ids
        return False

    @abstractmethod
    def run_stage(self, inputs: StepInputs, entry: Array) -> Array:
        """Runs a step of a stage that is not the last, and returns the residual stream [T, hidden_size].

        The result is valid until the next run. Otherwise like ``run``.
        """

    def operators(self) -> Mapping[str, Operators]:
        """Returns the operators of each kind of graph, by its name. A graph that is not replayed is left out."""
        return {}


def empty_entry(ops: OpTable, tokens: int) -> Array:
    """Returns zeros in the form of ``StepGraph.run``'s ``entry``, for the given number of tokens."""
    if ops.part is None or ops.is_first_stage:
        return np.zeros(tokens, np.int32)
    return np.zeros((tokens, ops.part.whole.hidden_size), STORAGE_DTYPES[ops.dtype])
