"""MindSpore's side of any graph: compiling it, saying what it lacks, and running it with the least overhead."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mindspore import Parameter, Tensor, nn
from mindspore.graph.api import _cell_graph_executor

from llm_serving.errors import AgentStartError

_NO_KERNEL = re.compile(r"Unsupported op \[(\w+)\]|operator\[(\w+)\] fail! Unsupported data type")
"""MindSpore's words for a primitive without a kernel, at all or for these types."""


class CompiledGraph:
    """A graph, compiled once and run any number of times."""

    def __init__(self, cell: nn.Cell) -> None:
        self._cell = cell
        self._phase = ""

    def compile(self, tensors: tuple[Tensor, ...]) -> None:
        """Compile, and run with these inputs. Raises AgentStartError naming a primitive without a kernel."""
        try:
            self._cell(*tensors).asnumpy()
        except (RuntimeError, TypeError) as error:
            lacking = _NO_KERNEL.search(str(error))
            if lacking is None:
                raise
            types = ", ".join(sorted({str(parameter.dtype) for parameter in self._cell.get_parameters()}))
            raise AgentStartError(
                f"the graph needs the primitive {lacking[1] or lacking[2]}, and this device has no kernel of it, or "
                f"none for its types (the model's are {types}); docs/ascend.md has a table of the primitives there are"
            ) from error
        self._phase = self._cell.phase_cache[self._cell.phase]

    def parameters(self) -> Iterator[Tensor]:
        """All that the graph has."""
        found: Iterator[Tensor] = self._cell.get_parameters()
        return found

    def constants(self) -> Iterator[Tensor]:
        """Tensors that its Cells hold beside them. MindSpore reads them where they are."""
        for _, cell in self._cell.cells_and_names():
            values = vars(cell).values()
            yield from (each for each in values if isinstance(each, Tensor) and not isinstance(each, Parameter))

    def run(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """Straight to MindSpore's executor: ``Cell.__call__`` would check again, at two to three times the overhead,
        that it is compiled for these inputs, which the caller has settled."""
        return _cell_graph_executor._graph_executor(tensors, self._phase)
