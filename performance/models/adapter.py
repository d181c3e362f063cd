"""Generates the matrices of seeded LoRA adapters. Golden files have the outputs that PEFT computes with these matrices
(``tools/make_lora_golden.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

ADAPTED = ("llama3_rope", "qwen3_next", "qwen3_5")
"""Names of the seeded models for which a LoRA adapter is made."""
SEED, SIZE = 11, 0.05
"""Seed and standard deviation of the matrices."""
NUM_TOKENS = 16
"""Number of greedy tokens that a golden file has for a model with an adapter."""


def seeded_tensors(shapes: Mapping[str, Sequence[int]]) -> dict[str, npt.NDArray[np.float32]]:
    """Returns the matrices of the adapter. ``shapes`` has their shapes by name, in the order of the names."""
    rng = np.random.default_rng(SEED)
    return {name: (rng.standard_normal(shape) * SIZE).astype(np.float32) for name, shape in shapes.items()}
