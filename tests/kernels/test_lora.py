"""Tests that fused operators add LoRA adapters: the arithmetic in every weight format, and the bits in any batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from agent.kernels import Argument, call_operator, kernel_isa
from agent.kernels.library import load_library
from agent.kernels.packing import pack_weight, packed_weight_bytes, weight_blob
from agent.lora.packed import PackedAdapter
from agent.lora.store import ModuleAdapter
from agent.weights.layout import WeightPart, WeightSpec
from llm_serving.lora.peft import rounded_to
from performance.kernels.calls import Array, load

DEPTH, COLUMNS, ROWS = 70, (56, 24, 24), 9
"""The columns are those of three joined layers. Their borders lie inside vectors of 16 columns."""
DEPTHS = (DEPTH, 71, 1056, 1088)
"""Depths of one part and of two parts of the sums with A. Depths are stored in pairs, so an odd depth has zeros at its
end. On AMX, the last two depths are whole tiles, of bfloat16 and of all formats."""
FORMATS = ("float32", "float16", "bfloat16", "int8", "int8_weight_only", "int4", "int4_weight_only")
SLOTS = [0, -1, 2, 1, 1, 0, -1, 3, 0]
"""The adapter slot of each row. Slot 3 has no adapter of the weight."""
RANKS = {0: (7, 4, 5), 1: (0, 20, 3), 2: (16, 16, 16)}
"""The ranks of the three layers in each slot. 0: the adapter does not change the layer. Ranks are stored in pairs. In
slot 0, the first ranks of the second and the third layer are second numbers of pairs."""


@dataclass
class Case:
    """A packed weight [columns, depth] with adapters."""

    weight: Array
    blob: Array
    spec: WeightSpec
    modules: dict[int, list[ModuleAdapter]]
    packed: list[PackedAdapter]

    def delta(self, x: Array, slots: Sequence[int]) -> Array:
        """Returns the numbers that the adapters add to the output of each row, in float64."""
        out = np.zeros((len(x), self.spec.shape[0]))
        for row, slot in enumerate(slots):
            for each in self.modules.get(slot, []):
                a, b = as_float(each.a, self.dtype), as_float(each.b, self.dtype)
                out[row, each.rows] += each.scale * (b @ (a @ x[row]))
        return out

    dtype: str = "float32"


def as_float(values: Array, dtype: str) -> Array:
    return load(values, dtype).astype(np.float64)


def parts(sizes: Sequence[int], depth: int) -> tuple[WeightPart, ...]:
    return tuple(WeightPart(f"part{index}", (size, depth)) for index, size in enumerate(sizes))


@pytest.fixture
def made() -> Iterator[list[Array]]:
    """Provides a list for the packed weights of a test. Their adapters are removed after the test."""
    blobs: list[Array] = []
    yield blobs
    for blob in blobs:
        for slot in range(4):
            load_library().llmk_set_adapter(blob.ctypes.data, slot, None)


def make(
    made: list[Array],
    fmt: str,
    dtype: str,
    sizes: Sequence[int] = COLUMNS,
    *,
    depth: int = DEPTH,
    gated: bool = False,
) -> Case:
    random = np.random.default_rng(5)
    spec = WeightSpec("weight", parts(sizes, depth), "gated_linear" if gated else "linear")
    weight = (random.standard_normal((sum(sizes), depth)) / 8).astype(np.float32)
    blob = weight_blob(packed_weight_bytes(fmt, *weight.shape))
    source = dtype_of(fmt)
    pack_weight(fmt, rounded_to(weight, source), blob, gated=gated, source_dtype=source)
    made.append(blob)
    case = Case(weight, blob, spec, {}, [], dtype)
    for slot, ranks in RANKS.items():
        starts = np.cumsum([0, *sizes])
        case.modules[slot] = [
            ModuleAdapter(
                slice(int(start), int(start) + size),
                scale=0.5 + slot,
                a=rounded_to((random.standard_normal((rank, depth)) / 8).astype(np.float32), dtype),
                b=rounded_to((random.standard_normal((size, rank)) / 4).astype(np.float32), dtype),
            )
            for start, size, rank in zip(starts, sizes, ranks, strict=False)
            if rank
        ]
        packed = PackedAdapter(spec, case.modules[slot], dtype)
        case.packed.append(packed)
        load_library().llmk_set_adapter(blob.ctypes.data, slot, packed.address)
    return case


def counts_of(slots: Sequence[int] | None, rows: int) -> Array:
    used = [-1] * rows if slots is None else list(slots)
    return np.array([rows, rows, 1, 0, sum(slot >= 0 for slot in used), *used], np.int32)


def tensor(array: Array, dtype: str) -> Argument:
    return Argument(array.ctypes.data, array.shape, dtype)


def linear(case: Case, x: Array, slots: Sequence[int] | None) -> Array:
    """Returns the float32 output of PackedLinear for rows with these adapters."""
    out, counts = np.zeros((len(x), case.spec.shape[0]), np.float32), counts_of(slots, len(x))
    call_operator("PackedLinear", [tensor(x, case.dtype), tensor(case.blob, "uint8"), tensor(counts, "int32"),
                                   tensor(out, "float32")])  # fmt: skip
    return out


def inputs(dtype: str, rows: int = ROWS, depth: int = DEPTH) -> Array:
    return rounded_to(np.random.default_rng(1).standard_normal((rows, depth)).astype(np.float32), dtype)


def dtype_of(fmt: str) -> str:
    return fmt if fmt in ("float16", "bfloat16") else "float32"


def tolerance(dtype: str, depth: int) -> float:
    """Returns the maximum error of the adapters' term. AMX rounds products with A to two bfloat16 numbers."""
    if depth < 1000:
        return 1e-5
    return 1e-4 if dtype == "bfloat16" and "amx" in kernel_isa() else 5e-5


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_each_row_gets_its_adapter(made: list[Array], fmt: str, depth: int) -> None:
    case = make(made, fmt, dtype_of(fmt), depth=depth)
    x = inputs(case.dtype, depth=depth)
    base, adapted = linear(case, x, None), linear(case, x, SLOTS)
    delta = case.delta(as_float(x, case.dtype), SLOTS)
    assert np.abs(delta).max() > 0.1
    np.testing.assert_allclose(adapted - base.astype(np.float64), delta, atol=tolerance(case.dtype, depth))
    without = [row for row, slot in enumerate(SLOTS) if slot in (-1, 3)]
    np.testing.assert_array_equal(adapted[without], base[without])


