"""Tests the operator ExpertMlp and how it routes tokens to experts.

Results are compared with float64. A row has the same bits in any step.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import pytest

from agent.kernels.library import load_library, set_threads, structure
from performance.kernels.attention_calls import EntryCall
from performance.kernels.calls import Array, load, store
from performance.kernels.library import load_testing_library
from performance.kernels.linear_calls import packed
from support.kernel_threads import threads_as_before

WIDTH, INNER, EPSILON = 48, 40, 1e-6
TOLERANCE = {"float32": 3e-6, "float16": 4e-3, "bfloat16": 3e-2}
RoutingArgs = structure("RoutingArgs", "pointer: logits ids weights; int64: rows experts chosen; bool: normalised")
"""A ctypes class with the members of llmk::RoutingArgs in ops/experts.h."""


def route(logits: Array, chosen: int, *, normalised: bool) -> tuple[Array, Array]:
    logits = np.ascontiguousarray(logits, np.float32)
    rows, experts = logits.shape
    ids, weights = np.full((rows, chosen), -7, np.int32), np.zeros((rows, chosen), np.float32)
    args = RoutingArgs(logits.ctypes.data, ids.ctypes.data, weights.ctypes.data, rows, experts, chosen, normalised)
    load_testing_library().llmk_test_route_tokens(ctypes.byref(args))
    return ids, weights


def exact_route(logits: Array, chosen: int, *, normalised: bool) -> tuple[Array, Array]:
    """Returns the chosen experts of each row and their weights, computed in float64.

    If logits are equal, the first of them is chosen first.
    """
    ids = np.argsort(-logits.astype(np.float32), axis=1, kind="stable")[:, :chosen]
    shares = np.exp(logits - logits.max(1, keepdims=True))
    weights = np.take_along_axis(shares / shares.sum(1, keepdims=True), ids, 1)
    return ids, weights / weights.sum(1, keepdims=True) if normalised else weights


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(("experts", "chosen"), [(1, 1), (5, 2), (8, 8), (128, 8)])
def test_routing_equals_float64(experts: int, chosen: int, normalised: bool) -> None:
    logits = np.random.default_rng(experts).standard_normal((33, experts)) * 3
    ids, weights = route(logits, chosen, normalised=normalised)
    wanted_ids, wanted = exact_route(logits, chosen, normalised=normalised)
    np.testing.assert_array_equal(ids, wanted_ids)
    np.testing.assert_allclose(weights, wanted, rtol=1e-5)
    assert (np.diff(weights, axis=1) <= 0).all(), "the most probable first"


def test_of_equals_the_first_is_chosen_and_nan_never() -> None:
    ids, weights = route(np.zeros((1, 6)), 3, normalised=True)
    assert ids.tolist() == [[0, 1, 2]]
    np.testing.assert_allclose(weights, 1 / 3, rtol=1e-6)
    ids, _ = route(np.array([[np.nan, 1.0, 2.0, 1.0]]), 2, normalised=True)
    assert len(set(ids[0].tolist())) == 2


class Experts:
    """Random weights of experts, and random input rows. Runs the operator, and computes the exact result."""

    def __init__(self, dtype: str, fmt: str, *, experts: int, chosen: int, normalised: bool, rows: int) -> None:
        rng = np.random.default_rng(3)
        self.dtype, self.chosen, self.normalised, self.experts = dtype, chosen, normalised, experts
        self.gamma = store(1 + rng.standard_normal(WIDTH) / 8, dtype)
        self.router = rng.standard_normal((experts, WIDTH)).astype(np.float32) * 0.4
        stored = dtype if fmt == "float" else "float32"
        self.gate_up = store(rng.standard_normal((experts, 2 * INNER, WIDTH)) / 6, stored)
        self.down = store(rng.standard_normal((experts, WIDTH, INNER)) / 6, stored)
        self.stored = stored
        fmt = dtype if fmt == "float" else fmt
        self.blobs = [self._blob(each, fmt, gated) for each, gated in ((self.gate_up, True), (self.down, False))]
        self.hidden, self.residual = (store(rng.standard_normal((rows, WIDTH)), dtype) for _ in range(2))

    def _blob(self, weights: Array, fmt: str, gated: bool) -> Array:
        group = 8 if fmt.startswith("int4") else 0
        blobs = [packed(fmt, each, group=group, gated=gated, source_dtype=self.stored) for each in weights]
        stride = -(-max(blob.size for blob in blobs) // 64) * 64
        raw = np.zeros(stride * len(blobs) + 64, np.uint8)
        out = raw[-raw.ctypes.data % 64 :][: stride * len(blobs)]
        for index, blob in enumerate(blobs):
            out[index * stride : index * stride + blob.size] = blob
        return out

    def run(self, rows: list[int], *, choice: list[int] | None = None, spare: int = 2) -> tuple[int, Array, Array]:
        """Runs the operator for some rows.

        Returns its status code (0 if it accepts its inputs), the experts' output, and the sum of hidden state and
        residual. The arrays have ``spare`` rows more than the step.
        """
        hidden = np.concatenate([self.hidden[rows], self.hidden[:spare]])
        residual = np.concatenate([self.residual[rows], self.residual[:spare]])
        out, total = np.full_like(hidden, 77), np.full_like(hidden, 77)
        choice = choice or [self.experts, self.chosen, int(self.normalised)]
        tensors = [
            (hidden, self.dtype), (residual, self.dtype), (self.gamma, self.dtype),
            (np.full(1, EPSILON, np.float32), None),
            (packed("float32", self.router), None), (self.blobs[0], None), (self.blobs[1], None),
            (np.array(choice, np.int32), None), (np.array([len(rows), 0, 0, 0], np.int32), None),
            (out, self.dtype), (total, self.dtype),
        ]  # fmt: skip
        return EntryCall(tensors).run(load_library().ExpertMlp), out, total

    def exact(self) -> npt.NDArray[np.float64]:
        """Returns the experts' output, computed in float64.

        Only the sum of hidden state and residual, and the row after the norm, are rounded to the type.
        """
        total = load(store(load(self.hidden, self.dtype) + load(self.residual, self.dtype), self.dtype), self.dtype)
        normed = total / np.sqrt((total * total).mean(-1, keepdims=True) + EPSILON) * load(self.gamma, self.dtype)
        normed = load(store(normed, self.dtype), self.dtype)
        ids, weights = exact_route(normed @ self.router.T, self.chosen, normalised=self.normalised)
        gate_up, down = load(self.gate_up, self.stored), load(self.down, self.stored)
        out = np.zeros_like(total)
        for row, (chosen, shares) in enumerate(zip(ids, weights, strict=True)):
            for expert, share in zip(chosen, shares, strict=True):
                gate, up = np.split(gate_up[expert] @ normed[row], 2)
                out[row] += share * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
        return out


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("experts", "chosen", "normalised"), [(8, 3, True), (5, 2, False), (1, 1, True)])
def test_equals_float64(dtype: str, experts: int, chosen: int, normalised: bool) -> None:
    made = Experts(dtype, "float", experts=experts, chosen=chosen, normalised=normalised, rows=20)
    code, out, total = made.run(list(range(20)))
    assert code == 0
    np.testing.assert_allclose(load(out[:20], dtype), made.exact(), rtol=0, atol=TOLERANCE[dtype])
    sums = store(load(made.hidden, dtype) + load(made.residual, dtype), dtype)
    np.testing.assert_array_equal(total[:20], sums)
    assert (out[20:] == 77).all(), "rows past the step's"
    assert (total[20:] == 77).all()


@pytest.mark.parametrize(
    ("fmt", "limit"), [("int8", 0.03), ("int8_weight_only", 0.02), ("int4", 0.2), ("int4_weight_only", 0.2)]
)
def test_quantised_experts_are_near(fmt: str, limit: float) -> None:
    made = Experts("float32", fmt, experts=6, chosen=2, normalised=True, rows=20)
    code, out, _ = made.run(list(range(20)))
    assert code == 0
    exact = made.exact()
    assert 0 < np.abs(out[:20] - exact).std() < limit * exact.std()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("fmt", ["float", "int8", "int4"])
def test_a_row_does_not_depend_on_the_others(dtype: str, fmt: str) -> None:
    """A row has equal bits alone, in another order, in a large step that runs in several pieces, and with other
    threads.
    """
    made = Experts(dtype, fmt, experts=8, chosen=3, normalised=True, rows=600)
    _, whole, _ = made.run(list(range(600)))
    with threads_as_before():
        for threads in (1, 3):
            set_threads(threads)
            for rows in ([7], [599, 7, 255, 256, 0], list(range(599, 300, -1))):
                _, out, _ = made.run(rows)
                np.testing.assert_array_equal(out[: len(rows)], whole[rows])


def test_a_step_without_rows_is_accepted() -> None:
    made = Experts("float32", "float", experts=4, chosen=2, normalised=True, rows=2)
    code, out, _ = made.run([])
    assert code == 0
    assert (out == 77).all()


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ([4, 5, 1], "5 experts of 4 are chosen; it must be from 1 to all"),
        ([4, 0, 1], "0 experts of 4 are chosen"),
        ([2, 1, 1], "the router must be a float32 weight of 2 columns and depth 48"),
        ([3, 1, 1], "it must be uint8, a multiple of 64 for each of 3 experts"),
    ],
)
def test_wrong_arguments_are_refused(choice: list[int], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    made = Experts("float32", "float", experts=4, chosen=2, normalised=True, rows=3)
    code, out, _ = made.run([0, 1, 2], choice=choice)
    assert code == 1
    assert message in capfd.readouterr().err
    assert (out == 77).all()


def test_an_experts_weight_of_another_shape_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    made = Experts("float32", "float", experts=4, chosen=2, normalised=True, rows=3)
    made.blobs.reverse()
    code, _, _ = made.run([0, 1, 2])
    assert code == 1
    assert "the weight of expert 0 has" in capfd.readouterr().err
