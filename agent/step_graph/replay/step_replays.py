"""Steps of the static graph without MindSpore: what it launches, recorded once.

Its shapes never change, and its inputs, weights, caches and results stay where they are, so one recording does for all
steps. MindSpore's part, most of which is preparing every parameter, is done twice: the first small step runs the graph
and records what it launches (``agent.kernels.launches``); the second runs graph and replay; both times the results must
be the same to the bit. Those after it are replays, of any size, unless they were not, or something but our kernels
computes.

Agents that share layers make their sums inside of the launches. All replay or none: whatever one finds, all are asked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from mindspore import Tensor

from agent.kernels import RecordedLaunches, RecordingError, record
from agent.kernels.launches import AllAgree
from agent.weights.storage import Array

logger = logging.getLogger("agent.step_graph.replay.step_replays")

MOST_TOKENS = 64
"""Of a step that is computed twice; larger ones wait for two that are small."""
_SPOILED = 0xFF
"""In every byte of a result before anything computes it: no float is a number then."""


class StepReplays:
    """Runs steps of one graph, by MindSpore or without it."""

    def __init__(self, run_graph: Callable[[], Tensor], tensors: Iterable[Tensor], all_agree: AllAgree) -> None:
        """``tensors`` are all inputs, parameters and constants of the graph; their memory stays where it is.
        ``all_agree`` is of the agents that share its layers."""
        self._run_graph = run_graph
        self._tensors = tuple(tensors)
        self._all_agree = all_agree
        self._launches: RecordedLaunches | None = None
        self._confirmed = False
        self._problem = ""

    @property
    def is_confirmed(self) -> bool:
        """Whether steps are replays by now."""
        return self._confirmed

    @property
    def problem(self) -> str:
        """Why this graph's launches cannot be replayed; empty where they can, or none has run."""
        return self._problem

    def run(self, results: Sequence[Array], num_tokens: int) -> None:
        """A step of so many tokens, whose inputs are in place. ``results``: the parts of the graph's memory that it
        fills, as what it leaves there must be compared. Raises RuntimeError when an operator refuses its inputs,
        LaunchRefusedError of a replay, and what ``all_agree`` raises."""
        if self._confirmed:
            assert self._launches is not None, "a recording is confirmed"
            self._launches.run()
        elif self._problem or num_tokens > MOST_TOKENS:
            self._graph_result()
        elif self._launches is None:
            self._record(results)
        else:
            self._confirm(self._launches, results)

    def _record(self, results: Sequence[Array]) -> None:
        memory = [(tensor.data_ptr(), tensor.nbytes) for tensor in self._tensors]
        wanted: list[Array] = []

        def run_graph() -> tuple[Array, int]:
            number = self._compared(results, wanted)
            _spoil(results)
            return number

        try:
            _, launches = record(run_graph, memory, self._all_agree)
        except RecordingError as error:
            _put(results, wanted)
            self._give_up(str(error))
            return
        if self._all_agree(_equal(results, wanted)):
            self._launches = launches
        else:
            _put(results, wanted)
            self._give_up("a replay gives another result")

    def _confirm(self, launches: RecordedLaunches, results: Sequence[Array]) -> None:
        """What depends on the inputs and was taken for a constant would show with other inputs."""
        wanted: list[Array] = []
        self._compared(results, wanted)
        _spoil(results)
        launches.run()
        self._confirmed = self._all_agree(_equal(results, wanted))
        if not self._confirmed:
            launches.close()
            _put(results, wanted)
            self._give_up("a replay with other inputs gives another result")

    def _compared(self, results: Sequence[Array], wanted: list[Array]) -> tuple[Array, int]:
        """Runs the graph; ``wanted`` becomes what it leaves, which is spoiled memory where it writes nothing."""
        _spoil(results)
        number = self._graph_result()
        wanted[:] = [result.copy() for result in results]
        return number

    def _graph_result(self) -> tuple[Array, int]:
        """The graph's own result, the step's number, and where MindSpore has it."""
        tensor = self._run_graph()
        return tensor.asnumpy(), tensor.data_ptr()

    def _give_up(self, problem: str) -> None:
        self._launches, self._problem = None, problem
        logger.info("steps run the graph every time: %s", problem)


def _spoil(results: Sequence[Array]) -> None:
    for result in results:
        result.view(np.uint8)[...] = _SPOILED


def _put(results: Sequence[Array], values: Sequence[Array]) -> None:
    for result, value in zip(results, values, strict=True):
        result[...] = value


def _equal(results: Sequence[Array], values: Sequence[Array]) -> bool:
    return all(result.tobytes() == value.tobytes() for result, value in zip(results, values, strict=True))
