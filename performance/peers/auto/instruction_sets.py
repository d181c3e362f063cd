"""Limits this server and its peers to an instruction set, for ``compare_peers.py --auto --isa``.

A limited program uses the code that it has for processors without newer instructions. Environment variables limit some
programs, and a build for the instruction set limits others. A library hides the newer instructions from the rest
(``hide_avx512.c``). The driver of each peer checks that no thread used AVX-512.

To add an instruction set, add an entry to ``LIMITS``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from performance.peers.driver import FORBIDS_AVX512
from performance.program import LoadTestError

SOURCE = Path(__file__).with_name("hide_avx512.c")
CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Limit:
    """Describes how each program is limited to an instruction set. The keys are names as in ``Program.kind``."""

    environments: Mapping[str, Mapping[str, str]]
    """Environment variables of the programs. ``{folder}`` in a value is the comparison's folder."""
    builds: Mapping[str, Mapping[str, str]]
    """Environment variables for pip. A peer of this table has an environment of its own for the instruction set."""
    hidden: frozenset[str]
    """Programs that the library of ``hide_avx512.c`` limits, because they choose some code by the processor alone."""


_C_LIBRARY = {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW,-AVX512DQ,-AVX512CD"}
_NUMPY = {"NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR X86_V4"}
"""The features have other names since numpy 2.4. A version ignores names that it does not know."""
LIMITS = {
    "avx2": Limit(
        environments={
            "ours": {"LLM_KERNELS_ISA": "avx2", **_C_LIBRARY, **_NUMPY},
            "llama_cpp": {FORBIDS_AVX512: "1", **_C_LIBRARY, **_NUMPY},
            # OV_CPU_MAX_ISA limits OpenVINO's own kernels, and the other variable limits those of oneDNN
            "openvino": {
                "OV_CPU_MAX_ISA": "AVX2",
                "ONEDNN_MAX_CPU_ISA": "AVX2",
                FORBIDS_AVX512: "1",
                **_C_LIBRARY,
                **_NUMPY,
            },
            # vLLM keeps compiled code in these folders. Its usual folders may have code with AVX-512
            "vllm": {
                "VLLM_CACHE_ROOT": "{folder}/vllm_avx2_cache",
                "TORCHINDUCTOR_CACHE_DIR": "{folder}/vllm_avx2_cache/inductor",
                FORBIDS_AVX512: "1",
                **_C_LIBRARY,
            },
        },
        builds={
            "llama_cpp": {
                "CMAKE_ARGS": "-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON"
            }
        },
        hidden=frozenset({"vllm"}),
    )
}
"""The limits by name of the instruction set. The names are those of ``LLM_KERNELS_ISA``."""


def limited_environment(isa: str | None, kind: str, folder: Path) -> dict[str, str]:
    """Returns the environment variables that limit a program. Compiles the library that it needs into ``folder``.

    Without a limit (``isa`` is None), there are none. Raises LoadTestError if the library cannot be compiled.
    """
    if isa is None:
        return {}
    limit = LIMITS[isa]
    variables = {name: value.format(folder=folder) for name, value in limit.environments[kind].items()}
    if kind in limit.hidden:
        variables["LD_PRELOAD"] = str(_library(folder))
    return variables


def limited_build(isa: str | None, kind: str) -> Mapping[str, str] | None:
    """Returns the variables with which pip builds a peer for the instruction set. None if there is no such build."""
    return None if isa is None else LIMITS[isa].builds.get(kind)


def reason_left_out(isa: str | None, kind: str) -> str | None:
    """Returns the reason why this machine cannot limit a program to the instruction set, or None if it can."""
    if isa is None or kind not in LIMITS[isa].hidden:
        return None
    flags = next((line for line in CPUINFO.read_text(encoding="utf-8").splitlines() if line.startswith("flags")), "")
    if "cpuid_fault" not in flags.split():
        return f"it chooses its code by the processor, and without cpuid_fault nothing hides more than {isa} from it"
    if shutil.which(_compiler()) is None:
        return f"it chooses its code by the processor, and the library that hides more than {isa} needs a C compiler"
    return None


@contextmanager
def environment_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables of this process and of its later children for the ``with`` block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _library(folder: Path) -> Path:
    """Compiles ``hide_avx512.c`` into ``folder``, and returns the path of the library."""
    target = folder / f"lib{SOURCE.stem}.so"
    command = [_compiler(), "-O2", "-shared", "-fPIC", "-o", str(target), str(SOURCE), "-ldl"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        problem = f"{SOURCE.name} could not be compiled; {command[0]} ended with {done.returncode}"
        raise LoadTestError(f"{problem}:\n{done.stdout}")
    return target


def _compiler() -> str:
    return os.environ.get("CC") or "cc"