@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_without_adapters_keep_their_bits_in_a_deep_layer(made: list[Array], fmt: str) -> None:
    """With adapters, the kernel divides the depth of a panel, and prefetches parts of adapters in between."""
    depth = 700
    case = make(made, fmt, dtype_of(fmt), depth=depth)
    x = inputs(case.dtype, depth=depth)
    base, adapted = linear(case, x, None), linear(case, x, SLOTS)
    without = [row for row, slot in enumerate(SLOTS) if slot in (-1, 3)]
    np.testing.assert_array_equal(adapted[without], base[without])
    delta = case.delta(as_float(x, case.dtype), SLOTS)
    np.testing.assert_allclose(adapted - base.astype(np.float64), delta, atol=1e-4)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_row_has_the_same_bits_alone_and_among_others(made: list[Array], fmt: str, depth: int) -> None:
    case = make(made, fmt, dtype_of(fmt), depth=depth)
    x = np.concatenate([inputs(case.dtype, depth=depth)] * 5)
    # In the last three ranges, the kernel computes several rows with the same adapter together.
    slots = SLOTS * 2 + [0] * 7 + [2] * 13 + [1] * 7
    together = linear(case, x, slots)
    for row in range(len(x)):
        np.testing.assert_array_equal(linear(case, x[row : row + 1].copy(), slots[row : row + 1])[0], together[row])
    order = np.random.default_rng(2).permutation(len(x))
    mixed = linear(case, np.ascontiguousarray(x[order]), [slots[row] for row in order])
    np.testing.assert_array_equal(mixed, together[order])


