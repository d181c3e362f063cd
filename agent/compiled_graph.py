"""Compiles a graph with MindSpore and runs it with little overhead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mindspore import Parameter, Tensor, nn
from mindspore.graph.api import _cell_graph_executor

from llm_serving.errors import AgentStartError

_NO_KERNEL = re.compile(r"Unsupported op \[(\w+)\]|operator\[(\w+)\] fail! Unsupported data type")
"""Matches MindSpore's messages that a device has no kernel for a primitive, or no kernel for the types of its inputs.
"""


class CompiledGraph:
    """A graph that is compiled once and then runs any number of times."""

    def __init__(self, cell: nn.Cell) -> None:
        self.cell = cell
        self._phase = ""

    def compile(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Compiles the graph, runs it with ``tensors`` and returns the results.

        Raises AgentStartError with the primitive's name if the device has no kernel for a primitive.
        """
        try:
            found = self.cell(*tensors)
            results = found if isinstance(found, tuple) else (found,)
            for result in results:
                result.asnumpy()
        except (RuntimeError, TypeError) as error:
            missing = _NO_KERNEL.search(str(error))
            if missing is None:
                raise
            types = ", ".join(sorted({str(parameter.dtype) for parameter in self.cell.get_parameters()}))
            raise AgentStartError(
                f"the graph needs the primitive {missing[1] or missing[2]}; this device has no kernel for it, or none "
                f"for its types (the model's types are {types}); docs/ascend.md lists the available primitives"
            ) from error
        self._phase = self.cell.phase_cache[self.cell.phase]
        return results

    def parameters(self) -> Iterator[Tensor]:
        """Yields all parameters of the graph."""
        found: Iterator[Tensor] = self.cell.get_parameters()
        return found

    def constants(self) -> Iterator[Tensor]:
        """Yields the constant tensors that the graph's Cells hold. MindSpore reads them in place."""
        for _, cell in self.cell.cells_and_names():
            values = vars(cell).values()
            yield from (each for each in values if isinstance(each, Tensor) and not isinstance(each, Parameter))

    def run(self, tensors: tuple[Tensor, ...]) -> Any:
        """Runs the graph and returns its result: a tensor, or a tuple of tensors.

        The caller ensures that ``tensors`` fit the compiled graph. This method calls MindSpore's executor directly.
        ``Cell.__call__`` would check the inputs again, which doubles or triples the overhead.
        """
        return _cell_graph_executor._graph_executor(tensors, self._phase)
