"""Tests how much free memory a process keeps. Each case needs a new process, because the limits apply to a whole
process.
"""

from __future__ import annotations

import subprocess
import sys
from unittest.mock import Mock

import pytest

from llm_serving.registry import freeing
from llm_serving.registry.freeing import LARGE_BYTES, MAX_FREE_BYTES
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


PINNED = f"""
import asyncio
import ctypes
import sys
import threading
sys.path.insert(0, {str(REPOSITORY)!r})
from llm_serving.registry import freeing
freeing.limit_free_memory()
freeing.TRIM_S = 0.0
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.malloc.argtypes = [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
def size():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
def use_heap():
    blocks = [library.malloc(500_000) for _ in range(20)]
    for block in blocks:
        ctypes.memset(block, 1, 500_000)
    library.malloc(5_000)  # a block that stays, after the others
    for block in blocks:
        library.free(block)
async def returned(num_bytes):
    freeing.LargeBodies().note(num_bytes)
    for _ in range(3):  # starts the timer, runs its function, and waits for the thread
        await asyncio.sleep(0)
        await asyncio.get_running_loop().run_in_executor(None, int)
    await asyncio.get_running_loop().shutdown_default_executor()
before = size()
thread = threading.Thread(target=use_heap)
thread.start()
thread.join()
asyncio.run(returned(int(sys.argv[1])))
print(size() - before)
"""


@pytest.mark.parametrize("body_bytes", [LARGE_BYTES - 1, LARGE_BYTES])
def test_after_a_large_body_the_heaps_of_all_threads_are_returned(body_bytes: int) -> None:
    """A block in use at the end of a thread's heap keeps the C library from returning 10 MB on its own."""
    command = [sys.executable, "-S", "-c", PINNED, str(body_bytes)]
    kept = int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert (kept < 5_000_000) == (body_bytes >= LARGE_BYTES), kept


def test_large_bodies_in_short_intervals_do_not_delay_the_return_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is returned at the latest ``TRIM_S`` after each body, and once more after the last body."""
    loop, bodies = Mock(), freeing.LargeBodies()
    monkeypatch.setattr(freeing.asyncio, "get_running_loop", lambda: loop)
    bodies.note(LARGE_BYTES)
    bodies.note(LARGE_BYTES)
    [((delay, fire), _)] = loop.call_later.call_args_list
    assert delay == freeing.TRIM_S
    fire()
    assert (loop.call_later.call_count, loop.run_in_executor.call_count) == (2, 1)
    fire()
    assert (loop.call_later.call_count, loop.run_in_executor.call_count) == (2, 2)
    bodies.note(LARGE_BYTES)
    assert loop.call_later.call_count == 3
