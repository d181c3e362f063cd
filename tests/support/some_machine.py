"""A machine whose measured limits (ceilings) are round numbers, and a model shape, for tests of the benchmarks."""

from __future__ import annotations

from llm_serving.model.shape import ModelShape
from performance.bench.ceilings import REPOSITORY, Ceilings

CEILINGS = Ceilings(
    read_gb_s=40.0,
    paged_read_gb_s=30.0,
    bf16_gflops=400.0,
    int8_gops=800.0,
    fp32_gflops=200.0,
    threads=2,
    isa="test",
)
SHAPE = ModelShape.from_hf_folder(REPOSITORY / "models" / "shapes" / "llama_160m")
