"""The Cell that chooses tokens of sequences with a temperature on a device. It consists of MindSpore's primitives.

It has the steps of ``agent/kernels/ops/sampler.cc``, in float32 instead of double, and knows only the candidates. So
rounding, or a token that is no candidate, can give another token. The host's sampler finds this, and the next step is
then computed again with the right token (``agent.run_ahead.draws``).

If agents share the vocabulary, each device has the candidates of all agents. It chooses the best of them, and draws.
All devices make the same draw, but one of them may round differently. So all of them use the token of the first agent,
which the host compares with its own.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from agent.backends.native.parallel import all_gather
from agent.group.model_part import ModelPart
from agent.run_ahead.draws import DrawColumn


def draws_cell(num_candidates: int, part: ModelPart | None) -> nn.Cell:
    """Makes the Cell that chooses a token of each sequence.

    Its inputs are:

    - the largest logits, float32 [agents * seqs, candidates], best first, and their token ids, int64 [agents * seqs,
      candidates], counted from the agent's first token
    - the token with the largest logit of each sequence, int32 [seqs]
    - the sum of e^((logit - largest logit) / temperature) over each agent's tokens, float32 [agents * seqs]
    - the parameters of each draw, float32 [seqs, columns], one column for each ``DrawColumn``

    The result is int32 [seqs]: the drawn token where ``DrawColumn.IS_DRAWN`` is 1, and the token with the largest logit
    where it is 0. If the drawn token is none of the candidates, the result is 0. The result is a token id for any
    logits, also for NaN.
    """
    cell = _Draws(num_candidates, part)
    candidates = (None, num_candidates)
    cell.set_inputs(
        Tensor(shape=candidates, dtype=ms.float32),
        Tensor(shape=candidates, dtype=ms.int64),
        Tensor(shape=(None,), dtype=ms.int32),
        Tensor(shape=(None,), dtype=ms.float32),
        Tensor(shape=(None, len(DrawColumn)), dtype=ms.float32),
    )
    return cell


class _Draws(nn.Cell):
    """Finds the rank of each candidate by comparing all pairs of candidates, because no sorting primitive of a device
    promises an order of equal logits.
    """

    def __init__(self, num_candidates: int, part: ModelPart | None) -> None:
        super().__init__()
        self.set_train(False)
        shared = part if part is not None and part.is_split else None
        self.join = None if shared is None else _JoinedCandidates(num_candidates, shared)
        self.agree = None if shared is None else _OfFirstAgent(shared)
        self.split, self.sizes = ops.auto_generate.SplitWithSize(), (1,) * len(DrawColumn)
        self.first, self.gather = Tensor(np.zeros(1, np.int32)), ops.Gather()
        self.shape, self.cast = ops.Reshape(), ops.Cast()
        self.as_column, self.as_row = (-1, num_candidates, 1), (-1, 1, num_candidates)
        self.almost_all = Tensor(np.array([num_candidates - 0.5], np.float32))
        self.divide, self.subtract, self.exp = ops.RealDiv(), ops.Sub(), ops.Exp()
        self.add, self.multiply = ops.Add(), ops.Mul()
        self.greater, self.equal = ops.Greater(), ops.Equal()
        self.sum, self.total = ops.ReduceSum(), ops.ReduceSum(keep_dims=True)
        self.largest = ops.ArgMaxWithValue(axis=-1)

    def construct(self, best: Tensor, ids: Tensor, best_ids: Tensor, masses: Tensor, draws: Tensor) -> Tensor:
        temperature, top_k, top_p, min_p, number, is_drawn, is_whole, share = self.split(draws, self.sizes, 1)
        float_ids = self.cast(ids, ms.float32)  # exact, because ids are below 2^24
        if self.join is not None:
            best, float_ids, masses = self.join(best, float_ids, masses, temperature)
        scaled = self.divide(best, temperature)
        weights = self.exp(self.subtract(scaled, self.gather(scaled, self.first, 1)))
        before = self.ranked_before(scaled, float_ids)
        ranks = self.sum(before, -1)
        in_top_k = self.flags(top_k, ranks)
        weights = self.multiply(weights, in_top_k)
        mass = self.either(self.total(weights, -1), self.shape(masses, (-1, 1)), is_whole)
        mass_before = self.sum(self.multiply(before, self.shape(weights, self.as_row)), -1)
        in_top_p = self.flags(self.multiply(top_p, mass), mass_before)
        kept = self.multiply(in_top_k, in_top_p)
        kept = self.without(kept, self.flags(min_p, weights))
        weights = self.multiply(weights, kept)
        limit = self.multiply(number, self.kept_mass(weights, kept, self.multiply(share, mass), is_whole))
        # The drawn candidate is the first kept one whose running mass exceeds the limit. Its rank is the number of kept
        # candidates whose running mass does not.
        passed = self.without(kept, self.flags(self.add(mass_before, weights), limit))
        is_chosen = self.cast(self.equal(ranks, self.total(passed, -1)), ms.float32)
        _, chosen = self.largest(self.multiply(float_ids, is_chosen))
        tokens = self.where_drawn(self.cast(chosen, ms.int32), best_ids, is_drawn)
        return tokens if self.agree is None else self.agree(tokens)

    def ranked_before(self, scaled: Tensor, ids: Tensor) -> Tensor:
        """Returns float32 [seqs, candidates, candidates]: 1 where the candidate of the last axis ranks before the
        candidate of the second axis, else 0. The larger logit ranks first, the smaller id on a tie.
        """
        column, row = self.shape(scaled, self.as_column), self.shape(scaled, self.as_row)
        smaller_id = self.flags(self.shape(ids, self.as_column), self.shape(ids, self.as_row))
        is_equal = self.cast(self.equal(row, column), ms.float32)
        return self.add(self.flags(row, column), self.multiply(is_equal, smaller_id))

    def kept_mass(self, weights: Tensor, kept: Tensor, wanted: Tensor, is_whole: Tensor) -> Tensor:
        """Returns the mass of all kept tokens, float32 [seqs, 1].

        It is the sum of the kept candidates' ``weights``. If a sequence has no ``top_k`` and all of its candidates are
        kept, further tokens are kept until their mass reaches ``wanted`` [seqs, 1]. Then the result is ``wanted``. The
        last kept token makes the mass a little larger, and only the host knows this token.
        """
        own = self.total(weights, -1)
        has_all = self.flags(self.total(kept, -1), self.almost_all)
        return self.either(own, wanted, self.multiply(self.multiply(is_whole, has_all), self.flags(wanted, own)))

    def either(self, a: Tensor, b: Tensor, flag: Tensor) -> Tensor:
        """Returns ``b`` where ``flag`` is 1, and ``a`` where it is 0."""
        return self.add(a, self.multiply(flag, self.subtract(b, a)))

    def where_drawn(self, drawn: Tensor, best_ids: Tensor, is_drawn: Tensor) -> Tensor:
        """Returns ``drawn`` where ``is_drawn`` is 1, and ``best_ids`` where it is 0."""
        return self.either(best_ids, drawn, self.cast(self.shape(is_drawn, (-1,)), ms.int32))

    def flags(self, a: Tensor, b: Tensor) -> Tensor:
        """Returns 1.0 where ``a`` is greater than ``b``, else 0.0."""
        return self.cast(self.greater(a, b), ms.float32)

    def without(self, flags: Tensor, dropped: Tensor) -> Tensor:
        """Returns ``flags``, with 0 where ``dropped`` is 1."""
        return self.subtract(flags, self.multiply(flags, dropped))


class _JoinedCandidates(nn.Cell):
    """Chooses the best candidates of all agents, with the results that one agent with all tokens would find.

    The inputs are the first, second and fourth input of ``draws_cell``, with the ids as float32, and the temperatures,
    float32 [seqs, 1]. The results are the largest logits, best first, and their token ids, both float32 [seqs,
    candidates], and the sums of exponentials over all tokens, float32 [seqs].
    """

    def __init__(self, num_candidates: int, part: ModelPart) -> None:
        super().__init__()
        self.size, self.count = part.parallel.tensor_parallel, num_candidates
        numbers = np.arange(self.size, dtype=np.float32)
        self.first_ids = Tensor((numbers * np.float32(part.vocab_stride)).reshape(-1, 1, 1))
        self.places = Tensor(np.arange(self.size * num_candidates, dtype=np.int64))
        self.top_k, self.first, self.gather = ops.auto_generate.TopkExt(), Tensor(np.zeros(1, np.int32)), ops.Gather()
        self.shape, self.swap, self.cast = ops.Reshape(), ops.Transpose(), ops.Cast()
        self.divide, self.subtract, self.exp = ops.RealDiv(), ops.Sub(), ops.Exp()
        self.add, self.multiply, self.equal, self.sum = ops.Add(), ops.Mul(), ops.Equal(), ops.ReduceSum()

    def construct(self, best: Tensor, ids: Tensor, masses: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
        own_tops = self.divide(self.by_sequence(self.gather(best, self.first, 1), 1), temperature)
        best, places = self.top_k(self.by_sequence(best, self.count), self.count, -1, True, True)
        top = self.divide(self.gather(best, self.first, 1), temperature)
        scales = self.exp(self.subtract(own_tops, top))
        mass = self.sum(self.multiply(self.by_sequence(masses, 1), scales), -1)
        return best, self.ids_at(places, self.whole_ids(ids)), mass

    def whole_ids(self, ids: Tensor) -> Tensor:
        """Returns the ids as ids of the whole vocabulary, float32 [seqs, agents * candidates]."""
        return self.by_sequence(self.add(self.shape(ids, (self.size, -1, self.count)), self.first_ids), self.count)

    def ids_at(self, places: Tensor, ids: Tensor) -> Tensor:
        """Returns ids[seq, places[seq]] for each sequence. ``places`` is int64 [seqs, candidates]."""
        is_chosen = self.cast(self.equal(self.shape(places, (-1, self.count, 1)), self.places), ms.float32)
        # Each sum has one term that is an id, and all other terms are 0. So it is exact.
        return self.sum(self.multiply(is_chosen, self.shape(ids, (-1, 1, self.size * self.count))), -1)

    def by_sequence(self, gathered: Tensor, width: int) -> Tensor:
        """Puts the rows of all agents for a sequence side by side: [agents * seqs, width] -> [seqs, agents * width]."""
        by_agent = self.shape(gathered, (self.size, -1, width))
        return self.shape(self.swap(by_agent, (1, 0, 2)), (-1, self.size * width))


class _OfFirstAgent(nn.Cell):
    """Returns the tokens of the first agent, int32 [seqs], whatever tokens the other agents have chosen."""

    def __init__(self, part: ModelPart) -> None:
        super().__init__()
        self.size = part.parallel.tensor_parallel
        self.gather_agents = all_gather(self.size)
        self.shape, self.gather, self.first = ops.Reshape(), ops.Gather(), Tensor(np.zeros(1, np.int32))

    def construct(self, tokens: Tensor) -> Tensor:
        by_agent = self.shape(self.gather_agents(tokens), (self.size, -1))
        return self.shape(self.gather(by_agent, self.first, 0), (-1,))
