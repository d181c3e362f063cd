"""Reads and checks the settings of folders whose experts are MXFP4: 4-bit floats, of which 32 share a scale (gpt-oss).

``quantization_config`` has ``quant_method: mxfp4``. Only the matrices of experts are MXFP4; all other weights are
floats. ``agent.weights.mxfp4`` converts the matrices of experts to int8 with one scale per 32 inputs, without rounding.

Source: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

from llm_serving.formats.typed_fields import TypedFields

MXFP4 = "mxfp4"
"""Value of ``quant_method`` in ``quantization_config`` of folders whose experts are MXFP4."""
MXFP4_GROUP = 32
"""Number of consecutive inputs that share a scale."""
_EXPERTS = "experts"


def read_mxfp4(fields: TypedFields) -> None:
    """Checks a ``quantization_config`` of MXFP4. Raises an error if it lists experts among the unquantized modules."""
    for name in fields.names("modules_to_not_convert"):
        if _EXPERTS in name.split("."):
            raise fields.fail("modules_to_not_convert", f"{name} is not supported; the experts must be {MXFP4}")
