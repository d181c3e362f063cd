"""The embedding: token ids to hidden states."""

from __future__ import annotations

from mindspore import Tensor, nn

from agent.backends.base import OpTable
from agent.layers.parameter import unbound_parameter


class Embedding(nn.Cell):
    """Looks up the row of each token id. The agents of a stage share the rows of the table."""

    def __init__(self, ops: OpTable, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = unbound_parameter((vocab_size, hidden_size), ops.dtype)
        self.embed = ops.embedding(hidden_size)

    def construct(self, token_ids: Tensor, step: tuple[Tensor, ...]) -> Tensor:
        """token_ids int32 [T] -> [T, hidden_size]."""
        return self.embed(self.weight, token_ids, step)
