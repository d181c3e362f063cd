"""Compares the tokens that the graph ``draws`` chooses on a device with those of the host's sampler.

test_plugin_semantics.py runs this file under pytest in its own process, which has the op plugin.
"""

from __future__ import annotations

import os
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

from agent.kernels.library import library_path

os.environ["MS_OP_PLUGIN_PATH"] = str(library_path())

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from test_candidates import ROWS, K, Sampling, as_bfloat16, candidates_of

from agent.device_sampling import draws, draws_cell
from agent.run_ahead.draws import draw_parameters

ms.set_context(mode=ms.GRAPH_MODE, jit_config={"jit_level": "O0"})
ms.set_device("CPU")

SEEDS = 4
VOCABULARY = 1500


@cache
def graph(num_candidates: int, parts: int) -> nn.Cell:
    """Makes the graph of one of ``parts`` agents. The agents do not agree on tokens, because there is only one."""
    parallel = SimpleNamespace(tensor_parallel=parts)
    part: Any = SimpleNamespace(is_split=parts > 1, parallel=parallel, vocab_stride=-(-VOCABULARY // parts))
    with mock.patch.object(draws, "_OfFirstAgent", return_value=None):
        return draws_cell(num_candidates, part)


def chosen(best: Any, found: Any, parameters: Any) -> Any:
    """Runs the graph with the candidates of all agents. Returns the token of each row."""
    parts, _, count = found.values.shape
    values, ids = (Tensor(each.reshape(-1, count)) for each in (found.values, found.ids))
    masses = Tensor(found.scaled_sums.reshape(-1))
    return graph(count, parts)(values, ids, Tensor(best), masses, Tensor(parameters)).asnumpy()


def settings(rng: np.random.Generator) -> dict[str, Any]:
    """Returns parameters of rows that a device may draw, and a temperature of 0 for some rows."""
    return {
        "temperature": rng.choice(np.array([0, 0.05, 0.7, 1, 1.5, 2], np.float32), ROWS),
        "top_k": rng.choice([1, 2, 5, 20, 50, 63, 64], ROWS),
        "top_p": rng.choice(np.array([1, 1, 0, 1e-6, 0.3, 0.8, 0.95, 0.999], np.float32), ROWS),
        "min_p": rng.choice(np.array([0, 0, 0, 0.02, 0.2, 1], np.float32), ROWS),
        "seed": rng.integers(0, 2**63, ROWS),
        "sample_position": rng.integers(0, 1000, ROWS),
    }


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("rounding", [np.float32, as_bfloat16])
@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0, 30.0])
def test_draws_are_those_of_the_host(spread: float, rounding: Any, parts: int) -> None:
    """Draws tokens with all parameters, from candidates whose equal logits are in random order.

    A sum that is rounded to float32 may choose another token, but only rarely. Rows that the host cannot decide by the
    candidates are left out.
    """
    different = compared = 0
    for seed in range(SEEDS):
        rng = np.random.default_rng([seed, int(spread * 100)])
        logits = rounding((rng.standard_normal((ROWS, VOCABULARY)) * spread).astype(np.float32))
        sampling = Sampling(logits, settings(rng), [], [])
        sampling.histories = {}
        wanted, (_, undecided) = sampling.whole().sampled_ids, sampling.of_candidates(parts)
        temperature = sampling.inputs["temperature"]
        best, _, found = candidates_of(sampling.logits, temperature, parts, rng)
        slot: Any = SimpleNamespace(num_seqs=ROWS, arrays=sampling.inputs)
        got = chosen(best, found, draw_parameters(slot, temperature > 0))
        np.testing.assert_array_equal(got[temperature == 0], best[temperature == 0])
        different += int((got != wanted)[~undecided].sum())
        compared += int((~undecided).sum())
    assert compared > ROWS * SEEDS // 8
    assert different <= 1, f"{different} of {compared} tokens are not those of the host"


@pytest.mark.parametrize(
    ("filters", "most"),
    [
        ({"top_p": 1, "min_p": 0}, 0.001),
        ({"top_p": 1, "min_p": 0.02}, 0.001),
        # If a nucleus ends behind the candidates, the device does not know the weight of its last token.
        ({"top_p": 0.9, "min_p": 0}, 0.02),
    ],
)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("spread", [2.0, 4.0])
def test_draws_among_all_tokens_are_those_of_the_host(
    spread: float, parts: int, filters: dict[str, float], most: float
) -> None:
    """Draws tokens of sequences without ``top_k``.

    The result is 0 if the drawn token is no candidate. Rows that the host cannot decide by K candidates are left out.
    """
    different = compared = outside = 0
    for seed in range(SEEDS):
        rng = np.random.default_rng([seed, int(spread * 100), 9])
        logits = (rng.standard_normal((ROWS, VOCABULARY)) * spread).astype(np.float32)
        numbers = {"seed": rng.integers(0, 2**63, ROWS), "sample_position": rng.integers(0, 1000, ROWS)}
        sampling = Sampling(logits, {"temperature": 0.8, "top_k": 0} | filters | numbers, [], [])
        sampling.histories = {}
        wanted, (_, undecided) = sampling.whole().sampled_ids, sampling.of_candidates()
        best, _, found = candidates_of(sampling.logits, sampling.inputs["temperature"], parts, rng)
        slot: Any = SimpleNamespace(num_seqs=ROWS, arrays=sampling.inputs)
        got = chosen(best, found, draw_parameters(slot, np.ones(ROWS, np.bool_)))
        ranks = (sampling.logits > sampling.logits[np.arange(ROWS), wanted][:, None]).sum(axis=1)
        different += int((got != wanted)[~undecided].sum())
        compared += int((~undecided).sum())
        assert not got[ranks >= K].any(), "a token that is no candidate"
        outside += int((ranks >= K).sum())
    assert compared > ROWS * SEEDS // 4
    assert outside > 0 or spread > 2
    assert different <= max(1, most * compared), f"{different} of {compared} tokens are not those of the host"


@pytest.mark.parametrize("parts", [1, 3])
def test_any_logits_give_a_token_id(parts: int) -> None:
    """A token id that does not exist would make the next step fail, also that of other sequences."""
    values = np.array([[np.nan] * K, [np.inf] * K, [-np.inf] * K, [*range(K - 1, 0, -1), np.nan]], np.float32)
    ids, masses = np.broadcast_to(np.arange(7, 7 + K), (1, 4, K)).copy(), np.array([[np.nan, np.inf, 0, 1]], np.float32)
    ids, masses = np.broadcast_to(ids, (parts, 4, K)).copy(), np.broadcast_to(masses, (parts, 4)).copy()
    found = SimpleNamespace(values=np.broadcast_to(values, (parts, 4, K)).copy(), ids=ids, scaled_sums=masses)
    for top_k in (20, 0):
        inputs = Sampling(values, {"temperature": 0.7, "top_k": top_k}, [], []).inputs
        slot: Any = SimpleNamespace(num_seqs=4, arrays=inputs)
        tokens = chosen(np.full(4, 7, np.int32), found, draw_parameters(slot, np.ones(4, np.bool_)))
        size = VOCABULARY // parts
        assert all(token == 0 or 7 <= token % size < 7 + K for token in tokens.tolist()), tokens
        assert tokens.max() < VOCABULARY
