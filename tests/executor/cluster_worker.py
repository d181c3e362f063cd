"""A worker of a MindSpore cluster on the CPU.

It prints its rank, the size of the cluster, and the sum of rank + 1 over all workers.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init


class Sum(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.all_reduce = ops.AllReduce()

    def construct(self, x: Tensor) -> Tensor:
        return self.all_reduce(x)


if __name__ == "__main__":
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    init()
    total = Sum()(Tensor(np.full(4, get_rank() + 1, np.float32))).asnumpy()
    print("RESULT", get_rank(), get_group_size(), int(total[0]), flush=True)
