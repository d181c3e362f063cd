"""The interface through which the model runner compiles and runs graphs. All kinds of graphs implement it."""

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
    """Counts the operators that a graph launches in a step, without and with fusion."""

    before: int
    """The number of operators without fusion."""
    fusions: tuple[str, ...] = ()
    """One name for each fusion: the operators that it replaces, joined by ``+``."""

    @property
    def after(self) -> int:
        """The number of operators with fusion."""
        return self.before - sum(name.count("+") for name in self.fusions)

    def __str__(self) -> str:
        """Returns a text for the log and the status page: the counts of operators before and after fusion, and the
        fusions.
        """
        counts = Counter(self.fusions)
        names = ", ".join(f"{count} x {name}" for name, count in counts.items())
        return f"{self.before} operators before, {self.after} after{': ' + names if names else ''}"


class StepGraph(ABC):
    """Compiles the graphs that an op table needs, and runs steps."""

    keeps_logits = True
    """Whether the logits of a step stay valid on the device while the next step runs. Only read if the device runs
    ahead.
    """

    @abstractmethod
    def compile(self) -> None:
        """Compiles the graphs and runs each of them once."""

    @abstractmethod
    def set_replaying(self, replaying: bool) -> None:
        """Turns replays of recorded launches on or off. They are off while MindSpore's profiler observes the launches.

        The results of a step have the same bits with and without replays. A graph without replays ignores the call.
        """

    @abstractmethod
    def run(self, inputs: StepInputs, entry: Array, inserted: InsertedIds | None = None) -> StepLogits | DeviceScores:
        """Runs a step of the last stage. Returns its scores, which are on the host or on the device.

        ``entry`` is the first input of the graph. In the first stage, it is the token ids [tokens] without LAST_TOKEN,
        or the embeddings [tokens, hidden_size] if the model reads images. In a later stage, it is the residual stream
        [tokens, hidden_size] of the previous stage. ``inserted`` states which token ids the graph takes from the
        previous step's results on the device. It must be None unless ``inserts`` returned True. Raises RuntimeError if
        an operator refuses its inputs.

        If the device runs ahead, this method may return before the step is computed. The arguments' arrays must then
        keep their values until the scores are computed.
        """

    def inserts(self, inputs: StepInputs, num_ids: int) -> bool:
        """Returns whether the graph of this step can insert sampled token ids that are still on the device.

        ``num_ids`` is the length of the array in which the previous step has left its token ids.
        """
        del inputs, num_ids
        return False

    @abstractmethod
    def run_stage(self, inputs: StepInputs, entry: Array) -> Array:
        """Runs a step of a stage that is not the last. Returns the residual stream [tokens, hidden_size].

        The result is valid until the next run. ``run`` describes the arguments and errors.
        """

    def tapped(self, num_tokens: int) -> tuple[Array, ...]:
        """Returns a residual stream [num_tokens, hidden_size] of the last step for each operator of ``OpTable.tap``.

        The arrays are in host memory, in the order of the operators, and valid until the next run. bfloat16 is returned
        as uint16. ``num_tokens`` is the number of tokens of the last step.
        """
        del num_tokens
        return ()

    def operators(self) -> Mapping[str, Operators]:
        """Returns the counts of operators of each graph, by the name of the graph's kind. Graphs that are not replayed
        are missing.
        """
        return {}


def empty_entry(ops: OpTable, tokens: int) -> Array:
    """Returns an array of zeros with the shape and type that ``StepGraph.run`` expects for its argument ``entry``.

    ``tokens`` is the number of tokens of the step.
    """
    if ops.part is None or ops.embeds:
        return np.zeros(tokens, np.int32)
    return np.zeros((tokens, ops.part.whole.hidden_size), STORAGE_DTYPES[ops.dtype])
