"""Tests sampling from the device's best candidates.

The sampler chooses the same token as from whole logits, or reports that it needs whole logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from agent.kernels.library import KernelError
from agent.kernels.sample_call import SAMPLE_INPUTS, Candidates, SampleCall, SampleOutputs
from llm_serving.ipc.shm import NOT_FINITE
from llm_serving.sampling_params import MAX_TOP_LOGITS, SAMPLER_PARAMETERS

Array = npt.NDArray[Any]
K = 64
ROWS = 50


def as_bfloat16(values: Array) -> Array:
    """Rounds logits towards zero to bfloat16, so that many of them are equal."""
    return (values.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def candidates_of(logits: Array, temperature: Array, parts: int = 1, rng: np.random.Generator | None = None) -> Any:
    """Returns the best ids, the best values and the candidates of each row, as a device computes them.

    Candidates with equal logits are in the order of their ids. If ``rng`` is given, they are in random order.
    """
    rows, vocab = logits.shape
    size = -(-vocab // parts)
    count = min(K, vocab - (parts - 1) * size)
    found: dict[str, list[Array]] = {name: [] for name in ("values", "ids", "sums", "scaled_sums")}
    divisor = np.where(temperature > 0, temperature, 1).astype(np.float32)[:, None]
    for part in range(parts):
        own = logits[:, part * size : (part + 1) * size]
        ties = np.broadcast_to(np.arange(own.shape[1]), own.shape)
        if rng is not None:
            ties = rng.permuted(ties, axis=1)
        ids = np.array([_largest(*row, count) for row in zip(own, ties, strict=True)])
        scaled = own / divisor
        found["ids"].append(ids)
        found["values"].append(np.take_along_axis(own, ids, 1))
        for name, values in (("sums", own), ("scaled_sums", scaled)):
            exps = np.exp(values - values.max(1, keepdims=True), dtype=np.float32)
            found[name].append(exps.astype(np.float64).sum(1).astype(np.float32))
    arrays = {name: np.ascontiguousarray(np.stack(values)) for name, values in found.items()}
    best = logits.argmax(1).astype(np.int32)
    return best, logits[np.arange(rows), best], Candidates(**arrays, part_size=size)


def _largest(values: Array, ties: Array, count: int) -> Array:
    """Returns the places of the ``count`` largest values. Equal values are in the order of ``ties``, NaN comes last."""
    least = np.partition(-values, count - 1)[count - 1]
    places = np.arange(values.size) if np.isnan(least) else np.flatnonzero(-values <= least)
    found: Array = places[np.lexsort((ties[places], -values[places]))[:count]]
    return found


def random_settings(rng: np.random.Generator, rows: int) -> dict[str, Array]:
    return {
        "temperature": rng.choice(np.array([0, 0.05, 0.7, 1, 1.5], np.float32), rows),
        "top_k": rng.choice([0, 0, 1, 5, 20, 50, 64, 200, 5000, 1 << 20], rows),
        "top_p": rng.choice(np.array([1, 1, 0, 0.3, 0.8, 0.95, 0.999], np.float32), rows),
        "min_p": rng.choice(np.array([0, 0, 0, 0.02, 0.2, 1], np.float32), rows),
        "repetition_penalty": rng.choice(np.array([1, 1, 1, 1.3, 0.8], np.float32), rows),
        "presence_penalty": rng.choice(np.array([0, 0, 0, 0.7, -0.7], np.float32), rows),
        "frequency_penalty": rng.choice(np.array([0, 0, 0, 0.3], np.float32), rows),
        "seed": rng.integers(0, 2**63, rows),
        "sample_position": rng.integers(0, 1000, rows),
        "num_top_logits": rng.choice([-1, 0, 3, MAX_TOP_LOGITS], rows),
        "do_sample": rng.choice([1, 1, 1, 0], rows),
    }


class Sampling:
    """Rows of logits with their sampling parameters.

    Samples the same rows in two ways: from whole logits, and from the best candidates.
    """

    def __init__(self, logits: Array, settings: dict[str, Array], histories: list[Array], prompts: list[int]) -> None:
        fields: dict[str, Any] = {each.name: each.default for each in SAMPLER_PARAMETERS}
        fields |= {"sample_position": 0, "num_top_logits": -1, "do_sample": 1, "rows": np.arange(len(logits))}
        self.logits = np.ascontiguousarray(logits, np.float32)
        self.inputs = {
            name: np.ascontiguousarray(np.broadcast_to(value, len(logits)).astype(SAMPLE_INPUTS[name]))
            for name, value in (fields | settings).items()
        }
        self.histories = {"histories": histories, "prompt_lens": prompts}

    def whole(self) -> SampleOutputs:
        outputs = SampleOutputs.allocate(len(self.logits))
        SampleCall(self.inputs, outputs, len(self.logits)).run(self.logits, None, **self.histories)
        return outputs

    def of_candidates(self, parts: int = 1, rng: np.random.Generator | None = None) -> tuple[SampleOutputs, Array]:
        outputs = SampleOutputs.allocate(len(self.logits))
        best, values, candidates = candidates_of(self.logits, self.inputs["temperature"], parts, rng)
        call = SampleCall(self.inputs, outputs, len(self.logits))
        undecided = call.run_candidates(best, values, self.logits.shape[1], candidates, **self.histories)
        rows = np.full(len(undecided), -1, np.int32)
        rows[undecided] = np.arange(undecided.sum())
        call.run_rows(self.logits[undecided], rows, **self.histories)
        return outputs, undecided


def make(seed: int, vocab: int, spread: float, rounding: Callable[[Array], Array], **changes: Any) -> Sampling:
    rng = np.random.default_rng([seed, vocab, int(spread * 100)])
    logits = rounding((rng.standard_normal((ROWS, vocab)) * spread).astype(np.float32))
    histories = [rng.integers(0, vocab, rng.integers(1, 30)).astype(np.int32) for _ in range(ROWS)]
    # About half of each history are tokens that are likely to be sampled, so penalties change the result.
    for index, history in enumerate(histories):
        likely = logits[index].argsort()[::-1][: len(history) // 2]
        history[: len(likely)] = likely
    prompts = [int(rng.integers(0, len(history) + 1)) for history in histories]
    return Sampling(logits, random_settings(rng, ROWS) | changes, histories, prompts)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("rounding", [np.float32, as_bfloat16])
@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("vocab", [2, 50, 64, 65, 1000, 16003])
def test_tokens_are_those_of_whole_rows(vocab: int, spread: float, rounding: Any, parts: int) -> None:
    for seed in range(1 if vocab > 1000 else 3):
        sampling = make(seed, vocab, spread, rounding)
        got, _ = sampling.of_candidates(min(parts, vocab), np.random.default_rng(seed))
        wanted = sampling.whole()
        np.testing.assert_array_equal(got.sampled_ids, wanted.sampled_ids)
        np.testing.assert_array_equal(got.sampled_logit, wanted.sampled_logit)
        np.testing.assert_array_equal(got.top_ids, wanted.top_ids)
        np.testing.assert_array_equal(got.top_logits, wanted.top_logits)
        np.testing.assert_allclose(got.logsumexp, wanted.logsumexp, rtol=2e-6, atol=2e-6)


OFF = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "num_top_logits": -1, "do_sample": 1}


@pytest.mark.parametrize(
    ("name", "settings", "most"),
    [
        ("greedy", {"temperature": 0}, 0),
        ("greedy with a lowering penalty", {"temperature": 0, "repetition_penalty": 1.2}, 3),
        ("top-k", {"temperature": 0.8, "top_k": 20}, 0),
        ("top-p", {"temperature": 0.8, "top_k": 0, "top_p": 0.8}, 6),
        ("min-p", {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0.1}, 3),
        ("plain, mass in few tokens", {"temperature": 0.6, "top_k": 0, "top_p": 1, "min_p": 0}, 15),
        ("logits of the best tokens", {"temperature": 0.7, "top_k": 20, "num_top_logits": 20}, 0),
    ],
)
def test_few_rows_need_whole_logits(name: str, settings: dict[str, Any], most: int) -> None:
    del name
    sampling = make(7, 16003, 4.0, np.float32, **(OFF | {"top_k": 0, "top_p": 1, "min_p": 0} | settings))
    assert int(sampling.of_candidates()[1].sum()) <= most


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.8, "top_k": 65},
        {"temperature": 0, "presence_penalty": -0.5},
        {"temperature": 1, "top_k": 5000},
    ],
)
def test_rows_that_depend_on_other_tokens_need_whole_logits(settings: dict[str, Any]) -> None:
    sampling = make(8, 16003, 1.0, np.float32, **(OFF | {"top_p": 1, "min_p": 0, "top_k": 0} | settings))
    assert sampling.of_candidates()[1].all()


def test_a_draw_beyond_the_candidates_needs_whole_logits() -> None:
    """All logits are equal, so the 64 candidates of 16003 tokens have only a small part of the probability.

    The sampler needs whole logits, because the drawn token may be none of the candidates.
    """
    sampling = Sampling(np.zeros((20, 16003)), {"temperature": np.float32(1), "seed": np.arange(20)}, [], [])
    sampling.histories = {}
    assert sampling.of_candidates()[1].all()


def test_without_candidates_only_plain_greedy_rows_are_sampled() -> None:
    sampling = make(9, 1000, 1.0, np.float32, **(OFF | {"temperature": np.arange(ROWS) % 2}))
    best, values, _ = candidates_of(sampling.logits, sampling.inputs["temperature"])
    outputs = SampleOutputs.allocate(ROWS)
    call = SampleCall(sampling.inputs, outputs, ROWS)
    undecided = call.run_candidates(best, values, 1000, None)
    assert undecided.tolist() == [bool(row % 2) for row in range(ROWS)]
    np.testing.assert_array_equal(outputs.sampled_ids[::2], best[::2])
    np.testing.assert_array_equal(outputs.sampled_logit[::2], values[::2])


def test_a_sum_of_the_device_with_a_small_error_changes_no_token() -> None:
    """The device's sum of exponentials may have a small error, whose bound is stated in ops/candidates.cc."""
    for seed, error in enumerate((-1e-5, -1e-6, 1e-6, 1e-5)):
        sampling = make(20 + seed, 5000, 2.0, np.float32, **(OFF | {"top_k": 0}))
        best, values, candidates = candidates_of(sampling.logits, sampling.inputs["temperature"])
        candidates.scaled_sums[:] *= np.float32(1 + error)
        outputs, wanted = SampleOutputs.allocate(ROWS), sampling.whole()
        undecided = SampleCall(sampling.inputs, outputs, ROWS).run_candidates(best, values, 5000, candidates)
        assert not undecided.all()
        np.testing.assert_array_equal(outputs.sampled_ids[~undecided], wanted.sampled_ids[~undecided])


