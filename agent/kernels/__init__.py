"""Calls the CPU kernels from Python, through ctypes.

MindSpore loads the same shared library for two purposes: as its op plugin, and to run this project's custom operators.
"""

from agent.kernels.block_copies import BlockCopies
from agent.kernels.hand_blocks import BlockHandOvers, block_checksum
from agent.kernels.launches import (
    RecordedLaunches,
    RecordingError,
    StepSizes,
    record,
    record_any_size,
    recordings_bytes,
)
from agent.kernels.library import (
    KernelError,
    KernelsNotBuiltError,
    OperatorRefusedError,
    compiled_sets,
    has_failed,
    hold_failures,
    kernel_isa,
    library_path,
    num_threads,
    scratch_bytes,
    set_alone,
    set_attentive,
    set_spinning,
    set_threads,
    take_failure,
    widen_bfloat16,
)
from agent.kernels.operators import Argument, call_operator
from agent.kernels.sample_call import (
    SAMPLE_INPUTS,
    Candidates,
    SampleCall,
    SampleInputs,
    SampleOutputs,
    uniform_numbers,
)
from agent.kernels.step_copy import ADAPTERS, StepArrays, StepBounds, StepBuffers, StepCopy

__all__ = [
    "ADAPTERS",
    "SAMPLE_INPUTS",
    "Argument",
    "BlockCopies",
    "BlockHandOvers",
    "Candidates",
    "KernelError",
    "KernelsNotBuiltError",
    "OperatorRefusedError",
    "RecordedLaunches",
    "RecordingError",
    "SampleCall",
    "SampleInputs",
    "SampleOutputs",
    "StepArrays",
    "StepBounds",
    "StepBuffers",
    "StepCopy",
    "StepSizes",
    "block_checksum",
    "call_operator",
    "compiled_sets",
    "has_failed",
    "hold_failures",
    "kernel_isa",
    "library_path",
    "num_threads",
    "record",
    "record_any_size",
    "recordings_bytes",
    "scratch_bytes",
    "set_alone",
    "set_attentive",
    "set_spinning",
    "set_threads",
    "take_failure",
    "uniform_numbers",
    "widen_bfloat16",
]
