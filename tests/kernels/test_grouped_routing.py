"""Compares ExpertMlp with float64.

The cases have DeepSeek's expert routers, shared experts, and only a part of the experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from agent.kernels.library import load_library
from performance.kernels.attention_calls import EntryCall
from performance.kernels.calls import Array
from performance.kernels.linear_calls import packed

WIDTH, INNER, SHARED, EXPERTS, CHOSEN, ROWS, EPSILON = 48, 16, 24, 12, 3, 40, 1e-6
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Router:
    """The rules by which experts are chosen. The fields have the names of agent/kernels/ops/grouped_routing.h."""

    sigmoid: bool = False
    groups: int = 1
    chosen_groups: int = 1
    corrected: bool = False
    normalised: bool = False
    factor: float = 1.5


ROUTERS = {
    "greedy": Router(),
    "group_limited_greedy": Router(groups=4, chosen_groups=2, factor=2.0),
    "noaux_tc": Router(sigmoid=True, groups=3, chosen_groups=2, corrected=True, normalised=True, factor=2.5),
}


class Model:
    """Random weights and input rows. Runs the operator on them, and computes the exact result."""

    def __init__(self) -> None:
        rng = np.random.default_rng(11)

        def normal(*shape: int, scale: float) -> Array:
            return (rng.standard_normal(shape) * scale).astype(np.float32)

        self.hidden, self.residual = (normal(ROWS, WIDTH, scale=1.0) for _ in range(2))
        self.gamma = 1 + normal(WIDTH, scale=0.1)
        self.router, self.correction = normal(EXPERTS, WIDTH, scale=0.3), normal(EXPERTS, scale=0.2)
        self.gate_up = normal(EXPERTS, 2 * INNER, WIDTH, scale=0.15)
        self.down = normal(EXPERTS, WIDTH, INNER, scale=0.3)
        self.shared = normal(2 * SHARED, WIDTH, scale=0.15), normal(WIDTH, SHARED, scale=0.2)

    def run(self, router: Router, first: int = 0, held: int = EXPERTS, *, shared: bool = True) -> tuple[int, Array]:
        """Returns the status code of the operator and its output.

        The weights contain only ``held`` experts, beginning with expert ``first``.
        """
        out, total = (np.full_like(self.hidden, 77) for _ in range(2))
        correction = self.correction if router.corrected else np.zeros(EXPERTS, np.float32)
        groups = [int(router.sigmoid), router.groups, router.chosen_groups, int(router.corrected)]
        tensors = [
            self.hidden, self.residual, self.gamma, np.full(1, EPSILON, np.float32), packed("float32", self.router),
            _stacked(self.gate_up[first : first + held], gated=True), _stacked(self.down[first : first + held]),
            np.array([EXPERTS, CHOSEN, router.normalised], np.int32), np.array([ROWS, 0, 0, 0], np.int32),
            np.array([*groups, first, held], np.int32), np.full(1, router.factor, np.float32), correction,
        ]  # fmt: skip
        if shared:
            tensors += [packed("float32", self.shared[0], gated=True), packed("float32", self.shared[1])]
        code = EntryCall([(each, None) for each in (*tensors, out, total)]).run(load_library().ExpertMlp)
        return code, out

    def exact(self, router: Router, first: int = 0, held: int = EXPERTS, *, shared: bool = True) -> Float64:
        """Returns the output, computed in float64.

        No two scores are equal, so an order of equal scores is not tested.
        """
        total = self.hidden.astype(np.float64) + self.residual
        x = total / np.sqrt((total * total).mean(1, keepdims=True) + EPSILON) * self.gamma
        logits = x @ self.router.T
        shares = np.exp(logits - logits.max(1, keepdims=True))
        scores = 1 / (1 + np.exp(-logits)) if router.sigmoid else shares / shares.sum(1, keepdims=True)
        rankings = scores + (self.correction if router.corrected else 0)
        by_group = np.sort(rankings.reshape(ROWS, router.groups, -1), axis=2)
        ranks = by_group[..., -2:].sum(2) if router.corrected else by_group[..., -1]
        best = np.argsort(-ranks, axis=1)[:, : router.chosen_groups]
        size, out = EXPERTS // router.groups, np.zeros_like(x)
        for row in range(ROWS):
            allowed = [group * size + index for group in best[row] for index in range(size)]
            chosen = sorted(allowed, key=lambda expert: -rankings[row, expert])[:CHOSEN]
            weights = scores[row, chosen] / (scores[row, chosen].sum() if router.normalised else 1)
            for expert, weight in zip(chosen, weights * router.factor, strict=True):
                if first <= expert < first + held:
                    out[row] += weight * _gated(x[row], self.gate_up[expert], self.down[expert])
            if shared:
                out[row] += _gated(x[row], *self.shared)
        return out


def _gated(x: Float64, gate_up: Array, down: Array) -> Float64:
    gate, up = np.split(gate_up @ x, 2)
    found: Float64 = down @ (gate / (1 + np.exp(-gate)) * up)
    return found


def _stacked(weights: Array, *, gated: bool = False) -> Array:
    blobs = [packed("float32", each, gated=gated) for each in weights]
    stride = -(-blobs[0].size // 64) * 64
    raw = np.zeros(stride * len(blobs) + 64, np.uint8)
    out = raw[-raw.ctypes.data % 64 :][: stride * len(blobs)]
    for index, blob in enumerate(blobs):
        out[index * stride : index * stride + blob.size] = blob
    return out


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", ROUTERS)
def test_equals_float64(name: str, shared: bool) -> None:
    made, router = Model(), ROUTERS[name]
    code, out = made.run(router, shared=shared)
    assert code == 0
    np.testing.assert_allclose(out, made.exact(router, shared=shared), rtol=0, atol=2e-5)


def test_every_router_chooses_differently() -> None:
    """The three expert routers choose different experts. Otherwise the test above could not distinguish them."""
    made = Model()
    outs = [made.run(router, shared=False)[1] for router in ROUTERS.values()]
    assert all(np.abs(a - b).max() > 0.1 for a, b in ((outs[0], outs[1]), (outs[1], outs[2])))


@pytest.mark.parametrize("name", ROUTERS)
def test_the_parts_of_two_agents_add_up(name: str) -> None:
    made, router = Model(), ROUTERS[name]
    parts = []
    for first, held in ((0, 5), (5, 7)):
        code, out = made.run(router, first, held, shared=False)
        assert code == 0
        np.testing.assert_allclose(out, made.exact(router, first, held, shared=False), rtol=0, atol=2e-5)
        parts.append(out)
    np.testing.assert_allclose(parts[0] + parts[1], made.run(router, shared=False)[1], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("router", "first", "held", "message"),
    [
        (Router(groups=5), 0, EXPERTS, "1 of 5 groups of 12 experts cannot give a token 3 experts"),
        (Router(groups=6), 0, EXPERTS, "1 of 6 groups of 12 experts cannot give a token 3 experts"),
        (Router(), 8, 5, "5 experts from 8 on are not within 12 experts"),
    ],
)
def test_wrong_calls_are_refused(
    router: Router, first: int, held: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out = Model().run(router, first, held)
    assert code == 1
    assert message in capfd.readouterr().err
    assert (out == 77).all()
