"""Detects an Ascend, and whether the processor multiplies bfloat16. The values ``auto`` of a config depend on both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from llm_serving.config.model_section import ModelConfig
from llm_serving.model.number_formats import AUTO, weight_format

_CANN_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH")
_BFLOAT16_FEATURES = {"flags": "avx512_bf16", "Features": "bf16"}
"""Name of the line in /proc/cpuinfo that lists the features (x86-64 and Arm), and of the feature."""
_ISA_VARIABLE = "LLM_KERNELS_ISA"
_BFLOAT16_SETS = ("avx512_bf16", "avx512_amx", "neon_bf16")
"""The kernels' instruction sets that have products of bfloat16."""


class Hardware(NamedTuple):
    """The facts about a machine on which the values ``auto`` of a config depend."""

    ascend: bool
    """Whether the machine has an Ascend."""
    bfloat16: bool
    """Whether the kernels of the CPU multiply numbers of bfloat16 without converting them to float32."""

    @classmethod
    def detect(
        cls, environment: Mapping[str, str], ascend: bool | None = None, bfloat16: bool | None = None
    ) -> Hardware:
        """Detects the hardware of this machine. A value that is given, and not None, is not detected."""
        return cls(
            has_ascend(environment) if ascend is None else ascend,
            multiplies_bfloat16(environment) if bfloat16 is None else bfloat16,
        )

    def model_dtype(self, model: ModelConfig, op_table: str) -> str:
        """Returns ``model_dtype``, or the type that ``auto`` means with these operators.

        Weights in a float format have the type of the model. Native operators have no float32.
        """
        if model.model_dtype != AUTO:
            return model.model_dtype
        if model.weight_format != AUTO and weight_format(model.weight_format).is_float:
            return weight_format(model.weight_format).name
        return "bfloat16" if op_table == "native" or self.bfloat16 else "float32"


def has_ascend(environment: Mapping[str, str], devices: Path = Path("/dev")) -> bool:
    """Returns whether the machine has the device file of an NPU and an installed CANN.

    This function does not ask MindSpore, because the import of MindSpore takes long.
    """
    has_npu = any(file.name[len("davinci") :].isdigit() for file in devices.glob("davinci*"))
    return has_npu and any(Path(environment[name]).is_dir() for name in _CANN_VARIABLES if environment.get(name))


def multiplies_bfloat16(environment: Mapping[str, str], cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Returns whether the kernels use instructions that multiply numbers of bfloat16.

    They do if the processor has these instructions, unless the variable LLM_KERNELS_ISA chooses a set without them.
    """
    if environment.get(_ISA_VARIABLE):
        return environment[_ISA_VARIABLE] in _BFLOAT16_SETS
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    for line in lines:
        name, _, features = line.partition(":")
        feature = _BFLOAT16_FEATURES.get(name.strip())
        if feature is not None:
            return feature in features.split()
    return False
