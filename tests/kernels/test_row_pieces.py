"""Tests operators on many rows, which are divided among threads. The bits equal those of few rows on one thread."""

from __future__ import annotations

import numpy as np
import pytest

from agent.kernels.library import load_library, set_threads
from performance.kernels.attention_calls import EntryCall
from performance.kernels.calls import Array
from performance.kernels.linear_calls import packed
from support.kernel_calls import random_tensor
from support.kernel_threads import threads_as_before

WIDTH, INNER = 64, 96
MANY_ROWS = 777
"""More than 128 rows for each of the threads of these tests."""


class Layer:
    """Input rows, norm weights (gamma) and packed weights for the operators."""

    def __init__(self, fmt: str) -> None:
        rng = np.random.default_rng(7)
        self.hidden, self.residual = (random_tensor(rng, (MANY_ROWS, WIDTH), "bfloat16") for _ in range(2))
        self.gamma = random_tensor(rng, (WIDTH,), "bfloat16")

        def weight(columns: int, depth: int, *, gated: bool = False) -> Array:
            values = random_tensor(rng, (columns, depth), "bfloat16")
            group = 32 if fmt == "int4" else 0
            return packed(fmt, values, group=group, gated=gated, source_dtype="bfloat16")

        self.square, self.down = weight(WIDTH, WIDTH), weight(WIDTH, INNER)
        self.gate_up = weight(2 * INNER, WIDTH, gated=True)

    def run(self, entry: str, first: int, rows: int) -> list[Array]:
        """Returns the operator's results for ``rows`` rows, beginning with row ``first``."""
        hidden, residual = (each[first : first + rows].copy() for each in (self.hidden, self.residual))
        epsilon, counts = np.array([1e-6], np.float32), np.array([rows, 1, 1, 0], np.int32)
        normed = [(hidden, "bfloat16"), (residual, "bfloat16"), (self.gamma, "bfloat16"), (epsilon, None)]
        outs = [np.zeros_like(hidden) for _ in range(2)]
        inputs = {
            "PackedLinear": [(hidden, "bfloat16"), (self.square, None)],
            "AddNormLinear": [*normed, (self.square, None)],
            "GatedMlp": [*normed, (self.gate_up, None), (self.down, None)],
        }[entry]
        results = outs[:1] if entry == "PackedLinear" else outs
        call = EntryCall([*inputs, (counts, None), *((out, "bfloat16") for out in results)])
        assert call.run(getattr(load_library(), entry)) == 0
        return results


@pytest.mark.parametrize("fmt", ["bfloat16", "int8", "int4", "int8_weight_only"])
@pytest.mark.parametrize("entry", ["PackedLinear", "AddNormLinear", "GatedMlp"])
def test_many_rows_have_the_bits_of_few(fmt: str, entry: str) -> None:
    layer = Layer(fmt)
    with threads_as_before():
        set_threads(1)
        pieces = [layer.run(entry, first, min(100, MANY_ROWS - first)) for first in range(0, MANY_ROWS, 100)]
        for threads in (2, 3):
            set_threads(threads)
            for result, parts in zip(layer.run(entry, 0, MANY_ROWS), zip(*pieces, strict=True), strict=True):
                np.testing.assert_array_equal(result, np.concatenate(parts))
                assert result.any()