@pytest.mark.parametrize("size", [1.0, 1e-35], ids=["normal", "near the smallest number"])
@pytest.mark.parametrize("rows", [5, 16, 17, 45, 300])
@pytest.mark.parametrize("slot", RANKS)
def test_rows_with_one_adapter_have_the_bits_of_each_row_alone(
    made: list[Array], slot: int, rows: int, size: float
) -> None:
    """Many rows with one bfloat16 adapter use tiles on AMX. A row alone, or among other adapters, uses vectors.

    Near the smallest number, some products are subnormal.
    """
    case = make(made, "bfloat16", "bfloat16", depth=1056)
    x = inputs("bfloat16", rows, 1056)
    x = rounded_to((as_float(x, "bfloat16") * size).astype(np.float32), "bfloat16")
    together = linear(case, x, [slot] * rows)
    for row in range(0, rows, 1 if rows < 100 else 23):
        np.testing.assert_array_equal(bits(linear(case, x[row : row + 1].copy(), [slot])[0]), bits(together[row]))
    others = [slot if row % 3 == 1 else (slot + 1) % 3 for row in range(rows)]
    mixed, same = linear(case, x, others), [row for row in range(rows) if row % 3 == 1]
    np.testing.assert_array_equal(bits(mixed[same]), bits(together[same]))


def bits(values: Array) -> Array:
    """Returns the bits of floats, because 0 and -0 differ only in their bits."""
    return values.view(np.uint32)


def test_an_output_is_rounded_after_the_addition(made: list[Array]) -> None:
    case = make(made, "bfloat16", "bfloat16")
    x, counts = inputs("bfloat16"), counts_of(SLOTS, ROWS)
    out = np.zeros((ROWS, sum(COLUMNS)), np.uint16)
    call_operator("PackedLinear", [tensor(x, "bfloat16"), tensor(case.blob, "uint8"), tensor(counts, "int32"),
                                   tensor(out, "bfloat16")])  # fmt: skip
    np.testing.assert_array_equal(out, rounded_to(linear(case, x, SLOTS), "bfloat16"))


@pytest.mark.parametrize("fmt", ["float32", "int8", "int4"])
def test_norm_and_mlp_use_the_float_activations(made: list[Array], fmt: str) -> None:
    """GatedMlp must equal its parts, one after the other: norm, gate and up layer, SwiGLU, down layer.

    The adapters of both layers read the activations before they are quantized.
    """
    inner = 48
    gate_up = make(made, "float32" if fmt == "float32" else fmt, "float32", (inner, inner), gated=True)
    down_spec = WeightSpec("down", parts((DEPTH,), inner), "linear")
    random = np.random.default_rng(8)
    down = weight_blob(packed_weight_bytes("float32", DEPTH, inner))
    down_weight = (random.standard_normal((DEPTH, inner)) / 8).astype(np.float32)
    pack_weight("float32", down_weight, down)
    made.append(down)
    a, b = random.standard_normal((3, inner)).astype(np.float32), random.standard_normal((DEPTH, 3)).astype(np.float32)
    packed = PackedAdapter(down_spec, [ModuleAdapter(slice(0, DEPTH), 0.25, a, b)], "float32")
    load_library().llmk_set_adapter(down.ctypes.data, 0, packed.address)
    x, gamma, epsilon = inputs("float32"), np.ones(DEPTH, np.float32), np.full(1, 1e-6, np.float32)
    zeros, out, total = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-6)

    def run(slots: Sequence[int] | None) -> Array:
        counts, floats = counts_of(slots, ROWS), "float32"
        call_operator("GatedMlp", [tensor(x, floats), tensor(zeros, floats), tensor(gamma, floats),
                                   tensor(epsilon, floats), tensor(gate_up.blob, "uint8"), tensor(down, "uint8"),
                                   tensor(counts, "int32"), tensor(out, floats), tensor(total, floats)])  # fmt: skip
        return out.astype(np.float64)

    if fmt == "float32":
        hidden = normed @ gate_up.weight.T + gate_up.delta(normed, SLOTS)
        gate, up = hidden[:, :inner], hidden[:, inner:]
        act = gate / (1 + np.exp(-gate)) * up
        expected = act @ down_weight.T
        has_down = np.array([slot == 0 for slot in SLOTS])[:, None]
        expected += has_down * 0.25 * ((act @ a.T) @ b.T)
        np.testing.assert_allclose(run(SLOTS), expected, atol=2e-4)
    together, base = run(SLOTS), run(None)
    changed = [row for row, slot in enumerate(SLOTS) if slot in RANKS]
    assert (np.abs(together[changed] - base[changed]).max(1) > 1e-2).all()
    others = [row for row in range(ROWS) if row not in changed]
    np.testing.assert_array_equal(together[others], base[others])
