"""Tests how much free memory a process keeps. Each case needs a new process, because the limits apply to a whole
process.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from llm_serving.registry.freeing import MAX_FREE_BYTES
from support.small_configs import REPOSITORY

BODY_BYTES = 6 << 20
PROGRAM = f"""
import ctypes
import sys
sys.path.insert(0, {str(REPOSITORY)!r})
from llm_serving.registry.freeing import limit_free_memory
if sys.argv[1] == "limited":
    limit_free_memory()
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
def size():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
bytes({2 * BODY_BYTES})
before = size()
bodies = [b"a" * {BODY_BYTES} for _ in range(5)]
library.malloc(500_000)  # a block that stays, after the bodies
del bodies
print(size() - before)
"""


@pytest.mark.parametrize("limits", ["limited", "default"])
def test_a_process_returns_the_memory_of_large_bodies(limits: str) -> None:
    done = subprocess.run([sys.executable, "-S", "-c", PROGRAM, limits], capture_output=True, check=True, text=True)
    kept = int(done.stdout)
    if limits == "limited":
        assert kept <= MAX_FREE_BYTES
    else:
        assert kept > 2 * MAX_FREE_BYTES, "the C library has better defaults now: remove limit_free_memory"
