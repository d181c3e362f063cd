"""The Cell that inserts sampled token ids, which are still on the device, into the inputs of the next step."""

from __future__ import annotations

from mindspore import Tensor, nn, ops


class InsertIds(nn.Cell):
    """(token_ids [T], earlier_ids [N], places [T], inserted [T]) -> token ids [T], all int32.

    Where ``inserted`` is 1, ``token_ids`` is 0 and the result is ``earlier_ids[places]``. Elsewhere ``inserted`` and
    ``places`` are 0, and the result is ``token_ids``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gather, self.multiply, self.add = ops.Gather(), ops.Mul(), ops.Add()

    def construct(self, token_ids: Tensor, earlier_ids: Tensor, places: Tensor, inserted: Tensor) -> Tensor:
        return self.add(token_ids, self.multiply(self.gather(earlier_ids, places, 0), inserted))
