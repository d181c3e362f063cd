"""Tests that the code for other instruction sets compiles.

This build leaves these sets out, because this processor does not support them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from agent.kernels import compiled_sets
from support.time_limits import time_limit
from tools.kernel_build import COMPILE_FLAGS, INSTRUCTION_SETS, PARTS, SHARED_PARTS, part_flag, provider

ROOT = Path(__file__).resolve().parents[2]
COMPILER = os.environ.get("CXX", "g++")
ARM_COMPILER = "aarch64-linux-gnu-g++"


def check(source: Path, *flags: str, compiler: str = COMPILER) -> subprocess.CompletedProcess[str]:
    command = [compiler, *COMPILE_FLAGS, "-Werror", *flags, "-fsyntax-only", str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=time_limit(60))


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_a_set_that_was_not_compiled_has_no_errors(tmp_path: Path, isa: str) -> None:
    flags = INSTRUCTION_SETS[isa]
    empty = tmp_path / "empty.cc"
    empty.touch()
    if isa in compiled_sets() or check(empty, *flags).returncode != 0:
        pytest.skip("it is in the library, or the compiler does not know it")
    for part in PARTS:
        if provider(isa, part) == isa:
            process = check(ROOT / "agent/kernels/arch" / f"{isa}.cc", *flags, part_flag(f"part_{part}.h"))
            assert process.returncode == 0, process.stderr[-3000:]


@pytest.mark.skipif(shutil.which(ARM_COMPILER) is None, reason="there is no compiler for 64-bit Arm")
def test_operators_with_code_for_x86_have_no_warnings_on_arm() -> None:
    sources = [file for file in sorted((ROOT / "agent/kernels/ops").glob("*.cc")) if "__x86_64__" in file.read_text()]
    assert sources
    for source in sources:
        process = check(source, compiler=ARM_COMPILER)
        assert process.returncode == 0, process.stderr[-3000:]


@pytest.mark.parametrize("isa", SHARED_PARTS)
def test_a_shared_part_needs_no_other_instructions(isa: str) -> None:
    """A processor that runs a set also runs the parts that the set takes from other sets."""
    for other in SHARED_PARTS[isa].values():
        for flag in INSTRUCTION_SETS[other]:
            assert any(own.startswith(flag) for own in INSTRUCTION_SETS[isa]), (other, flag)
