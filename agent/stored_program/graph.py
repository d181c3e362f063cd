"""Runs steps by replaying the launches of a graph that an earlier start has stored in a file (a stored program)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agent.backends.cpu.ops import FusedCpuOps
from agent.kernels import RecordedLaunches, StepBuffers
from agent.step_graph.fused_steps import FusedStepGraph
from agent.step_graph.head_steps import FusedHeadGraph, HeadStates
from agent.weights.storage import Array


class StoredStepGraph(FusedStepGraph):
    """Replays the launches of a graph that were stored in a file. While replays are off, runs MindSpore's graph
    instead.
    """

    def __init__(
        self,
        ops: FusedCpuOps,
        buffers: StepBuffers,
        launches: RecordedLaunches,
        make_graph: Callable[[], FusedStepGraph],
    ) -> None:
        """``launches`` are the restored launches. ``make_graph`` compiles MindSpore's graph over the same memory."""
        super().__init__(ops, buffers)
        self._launches = launches
        self._make_graph = make_graph
        self._graph: FusedStepGraph | None = None
        self._is_paused = False

    def compile(self) -> None:
        """Does nothing, because stored launches need no compilation."""

    def set_replaying(self, replaying: bool) -> None:
        if not replaying:
            self._graph = self._graph or self._make_graph()
            self._graph.set_replaying(False)
        self._is_paused = not replaying

    def _compute(self, results: tuple[Array, ...], num_tokens: int) -> None:
        if self._is_paused:
            assert self._graph is not None, "set_replaying makes the graph"
            self._graph._compute(results, num_tokens)
        else:
            self._launches.run()


class StoredHeadGraph(FusedHeadGraph):
    """Replays the launches of a head's graphs that were stored in a file."""

    def __init__(
        self, ops: FusedCpuOps, buffers: StepBuffers, states: HeadStates, launches: Sequence[RecordedLaunches]
    ) -> None:
        """``launches`` are the restored launches of each graph, in the order of ``states.arrays``."""
        super().__init__(ops, buffers, states)
        self._launches = dict(zip(states.arrays, launches, strict=True))

    def compile(self) -> None:
        """Does nothing, because stored launches need no compilation."""

    def _compute(self, results: tuple[Array, ...], num_tokens: int, *, own: bool) -> None:
        self._launches[own].run()
