"""Cross-compiles the kernels for 64-bit Arm and runs their self-test in qemu-user, for each instruction set.

    python tools/check_arm_kernels.py

The tool needs Debian's g++-aarch64-linux-gnu and qemu-user-static. The exit code is 1 if a comparison is wrong.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "agent/kernels"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-Wall", "-Wextra", "-Wno-psabi")
INSTRUCTION_SETS = {"neon_dot": "-march=armv8.2-a+dotprod", "neon_i8mm": "-march=armv8.2-a+dotprod+i8mm"}
"""Compiler option of each Arm instruction set. setup.py uses the same options."""


def units() -> list[tuple[Path, list[str]]]:
    """Returns the source files of the self-test, each with its compiler options. None of them needs MindSpore."""
    sources = [KERNELS / "arch/portable.cc", *sorted((KERNELS / "common").glob("*.cc"))]
    sources += sorted((KERNELS / "ops").glob("*.cc"))
    sources += sorted((ROOT / "performance/kernels").glob("*reference.cc"))
    sources += [ROOT / "tests/kernels/linear_selftest.cc"]
    plain = [(source, ["-Wno-unused-function"]) for source in sources]
    have = ["-DLLMK_INSTRUCTION_SETS(X)=X(neon_i8mm) X(neon_dot) X(portable)"]
    special = [(KERNELS / f"arch/{name}.cc", [flag, "-Wno-unused-function"]) for name, flag in INSTRUCTION_SETS.items()]
    return [*plain, *special, (KERNELS / "arch/dispatch.cc", have)]


def build(folder: Path) -> Path:
    """Builds the self-test of the kernels in ``folder``, as a static program, and returns its path."""

    def compile_unit(unit: tuple[Path, list[str]]) -> Path:
        source, flags = unit
        output = folder / f"{source.parent.name}_{source.stem}.o"
        subprocess.run([COMPILER, *FLAGS, *flags, "-c", str(source), "-o", str(output)], check=True)
        return output

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_unit, units()))
    program = folder / "selftest"
    subprocess.run([COMPILER, "-static", "-pthread", *map(str, objects), "-o", str(program)], check=True)
    return program


def main() -> int:
    missing = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
    if missing:
        print(f"not found: {', '.join(missing)}; install g++-aarch64-linux-gnu and qemu-user-static")
        return 2
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        for isa in (*INSTRUCTION_SETS, "portable"):
            environment = {**os.environ, "LLM_KERNELS_ISA": isa}
            command = [EMULATOR, "-cpu", "max", str(program)]
            failed += subprocess.run(command, env=environment, check=False).returncode != 0
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
