"""Tests the program that measures the processor's ceilings.

Each loop still contains its multiplications, so the compiler has not moved them out of the loop.
"""

from __future__ import annotations

import re
import subprocess
from functools import cache

import pytest

from performance.bench.ceilings import PROGRAM, measure_ceilings

MULTIPLICATIONS = {
    "avx2": {"fma": ("vfmadd", 12), "dot_bf16": ("vfmadd", 12), "dot_int8": ("vpmaddwd", 12)},
    "avx2_vnni": {"fma": ("vfmadd", 12), "dot_bf16": ("vfmadd", 12), "dot_int8": ("{vex} vpdpbusd", 12)},
    "avx512": {"fma": ("vfmadd", 12), "dot_bf16": ("vfmadd", 12), "dot_int8": ("vpmaddwd", 24)},
    "avx512_vnni": {"fma": ("vfmadd", 12), "dot_bf16": ("vfmadd", 12), "dot_int8": ("vpdpbusd", 12)},
    "avx512_bf16": {"fma": ("vfmadd", 12), "dot_bf16": ("vdpbf16ps", 12), "dot_int8": ("vpdpbusd", 12)},
    "avx512_amx": {"fma": ("vfmadd", 12), "dot_bf16": ("tdpbf16ps", 4), "dot_int8": ("tdpbsud", 4)},
    "portable": {"fma": ("mulps", 24), "dot_bf16": ("mulps", 24), "dot_int8": ("pmuludq", 2 * 16)},
}
"""For each loop on x86: its multiply instruction, and the minimum number of them in one iteration."""


@cache
def functions() -> dict[str, list[tuple[int, str]]]:
    """Disassembles the program. Returns for each loop function the address and text of every instruction."""
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", str(PROGRAM)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, list[tuple[int, str]]] = {}
    name = ""
    for line in listing.splitlines():
        if header := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            name = header[1]
        elif "ceiling_" in name and (instruction := re.match(r" *([0-9a-f]+):\t(.*)$", line)):
            found.setdefault(name, []).append((int(instruction[1], 16), instruction[2]))
    return found


def loop_bodies(instructions: list[tuple[int, str]]) -> list[list[str]]:
    """Returns the loops of a function.

    Each loop is the list of instructions from the target of a backward jump to the jump.
    """
    bodies = []
    for address, text in instructions:
        if (jump := re.match(r"j\w+ +([0-9a-f]+)", text)) and int(jump[1], 16) < address:
            bodies.append([each for at, each in instructions if int(jump[1], 16) <= at <= address])
    return bodies


@pytest.mark.parametrize("isa", MULTIPLICATIONS)
@pytest.mark.parametrize("loop", ["fma", "dot_bf16", "dot_int8"])
def test_every_step_multiplies(isa: str, loop: str) -> None:
    instructions = functions().get(f"llmk::{isa}::ceiling_{loop}(long)")
    if instructions is None:
        pytest.skip(f"this build has no {isa}")
    wanted, count = MULTIPLICATIONS[isa][loop]
    most = max(sum(text.startswith(wanted) for text in body) for body in loop_bodies(instructions))
    assert most >= count, f"{most} {wanted} in the loop; a step needs {count}"


def test_the_program_prints_every_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("performance.bench.ceilings.ATTEMPT_SECONDS", 0.001)
    monkeypatch.setattr("performance.bench.ceilings.READ_MB", 8)
    ceilings = measure_ceilings(1)
    assert ceilings.threads == 1
    assert min(ceilings.read_gb_s, ceilings.paged_read_gb_s, ceilings.fp32_gflops) > 0
    assert min(ceilings.bf16_gflops, ceilings.int8_gops) > 0
