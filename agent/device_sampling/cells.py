"""The Cells that sample on a device. They consist of MindSpore's primitives.

If agents share the vocabulary, each agent has the logits [seqs, columns] of its own tokens, and finds the best of these
tokens. The agents then gather their results. The last agent's logits may have padding columns, which stand for no
token. The Cells drop these columns.
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
    """Returns the number of candidates that each agent finds for a sequence. It is the same for all agents.

    It is at most ``MAX_CANDIDATES``, and at most the number of tokens of the agent with the fewest tokens.
    """
    if part is None or not part.is_split:
        return min(MAX_CANDIDATES, vocab_size)
    return min(MAX_CANDIDATES, vocab_size - (part.parallel.tensor_parallel - 1) * part.vocab_stride)


def num_drawable(vocab_size: int, part: ModelPart | None) -> int:
    """Returns the number of candidates among which a device can draw a token (``agent.run_ahead.draws``).

    If agents share the vocabulary, it is the number of the best tokens of all agents that are certain to be candidates.
    It is 0 if the agent launches no steps ahead.
    """
    return num_candidates(vocab_size, part) if part is None or part.may_run_ahead else 0


class BestTokens(nn.Cell):
    """Finds the best token of each sequence: logits [seqs, columns] -> (token ids int32 [seqs], their logits [seqs]).

    If several logits are equal, the result is the smallest id, because ArgMaxWithValue returns the first of equal
    elements. If agents share the vocabulary, every agent gets the best tokens of the whole vocabulary.
    """

    def __init__(self, vocab_size: int, part: ModelPart | None) -> None:
        super().__init__()
        self.own = _OwnColumns(vocab_size, part)
        self.pick, self.cast = ops.ArgMaxWithValue(axis=-1), ops.Cast()
        self.choose = _BestOfAgents(part) if part is not None and part.is_split else None

    def construct(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        index, value = self.pick(self.own(logits))
        index = self.cast(index, ms.int32)
        best: tuple[Tensor, Tensor] = (index, value) if self.choose is None else self.choose(index, value)
        return best


class _BestOfAgents(nn.Cell):
    """Chooses among the best tokens of all agents: (token ids int32, their logits) -> the same two tensors, all [seqs].

    The ids of the input are counted from the agent's first token. If logits of several agents are equal, the result is
    the token of the first of these agents, which has the smallest id. NaN counts as the largest logit. So if an agent
    has a NaN, the result is NaN, and the sampler marks the sequence as not finite.
    """

    def __init__(self, part: ModelPart) -> None:
        super().__init__()
        size = part.parallel.tensor_parallel
        self.size, self.gather = size, all_gather(size)
        numbers = np.arange(size, dtype=np.int32)
        self.numbers, self.first_ids = Tensor(numbers), Tensor(numbers * np.int32(part.vocab_stride))
        self.pick, self.equal, self.sum = ops.ArgMaxWithValue(axis=-1), ops.Equal(), ops.ReduceSum()
        self.add, self.multiply, self.cast = ops.Add(), ops.Mul(), ops.Cast()
        self.shape, self.swap = ops.Reshape(), ops.Transpose()

    def construct(self, index: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        ids = self.add(self.gathered(index), self.first_ids)
        agent, best = self.pick(self.gathered(value))
        chosen = self.equal(self.shape(self.cast(agent, ms.int32), (-1, 1)), self.numbers)
        # Each sum has one term that is an id, and all other terms are 0. So float32 is exact, because ids are below
        # 2^24.
        terms = self.multiply(self.cast(ids, ms.float32), self.cast(chosen, ms.float32))
        return self.cast(self.sum(terms, -1), ms.int32), best

    def gathered(self, own: Tensor) -> Tensor:
        """Gathers the arrays ``own`` [seqs] of all agents. Returns [seqs, agents]."""
        return self.swap(self.shape(self.gather(own), (self.size, -1)), (1, 0))


def candidates_cell(vocab_size: int, columns: int, dtype: Any, part: ModelPart | None) -> nn.Cell:
    """Makes the Cell that finds each agent's candidates for each sequence.

    The inputs are logits [seqs, columns] of type ``dtype``, and temperatures, float32 [seqs, 1]. The results are:

    - the largest logits, float32 [agents * seqs, candidates], best first
    - their token ids, int64 [agents * seqs, candidates], counted from the agent's first token
    - the sums of e^(logit - largest logit) over the agent's tokens, float32 [agents * seqs]
    - the sums of e^((logit - largest logit) / temperature), float32 [agents * seqs]
    - if agents share the vocabulary, the logits of all agents, [agents * seqs, columns]
    """
    cell = _Candidates(vocab_size, part)
    cell.set_inputs(Tensor(shape=(None, columns), dtype=dtype), Tensor(shape=(None, 1), dtype=ms.float32))
    return cell


def rows_cell(columns: int, dtype: Any) -> nn.Cell:
    """Makes the Cell that gathers the logits of some sequences.

    Its inputs are logits [rows, columns] of type ``dtype`` and int32 indices of rows. The result has the rows at the
    indices, [indices, columns].
    """
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
        """Returns the sum of e^(value - top) for each sequence, [seqs].

        ``values`` are the logits [seqs, tokens], and ``top`` [seqs, 1] is the largest logit of each sequence.
        """
        return self.sum(self.exp(self.subtract(values, top)), -1)


class _Rows(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.set_train(False)
        self.gather = ops.Gather()

    def construct(self, logits: Tensor, indices: Tensor) -> Tensor:
        return self.gather(logits, indices, 0)


class _OwnColumns(nn.Cell):
    """Drops the padding columns of the last agent's logits: logits [seqs, columns] -> logits [seqs, tokens]."""

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
