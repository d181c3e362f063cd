"""The Cells that sample on a device, made of MindSpore's primitives.

Shapes: S is the number of sequences and V the number of tokens of the vocabulary. P agents share the vocabulary, and
each finds K candidates. An agent has the logits [S, C] of its columns. The last agent may have more columns than
tokens; the Cells drop the additional ones.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from agent.backends.native.parallel import all_gather
from agent.group.model_part import ModelPart

MAX_CANDIDATES = 64
"""Maximum number of candidates of each agent for each sequence."""


def num_candidates(vocab_size: int, part: ModelPart | None) -> int:
    """Returns K, the same for all agents: at most the number of tokens of the smallest part of the vocabulary."""
    if part is None or not part.is_split:
        return min(MAX_CANDIDATES, vocab_size)
    return min(MAX_CANDIDATES, vocab_size - (part.parallel.tensor_parallel - 1) * part.vocab_stride)


class BestTokens(nn.Cell):
    """logits [S, C] -> the tokens with the largest logits, int32, the first of equal ones, and the logits: [P * S].

    ArgMaxWithValue documents that it returns the first of equal elements. Tokens are counted from the agent's first.
    """

    def __init__(self, vocab_size: int, part: ModelPart | None) -> None:
        super().__init__()
        self.own = _OwnColumns(vocab_size, part)
        self.pick, self.cast = ops.ArgMaxWithValue(axis=-1), ops.Cast()
        self.gather = _gather(part)

    def construct(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        index, value = self.pick(self.own(logits))
        index = self.cast(index, ms.int32)
        if self.gather is not None:
            return self.gather(index), self.gather(value)
        return index, value


def candidates_cell(vocab_size: int, columns: int, dtype: Any, part: ModelPart | None) -> nn.Cell:
    """Makes the Cell that finds the candidates. ``columns`` is C and ``dtype`` the type of the logits.

    The inputs are logits [S, C] and temperatures, float32 [S, 1]. The results are:

    - the largest logits, float32 [P * S, K], best first
    - their tokens, int64 [P * S, K], counted from the agent's first
    - the sums of e^(x - largest x) over the agent's tokens, float32 [P * S]
    - the same sums with all x divided by the temperature
    - if agents share the vocabulary, the logits of all agents, [P * S, C]
    """
    cell = _Candidates(vocab_size, part)
    cell.set_inputs(Tensor(shape=(None, columns), dtype=dtype), Tensor(shape=(None, 1), dtype=ms.float32))
    return cell


def rows_cell(columns: int, dtype: Any) -> nn.Cell:
    """Makes the Cell (logits [n, C], indices int32 [R]) -> the rows of logits at the indices, [R, C]."""
    cell = _Rows()
    cell.set_inputs(Tensor(shape=(None, columns), dtype=dtype), Tensor(shape=(None,), dtype=ms.int32))
    return cell


class _Candidates(nn.Cell):
    def __init__(self, vocab_size: int, part: ModelPart | None) -> None:
        super().__init__()
        self.set_train(False)
        self.own = _OwnColumns(vocab_size, part)
        self.count = num_candidates(vocab_size, part)
        self.cast, self.top_k = ops.Cast(), ops.auto_generate.TopkExt()
        self.first, self.pick_first = Tensor(np.zeros(1, np.int32)), ops.Gather()
        self.divide, self.subtract, self.exp = ops.RealDiv(), ops.Sub(), ops.Exp()
        self.sum = ops.ReduceSum()
        self.gather = _gather(part)

    def construct(self, logits: Tensor, temperatures: Tensor) -> tuple[Tensor, ...]:
        values = self.cast(self.own(logits), ms.float32)
        best, ids = self.top_k(values, self.count, -1, True, True)
        top = self.pick_first(best, self.first, 1)
        total = self.mass(values, top)
        scaled = self.mass(self.divide(values, temperatures), self.divide(top, temperatures))
        if self.gather is None:
            return best, ids, total, scaled
        gathered = (self.gather(best), self.gather(ids), self.gather(total), self.gather(scaled))
        return (*gathered, self.gather(logits))

    def mass(self, values: Tensor, top: Tensor) -> Tensor:
        """(values [S, V], top [S, 1]) -> the sum of e^(value - top), [S]."""
        return self.sum(self.exp(self.subtract(values, top)), -1)


class _Rows(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.set_train(False)
        self.gather = ops.Gather()

    def construct(self, logits: Tensor, indices: Tensor) -> Tensor:
        return self.gather(logits, indices, 0)


class _OwnColumns(nn.Cell):
    """logits [S, C] -> the columns that are tokens of the vocabulary."""

    def __init__(self, vocab_size: int, part: ModelPart | None) -> None:
        super().__init__()
        self.sizes: tuple[int, int] | None = None
        if part is not None and part.is_split and len(part.shard.vocab) < part.vocab_stride:
            self.sizes = (len(part.shard.vocab), part.vocab_stride - len(part.shard.vocab))
        self.split = ops.auto_generate.SplitWithSize()

    def construct(self, logits: Tensor) -> Tensor:
        return logits if self.sizes is None else self.split(logits, self.sizes, 1)[0]


def _gather(part: ModelPart | None) -> Any:
    return None if part is None or not part.is_split else all_gather(part.parallel.tensor_parallel)
