"""Replays steps of the fused op table, whose static graph needs only one recording of its kernel launches.

The graph's shapes never change, and its inputs, weights, caches and results stay in the same memory. Therefore one
recording is valid for all steps. A replay avoids MindSpore's preparation of every parameter in every step.

The first small step runs the graph, records the launches (``agent.kernels.launches``) and replays them. The second
small step runs the graph and the replay. In both steps, the graph and the replay must give the same bits. Then all
later steps are replays. If the results differ, or if kernels of another library run in the graph, all later steps run
the graph.

If agents share layers, the launches add arrays of all these agents. Therefore either all of these agents replay or none
of them. Each agent votes on whether its replay gave the right bits. They replay only if all votes are yes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor

from agent.kernels import RecordedLaunches, RecordingError, record
from agent.kernels.launches import AllAgree, Results
from agent.weights.storage import Array

logger = logging.getLogger("agent.step_graph.replay.fused")

MAX_COMPARED_TOKENS = 64
"""Maximum number of tokens of a step that runs both the graph and the replay, to compare their results. After two
equal comparisons all steps are replays. Until then, larger steps run only the graph, because running both is slow.
"""
_SPOILED = 0xFF
"""The value of every byte of the results before a run. These bytes make every float a NaN."""


class FusedReplays:
    """Runs the steps of one graph, either with MindSpore or by replaying its recorded launches."""

    def __init__(self, run_graph: Callable[[], Any], tensors: Iterable[Tensor], all_agree: AllAgree) -> None:
        """``tensors`` are all inputs, parameters and constants of the graph. Their addresses must not change.

        ``all_agree`` takes this agent's vote and returns whether all agents that share the layers voted True.
        """
        self._run_graph = run_graph
        self._tensors = tuple(tensors)
        self._all_agree = all_agree
        self._launches: RecordedLaunches | None = None
        self._confirmed = False
        self.is_paused = False
        """True while steps must run the graph, even if replays are confirmed."""
        self._problem = ""

    @property
    def is_confirmed(self) -> bool:
        """Whether two replays have given the same bits as the graph. Then all further steps are replays."""
        return self._confirmed

    @property
    def problem(self) -> str:
        """The reason why the graph's launches cannot be replayed. Empty if they can, or if no step has run."""
        return self._problem

    def run(self, results: Sequence[Array], num_tokens: int) -> None:
        """Runs a step of ``num_tokens`` tokens, whose inputs are already in the memory of the graph's inputs.

        ``results`` are the arrays that the step fills. Raises RuntimeError if an operator refuses its inputs. (A replay
        raises the subclass OperatorRefusedError.) Exceptions of ``all_agree`` are passed on.
        """
        if self._confirmed and self.is_paused:
            self._graph_result()
        elif self._confirmed:
            assert self._launches is not None, "a recording is confirmed"
            self._launches.run()
        elif self._problem or num_tokens > MAX_COMPARED_TOKENS:
            self._graph_result()
        elif self._launches is None:
            self._record(results)
        else:
            self._confirm(self._launches, results)

    def _record(self, results: Sequence[Array]) -> None:
        memory = [(tensor.data_ptr(), tensor.nbytes) for tensor in self._tensors]
        expected: list[Array] = []

        def run_graph() -> tuple[Results, tuple[int, ...]]:
            number = self._run_and_copy(results, expected)
            _spoil(results)
            return number

        try:
            _, launches = record(run_graph, memory, self._all_agree)
        except RecordingError as error:
            _restore(results, expected)
            self._give_up(str(error))
            return
        if self._all_agree(_equal(results, expected)):
            self._launches = launches
        else:
            _restore(results, expected)
            self._give_up("a replay gives another result")

    def _confirm(self, launches: RecordedLaunches, results: Sequence[Array]) -> None:
        """Runs the step after the recorded step with the graph and with the replay, and compares the results.

        This step has other inputs than the recorded step. So the results differ if the recording treats a value as
        constant although it depends on the inputs.
        """
        expected: list[Array] = []
        self._run_and_copy(results, expected)
        _spoil(results)
        launches.run()
        self._confirmed = self._all_agree(_equal(results, expected))
        if not self._confirmed:
            launches.close()
            _restore(results, expected)
            self._give_up("a replay with other inputs gives another result")

    def _run_and_copy(self, results: Sequence[Array], expected: list[Array]) -> tuple[Results, tuple[int, ...]]:
        """Fills ``results`` with NaN, runs the graph, and copies the results to ``expected``. Returns the outputs of
        the graph and their addresses."""
        _spoil(results)
        number = self._graph_result()
        expected[:] = [result.copy() for result in results]
        return number

    def _graph_result(self) -> tuple[Results, tuple[int, ...]]:
        """Runs the graph. Returns its outputs and their addresses.

        Each output is only the number of the step, because the graph writes its real results to fixed arrays.
        """
        found = self._run_graph()
        tensors = found if isinstance(found, tuple) else (found,)
        return tuple(tensor.asnumpy() for tensor in tensors), tuple(tensor.data_ptr() for tensor in tensors)

    def _give_up(self, problem: str) -> None:
        self._launches, self._problem = None, problem
        logger.info("steps run the graph every time: %s", problem)


def _spoil(results: Sequence[Array]) -> None:
    for result in results:
        result.view(np.uint8)[...] = _SPOILED


def _restore(results: Sequence[Array], values: Sequence[Array]) -> None:
    for result, value in zip(results, values, strict=True):
        result[...] = value


def _equal(results: Sequence[Array], values: Sequence[Array]) -> bool:
    return all(result.tobytes() == value.tobytes() for result, value in zip(results, values, strict=True))
