"""Which kind of graph an op table's operators are for. A third kind would be chosen here."""

from __future__ import annotations

from collections.abc import Sequence

from mindspore import nn

from agent.backends.base import OpTable
from agent.backends.cpu.ops import FusedCpuOps
from agent.kernels import StepBuffers
from agent.step_graph.dynamic import DynamicStepGraph
from agent.step_graph.interface import StepGraph
from agent.step_graph.static import StaticStepGraph
from llm_serving.ipc.shm import SlotLimits


def make_step_graph(
    model: nn.Cell,
    ops: OpTable,
    buffers: StepBuffers,
    limits: SlotLimits,
    max_whole_prompts: int,
    decode_sizes: Sequence[int] = (),
) -> StepGraph:
    """The kind of graph the op table's operators are for, not compiled yet; ``buffers`` are where the inputs of every
    step are, ``decode_sizes`` those of a dynamic one."""
    if isinstance(ops, FusedCpuOps):
        return StaticStepGraph(model, ops, buffers)
    return DynamicStepGraph(model, ops, limits, max_whole_prompts, decode_sizes)
