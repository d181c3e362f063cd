"""The CPU kernels: one shared library, used as MindSpore op plugin, as AOT custom ops and through ctypes."""

from agent.kernels.library import (
    KernelsNotBuiltError,
    SampleInputs,
    SampleOutputs,
    kernel_isa,
    library_path,
    num_threads,
    sample,
    set_threads,
)

__all__ = [
    "KernelsNotBuiltError",
    "SampleInputs",
    "SampleOutputs",
    "kernel_isa",
    "library_path",
    "num_threads",
    "sample",
    "set_threads",
]
