"""A compiled graph of fused operators whose inputs stay in the same memory, so that its steps can be replayed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mindspore import nn

from agent.compiled_graph import CompiledGraph
from agent.kernels.launches import AllAgree
from agent.layers.parameter import as_storage, as_tensor
from agent.step_graph.replay.fused import FusedReplays
from agent.weights.storage import Array


class ReplayedGraph:
    """A graph whose tensors have the size of the largest step, with the replays of its steps."""

    def __init__(self, cell: nn.Cell, inputs: Sequence[Array], all_agree: AllAgree) -> None:
        """``cell`` is the outermost Cell. ``inputs`` are the arrays from which every step reads its inputs.

        ``FusedReplays`` describes ``all_agree``.
        """
        self.cell = cell
        self.tensors = tuple(map(as_tensor, inputs))
        """The inputs of ``cell``."""
        self._graph = graph = CompiledGraph(cell)
        memory = [*self.tensors, *graph.parameters(), *graph.constants()]
        self.replays = FusedReplays(lambda: graph.run(self.tensors), memory, all_agree)

    def compile(self) -> None:
        """Compiles the graph and runs it once with the inputs in its memory."""
        self._graph.compile(self.tensors)

    def parameters(self) -> Iterator[tuple[str, int, Array]]:
        """Yields the name, the address and the values of each parameter of the graph."""
        for parameter in self._graph.parameters():
            yield parameter.name, parameter.data_ptr(), as_storage(parameter)
