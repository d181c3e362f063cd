"""Workers of a MindSpore cluster on the CPU.

python tests/executor/cluster_worker.py JSON

``JSON`` is a list with the environment variables of each worker. Each worker prints its number, its rank, the size of
the cluster, and the sum of rank + 1 over all workers. The workers are forked, so that MindSpore is imported once.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init

PR_SET_PDEATHSIG = 1


class Sum(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.all_reduce = ops.AllReduce()

    def construct(self, x: Tensor) -> Tensor:
        return self.all_reduce(x)


def work(number: int, variables: Mapping[str, str]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the test kills only the parent
    os.environ.update(variables)
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    init()
    total = Sum()(Tensor(np.full(4, get_rank() + 1, np.float32))).asnumpy()
    print("RESULT", number, get_rank(), get_group_size(), int(total[0]), flush=True)


if __name__ == "__main__":
    places = json.loads(sys.argv[1])
    # Worker 1 starts first, so that the first process that connects does not have rank 0.
    for number in reversed(range(len(places))):
        if os.fork() == 0:
            work(number, places[number])
            sys.exit()
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in places]
    sys.exit(any(codes))
