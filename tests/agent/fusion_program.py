"""Compiles a chain of elementwise operators at O0 with infer_boost and with the flags of the Ascend backend.

test_graph_kernel_fusion.py starts it. Prints the report on the fusion that an agent would give. On a CPU, MindSpore may
refuse to build the fused operators after its passes have fused them; the report is printed in any case.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from agent.backends.ascend.fusion import fusion_flags, take_report

os.environ["MS_DEV_GRAPH_KERNEL_FLAGS"] = fusion_flags("--enable_dynamic_shape_fusion=false " + sys.argv[1])
os.environ["GLOG_v"] = "4"  # noqa: SIM112

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops


class Chain(nn.Cell):
    """Three operators that MindSpore fuses, with one between them that it does not fuse."""

    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        return ops.exp(ops.add(x, y) - x) * ops.sigmoid(y)


ms.set_context(mode=ms.GRAPH_MODE, jit_config={"jit_level": "O0", "infer_boost": "on"})
ms.set_device("CPU")
array = np.ones((3, 8), np.float32)
try:
    Chain()(Tensor(array), Tensor(array)).asnumpy()
except RuntimeError as error:
    print(str(error).splitlines()[0], file=sys.stderr)
print(json.dumps(take_report()), flush=True)
os._exit(0)
