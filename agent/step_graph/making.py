"""Makes the object that runs the graphs of a model: static for the fused op table, dynamic for the native one.

Imports mindspore.
"""

from __future__ import annotations

from collections.abc import Sequence

from mindspore import nn

from agent.backends.base import OpTable
from agent.backends.cpu.ops import FusedCpuOps
from agent.kernels import StepBuffers
from agent.step_graph.dynamic import DynamicStepGraph
from agent.step_graph.interface import StepGraph
from agent.step_graph.static import StaticStepGraph
from agent.step_graph.step_blocks import StepBlocks
from llm_serving.ipc.shm import SlotLimits


def make_step_graph(
    model: nn.Cell,
    ops: OpTable,
    buffers: StepBuffers,
    limits: SlotLimits,
    max_whole_prompts: int,
    vocab_size: int,
    decode_sizes: Sequence[int] = (),
    *,
    fuses: bool = False,
    step_blocks: StepBlocks | None = None,
) -> StepGraph:
    """Makes the kind of graph that the op table needs: static for fused operators, otherwise dynamic.

    The caller compiles the graph. A static graph reads the inputs of every step from ``buffers``. A dynamic graph pads
    the number of sequences of a decode step to one of ``decode_sizes``. With ``fuses``, replays of a dynamic graph fuse
    operators. ``step_blocks`` is given if the op table's graphs gather blocks.
    """
    if isinstance(ops, FusedCpuOps):
        return StaticStepGraph(model, ops, buffers)
    return DynamicStepGraph(
        model, ops, limits, max_whole_prompts, vocab_size, decode_sizes, fuses=fuses, step_blocks=step_blocks
    )
