"""Token ids to hidden states, and hidden states to logits."""

from __future__ import annotations

from mindspore import Tensor, nn

from agent.backends.base import OpTable
from agent.layers.parameter import unbound_parameter


class Embedding(nn.Cell):
    """A row of the table for each token id."""

    def __init__(self, ops: OpTable, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = unbound_parameter((vocab_size, hidden_size), ops.dtype)
        self.gather = ops.gather_rows()

    def construct(self, token_ids: Tensor) -> Tensor:
        """token_ids int32 [T] -> [T, hidden_size]."""
        return self.gather(self.weight, token_ids)


class LMHead(nn.Cell):
    """Logits over the vocabulary by a weight of its own."""

    def __init__(self, ops: OpTable, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = unbound_parameter((vocab_size, hidden_size), ops.dtype)
        self.logits = ops.logits()

    def construct(self, x: Tensor) -> Tensor:
        """x [S, hidden_size] -> [S, vocab_size]."""
        return self.logits(x, self.weight)


class TiedLMHead(nn.Cell):
    """The same by the embedding's weight, which the model passes in."""

    def __init__(self, ops: OpTable) -> None:
        super().__init__()
        self.logits = ops.logits()

    def construct(self, x: Tensor, embedding: Tensor) -> Tensor:
        """x [S, hidden_size], embedding [vocab_size, hidden_size] -> [S, vocab_size]."""
        return self.logits(x, embedding)