def test_candidates_that_are_not_numbers_need_whole_logits() -> None:
    sampling = make(3, 1000, 1.0, np.float32, **(OFF | {"temperature": 1, "top_k": 5}))
    best, values, candidates = candidates_of(sampling.logits, sampling.inputs["temperature"])
    candidates.values[0, 4, 1] = np.nan
    candidates.ids[0, 5, 1] = 1000
    call = SampleCall(sampling.inputs, SampleOutputs.allocate(ROWS), ROWS)
    assert np.flatnonzero(call.run_candidates(best, values, 1000, candidates)).tolist() == [4, 5]


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 1, "top_k": 5}, {"num_top_logits": 2}])
def test_rows_whose_logits_are_not_finite_are_marked(settings: dict[str, Any]) -> None:
    """If the largest logit of a row is not finite, the row gets the id NOT_FINITE instead of a token.

    If only the device's sum of exponentials is NaN, the sampler needs the row's whole logits.
    """
    sampling = make(3, 1000, 1.0, np.float32, **(OFF | settings))
    best, values, candidates = candidates_of(sampling.logits, sampling.inputs["temperature"])
    values[[4, 5, 6]] = np.nan, np.inf, -np.inf
    outputs = SampleOutputs.allocate(ROWS)
    undecided = SampleCall(sampling.inputs, outputs, ROWS).run_candidates(best, values, 1000, candidates)
    assert np.flatnonzero(outputs.sampled_ids == NOT_FINITE).tolist() == [4, 5, 6]
    assert not undecided[[4, 5, 6]].any()
    if settings != {"temperature": 0}:
        candidates.sums[0, 7] = np.nan
        assert SampleCall(sampling.inputs, outputs, ROWS).run_candidates(best, values, 1000, candidates)[7]


