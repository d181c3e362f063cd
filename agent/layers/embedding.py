"""The embedding layer, which turns token ids into hidden states."""

from __future__ import annotations

from mindspore import Tensor, nn

from agent.backends.base import OpTable
from agent.layers.parameter import unbound_parameter


class Embedding(nn.Cell):
    """Looks up the row of the embedding table for each token id. The table may be divided among the agents of a stage.
    """

    def __init__(self, ops: OpTable, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = unbound_parameter((vocab_size, hidden_size), ops.dtype)
        self.embed = ops.embedding(hidden_size)

    def construct(self, token_ids: Tensor, step: tuple[Tensor, ...]) -> Tensor:
        """Returns the hidden states [tokens, hidden_size] of ``token_ids``, int32 [tokens]."""
        return self.embed(self.weight, token_ids, step)
