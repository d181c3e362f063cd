"""Reads and checks the settings of folders whose weights are 8-bit floats with a scale for each block (DeepSeek V3).

``quantization_config`` has ``quant_method: fp8``, ``fmt: e4m3`` and ``weight_block_size``. The weights become floats
when they are loaded (``agent.weights.float8``). All other code treats this folder as a folder of floats.

Source: deepseek-ai/DeepSeek-V3, ``README_WEIGHTS.md`` and ``inference/fp8_cast_bf16.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from llm_serving.formats.typed_fields import TypedFields

FLOAT8 = "fp8"
"""Value of ``quant_method`` in ``quantization_config`` of folders with 8-bit floats."""
MAX_BLOCK = 65_536
"""Maximum height and width of a block of weights that share a scale."""


@dataclass(frozen=True, slots=True)
class Float8Blocks:
    """The size of the blocks of a weight [outputs, inputs]. All elements of a block share a scale."""

    rows: int
    columns: int


def read_float8(fields: TypedFields) -> Float8Blocks:
    """Returns the blocks that a ``quantization_config`` states. Raises an error for settings that are not supported."""
    fields.text("fmt", "e4m3", ("e4m3",))
    fields.text("activation_scheme", "dynamic", ("dynamic",))
    size = fields.value("weight_block_size")
    problem = f"must be two integers from 1 to {MAX_BLOCK}, such as [128, 128]; a scale for a whole weight is not read"
    if not isinstance(size, list) or len(size) != 2:
        raise fields.fail("weight_block_size", problem)
    rows, columns = size
    if not all(type(each) is int and 1 <= each <= MAX_BLOCK for each in size):
        raise fields.fail("weight_block_size", problem)
    return Float8Blocks(rows, columns)