def test_candidates_of_another_size_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    sampling = make(3, 1000, 1.0, np.float32, **OFF)
    best, values, candidates = candidates_of(sampling.logits, sampling.inputs["temperature"])
    call = SampleCall(sampling.inputs, SampleOutputs.allocate(ROWS), ROWS)
    with pytest.raises(KernelError):
        call.run_candidates(best, values, 2000, candidates)
    assert "1 parts of 1000 tokens and 50 rows; 64 candidates, 2000 tokens, 50 rows" in capfd.readouterr().err
    with pytest.raises(ValueError, match="at least 50"):
        call.run_candidates(best, values[:10], 1000, candidates)
    with pytest.raises(ValueError, match="name logits up to row 1; there are 1"):
        call.run_rows(sampling.logits[:1], np.ones(ROWS, np.int32))


def test_rows_with_a_mask_are_decided_only_if_the_best_token_is_allowed() -> None:
    logits = np.random.default_rng(3).standard_normal((4, 500)).astype(np.float32)
    best, values, candidates = candidates_of(logits, np.zeros(4))
    masks = np.full((2, 16), 0xFFFFFFFF, np.uint32)
    masks[1, best[1] // 32] &= ~np.uint32(1 << int(best[1]) % 32)
    settings = {"temperature": np.array([0, 0, 1, 0]), "mask_number": np.array([1, 2, 1, 0])}
    inputs = Sampling(logits, settings, [], []).inputs
    outputs = SampleOutputs.allocate(4)
    undecided = SampleCall(inputs, outputs, 4, masks).run_candidates(best, values, 500, candidates)
    assert undecided.tolist() == [False, True, True, False]
    assert outputs.sampled_ids[[0, 3]].tolist() == best[[0, 3]].tolist()
