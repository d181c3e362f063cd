"""Token ids to hidden states."""

from __future__ import annotations

from mindspore import Tensor, nn

from agent.backends.base import OpTable
from agent.layers.parameter import unbound_parameter


class Embedding(nn.Cell):
    """A row of the table for each token id; the agents of a stage have some rows each."""

    def __init__(self, ops: OpTable, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = unbound_parameter((vocab_size, hidden_size), ops.dtype)
        self.embed = ops.embedding(hidden_size)

    def construct(self, token_ids: Tensor, step: tuple[Tensor, ...]) -> Tensor:
        """token_ids int32 [T] -> [T, hidden_size]."""
        return self.embed(self.weight, token_ids, step)
