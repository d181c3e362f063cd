"""Implements the native op table's operators for agents that share a model, with communication primitives.

On an Ascend, HCCL runs the primitives. On a CPU, the project's kernels run them over shared memory
(``agent/kernels/plugin/collectives.cc``), without ``mindspore.communication.init`` and ``msrun``.
"""

from __future__ import annotations

import numpy as np
from mindspore import Tensor, nn, ops

from agent.backends.base import Operator
from agent.group.model_part import STAGE_GROUP, ModelPart
from agent.layers.parameter import MINDSPORE_DTYPES


def all_gather(size: int) -> Operator:
    """Returns an operator that joins the arrays of ``size`` agents, each [n, ...], to one array [size * n, ...].

    MindSpore's Python class ``ops.AllGather`` is not used. It would ask the communication library for the size of the
    group, and a machine without an Ascend may not have this library.
    """
    primitive = ops.Primitive("AllGather")
    for name, value in (("rank_size", size), ("group", STAGE_GROUP), ("fusion", 0), ("no_eliminate", True)):
        primitive.add_prim_attr(name, value)
    primitive.add_prim_attr("mean_flag", False)
    return primitive


class Sum(nn.Cell):
    """Returns the sum of x over the agents of a pipeline stage. The sum has the shape of x, which may be any shape."""

    def __init__(self) -> None:
        super().__init__()
        self.all_reduce = ops.AllReduce(ops.ReduceOp.SUM, STAGE_GROUP)

    def construct(self, x: Tensor, step: tuple[Tensor, ...]) -> Tensor:
        return self.all_reduce(x)


class Embedding(nn.Cell):
    """Looks up tokens in an embedding table whose rows are divided among agents. Returns [tokens, width].

    ``table`` [own rows, width] has this agent's rows. Each agent looks up the tokens in its own rows and uses zeros for
    all other tokens. Then the agents' results are added.
    """

    def __init__(self, part: ModelPart, dtype: str) -> None:
        super().__init__()
        vocab = part.shard.vocab
        self.first = Tensor(np.array([vocab.start], np.int32))
        self.zero = Tensor(np.zeros(1, np.int32))
        self.last = Tensor(np.array([len(vocab) - 1], np.int32))
        self.gather, self.equal, self.cast, self.expand = ops.Gather(), ops.Equal(), ops.Cast(), ops.Reshape()
        self.minimum, self.maximum = ops.Minimum(), ops.Maximum()
        self.subtract, self.multiply = ops.Sub(), ops.Mul()
        self.dtype = MINDSPORE_DTYPES[dtype]
        self.sum = Sum()

    def construct(self, table: Tensor, token_ids: Tensor, step: tuple[Tensor, ...]) -> Tensor:
        places = self.subtract(token_ids, self.first)
        own = self.minimum(self.maximum(places, self.zero), self.last)
        is_own = self.expand(self.cast(self.equal(places, own), self.dtype), (-1, 1))
        return self.sum(self.multiply(self.gather(table, own, 0), is_own), step)


class HandOver(nn.Cell):
    """Returns hidden + residual, each [tokens, width], for the next pipeline stage. The sum is rounded exactly as in
    AddRmsNorm.
    """

    def __init__(self) -> None:
        super().__init__()
        self.add = ops.Add()

    def construct(self, hidden: Tensor, residual: Tensor, step: tuple[Tensor, ...]) -> Tensor:
        return self.add(hidden, residual)
