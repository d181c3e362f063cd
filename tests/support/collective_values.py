"""Makes the values that each agent adds or gathers in the tests of collective operations."""

from __future__ import annotations

from typing import Any

import numpy as np

from agent.weights.storage import from_float32

SIZES = (1, 7, 8, 1023, 65_536, 300_001)
DTYPES = ("float32", "float16", "bfloat16")


def contribution(index: int, dtype: str, size: int) -> Any:
    """Returns the values of one agent. Their float32 sum over the agents depends on the order of addition."""
    generator = np.random.default_rng(1000 * index + size)
    values = generator.standard_normal(size) * 10.0 ** generator.integers(-3, 4, size)
    return from_float32(values.astype(np.float32), dtype)
