"""Defines the rates of known devices. A rate is a published or measured rate times the fraction that is achieved.

``ascend-910b``: an Ascend 910B2 of 64 GB, float16, one device, MindSpore's kernel-by-kernel mode.

    FP16             24 cube cores x 16 x 16 x 16 multiply-adds per cycle x 1.8 GHz = 353.9 TFLOP/s (core count, size
                     and frequency: CANN's platform file Ascend910B2*.ini, gitcode.com/cann/runtime, src/platform/
                     platform_config; the product: gitcode.com/cann/ops-cv, issue 997). Large products in bfloat16
                     achieved 328 TFLOP/s in the project "limulidae" (93 %). Assumed: 70 %, because a server's
                     products have some hundred rows, not thousands. int8: twice the rate.
    HBM              64 GB at 1.6 TB/s (the same issue). Assumed: 80 % for weights, 60 % for keys and values that are
                     read by blocks.
    device to host   PCIe 4.0 x16, 31.5 GB/s in one direction. Assumed: 75 %.
    kernels          13 per layer and 6 per step in the native graph (``agent/backends/native``). The host starts them
                     one by one while earlier ones run. Assumed: 12 us each. For comparison: eager PyTorch took 832 us
                     for a transformer block of a 30B mixture of experts on a 910B3, and waited for the host for
                     591 us of it (github.com/vllm-project/vllm-ascend, issue 9404).
    step             Assumed: 1.5 ms for the transfer of inputs, the call of the graph and the transfer of results, and
                     10 us per sampled row.

``cpu``: two cores of an AMD EPYC (Zen 4, AVX-512 with VNNI and BF16). The peaks and the achieved fractions were
measured on the machine of ``docs/performance.md``. The peaks are 473 GFLOP/s in bfloat16, 946 GOP/s in int8, 236
GFLOP/s in float32, and 40 GB/s of reads. Linear layers achieve 85 % of the arithmetic peak or of the read rate. The
times of computing and reading are combined with an ``overlap`` of 2, because a batch of 8 takes longer than either
time. Attention achieves 55 % of the arithmetic peak over a prompt, and 73 % of the read rate in decode. The simulated
decode of the 160M model is within 20 % of the measurements in that page for int8 and bfloat16, and within 30 % for
int4. A recording of your own machine (``--recording``), or its fit, is much more accurate. For some models, the folder
``fits/`` has fits of that page's machine; they are used instead of this preset.
"""

from __future__ import annotations

from performance.simulation.device import DeviceRates

__all__ = ["ASCEND_910B", "CPU", "PRESETS"]

GIGA = 1e9
CUBE_FLOPS = 24 * 16 * 16 * 16 * 2 * 1.8e9
"""Operations per second of an Ascend 910B's matrix units in float16: cores x multiply-adds per cycle x 2 x clock."""

ASCEND_910B = DeviceRates(
    name="ascend-910b",
    operations_per_s={
        "float16": 0.7 * CUBE_FLOPS,
        "bfloat16": 0.7 * CUBE_FLOPS,
        "int8": 0.7 * 2 * CUBE_FLOPS,
        "float32": 0.7 * CUBE_FLOPS / 4,
    },
    attention_share=0.5,
    memory_bytes_per_s=0.8 * 1600 * GIGA,
    attention_bytes_per_s=0.6 * 1600 * GIGA,
    host_bytes_per_s=0.75 * 31.5 * GIGA,
    copy_bytes_per_s=0.5 * 0.8 * 1600 * GIGA,
    step_overhead_s=1.5e-3,
    sample_row_s=10e-6,
    kernel_launch_s=12e-6,
    kernels_per_layer=13,
    kernels_per_step=6,
    move_overhead_s=0.2e-3,
    block_overhead_s=10e-6,
)

CPU = DeviceRates(
    name="cpu",
    operations_per_s={
        "float16": 0.85 * 236 * GIGA,
        "bfloat16": 0.85 * 473 * GIGA,
        "int8": 0.85 * 946 * GIGA,
        "float32": 0.85 * 236 * GIGA,
    },
    attention_share=0.65,
    overlap=2.0,
    memory_bytes_per_s=0.85 * 40 * GIGA,
    attention_bytes_per_s=0.73 * 40 * GIGA,
    host_bytes_per_s=0.5 * 40 * GIGA,
    copy_bytes_per_s=0.5 * 40 * GIGA,
    step_overhead_s=0.6e-3,
    sample_row_s=15e-6,
    move_overhead_s=0.2e-3,
    block_overhead_s=5e-6,
)

PRESETS = {"cpu": CPU, "ascend-910b": ASCEND_910B}
