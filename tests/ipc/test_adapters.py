"""Tests the shared memory in which the server gives an adapter to the agents."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from llm_serving.errors import ProtocolError
from llm_serving.ipc.adapters import AdapterMemory

RANDOM = np.random.default_rng(0)
MODULES = [
    ("model.layers.0.self_attn.q_proj", 2.0, RANDOM.random((3, 16), np.float32), RANDOM.random((8, 3), np.float32)),
    ("model.layers.0.mlp.up_proj", 0.5, RANDOM.random((1, 5), np.float32), RANDOM.random((7, 1), np.float32)),
]


def test_an_agent_reads_what_the_server_wrote() -> None:
    memory = AdapterMemory.create(MODULES)
    try:
        attached = AdapterMemory.attach(memory.name, memory.num_bytes, np.float32)
        for (name, scale, a, b), (module, a_read, b_read) in zip(MODULES, attached.modules(), strict=True):
            assert (module.name, module.scale) == (name, scale)
            np.testing.assert_array_equal(a_read, a)
            np.testing.assert_array_equal(b_read, b)
            assert a_read.ctypes.data % 64 == b_read.ctypes.data % 64 == 0
        with pytest.raises(ProtocolError, match="bytes"):
            AdapterMemory.attach(memory.name, memory.num_bytes - 1, np.float32)
    finally:
        memory.close()


@pytest.mark.parametrize("start", [bytes(8), b"\xff" * 8, (1).to_bytes(8, "little") + b"\xc1"])
def test_damaged_memory_is_refused(start: bytes) -> None:
    mapping = mmap.mmap(-1, 4096)
    mapping[: len(start)] = start
    with pytest.raises(ProtocolError, match="damaged"):
        AdapterMemory("memory", mapping, np.float32).modules()
