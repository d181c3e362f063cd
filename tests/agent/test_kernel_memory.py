"""Compares the memory that the kernels keep after the largest steps with the memory plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.forked_programs import run_forked
from support.json_program import printed_json
from support.sweeps import with_sweeps

PROGRAM = Path(__file__).with_name("kernel_memory_program.py")
SETUPS = (
    ("bfloat16", "fused", "auto", "1", "adapters"),
    ("float16", "fused", "int4", "3", "dense"),
    ("float32", "fused", "int8", "2", "experts"),
    ("bfloat16", "fused", "auto", "2", "latent"),
    ("bfloat16", "native", "auto", "2", "latent"),
    ("float32", "fused", "int8", "1", "latent"),
    ("float16", "native", "int4", "2", "int8 cache"),
    ("bfloat16", "native", "int8", "3", "experts"),
    ("bfloat16", "native", "auto", "1", "sinks"),
    ("float32", "fused", "auto", "2", "hybrid"),
)
REPEATED = (
    ("float16", "fused", "int4", "3", "dense"),
    ("float32", "fused", "int8", "2", "experts"),
    ("bfloat16", "native", "auto", "2", "latent"),
    ("float32", "fused", "int8", "1", "latent"),
)
"""Only ``make test-sweeps`` runs these setups. The others cover int4, experts, latent attention and native operators.
"""
LOOSEST = 4
"""Maximum ratio of planned to real memory. The plan assumes the instruction set and the step that need most memory."""


@pytest.mark.parametrize("setup", with_sweeps([(setup,) for setup in SETUPS], lambda setup: setup in REPEATED))
def test_the_kernels_keep_to_the_memory_plan(setup: tuple[str, ...], tmp_path: Path) -> None:
    held = printed_json(run_forked(PROGRAM, *setup, folder=tmp_path))
    for name, (num_bytes, planned) in held.items():
        assert num_bytes <= planned, name
    scratch, planned = held["kernel scratch"]
    assert scratch * LOOSEST > planned
    recorded, _ = held["replays"]
    assert recorded > 0
