"""The Cell that inserts sampled token ids, which are still on the device, into the inputs of the next step."""

from __future__ import annotations

from mindspore import Tensor, nn, ops


class InsertIds(nn.Cell):
    """Returns the input token ids of a step, some of which come from the tokens that the previous step has sampled.

    ``token_ids``, ``places``, ``inserted`` and the result are int32 [tokens]. ``earlier_ids``, int32, are the tokens
    that the previous step has sampled. Where ``inserted`` is 1, the result is ``earlier_ids[places]``, and
    ``token_ids`` must be 0. Where ``inserted`` is 0, the result is ``token_ids``, and ``places`` must be 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gather, self.multiply, self.add = ops.Gather(), ops.Mul(), ops.Add()

    def construct(self, token_ids: Tensor, earlier_ids: Tensor, places: Tensor, inserted: Tensor) -> Tensor:
        return self.add(token_ids, self.multiply(self.gather(earlier_ids, places, 0), inserted))
