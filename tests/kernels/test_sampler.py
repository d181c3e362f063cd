"""Compares the sampler with a NumPy version of its rules, and Philox with its authors' test vectors."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from agent.kernels.library import KernelError, set_threads
from agent.kernels.sample_call import SAMPLE_INPUTS, SampleCall, SampleInputs, SampleOutputs, uniform_numbers
from llm_serving.ipc.shm import NOT_FINITE
from llm_serving.sampling_params import SAMPLER_PARAMETERS
from performance.kernels.library import load_testing_library
from support.kernel_threads import threads_as_before
from support.recorded import RecordProperty

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Given:
    """The inputs of a draw, which samples one token for each row.

    ``inputs`` are the arrays from which a SampleCall is made. ``run`` has the arguments of its run.
    """

    inputs: SampleInputs
    run: dict[str, Any]


def inputs(num_rows: int, /, **changes: Any) -> Given:
    """Returns inputs for plain sampling of every row, with some fields changed. A scalar applies to all rows."""
    run = {name: changes.pop(name) for name in ("best_ids", "histories", "prompt_lens") if name in changes}
    fields: dict[str, Any] = {each.name: each.default for each in SAMPLER_PARAMETERS}
    arrays = {}
    for name, default in (fields | {"sample_position": 0, "num_top_logits": 0}).items():
        value = np.asarray(changes.pop(name, default))
        arrays[name] = np.ascontiguousarray(np.broadcast_to(value, num_rows).astype(SAMPLE_INPUTS[name]))
    return Given(arrays | changes, run)


def draw(logits: Array, given: Given) -> SampleOutputs:
    outputs = SampleOutputs.allocate(len(logits))
    SampleCall(given.inputs, outputs, len(logits)).run(np.ascontiguousarray(logits, np.float32), **given.run)
    return outputs


def philox(counter: list[int], key: list[int]) -> list[int]:
    arrays = [(ctypes.c_uint32 * len(words))(*words) for words in (counter, key, [0] * 4)]
    load_testing_library().llmk_test_philox(*arrays)
    return list(arrays[2])


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # test vectors of philox4x32 with 10 rounds, from the file kat_vectors of the authors' library Random123
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_equals_its_published_vectors(counter: list[int], key: list[int], expected: list[int]) -> None:
    assert philox(counter, key) == expected


def uniform(seed: int, position: int) -> float:
    words = philox([position, 0, 0, 0], [seed & 0xFFFFFFFF, seed >> 32])
    return ((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53


def test_the_random_numbers_of_rows() -> None:
    """A device draws with the numbers of ``uniform_numbers``, and the host with those of the sampler."""
    seeds, positions = np.array([0, 7, 2**63 + 5, 2**64 - 1], np.uint64), np.array([0, 1, 12345, 2**31 - 1], np.int32)
    wanted = [uniform(seed, position) for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True)]
    assert uniform_numbers(seeds, positions).tolist() == wanted


def rendering(logits: Array, row: dict[str, Any], history: list[int], prompt_len: int) -> tuple[int, float]:
    """Returns the token that the sampler's rules choose, computed in float64.

    Also returns the distance of the random number from the nearest boundary between tokens, as a fraction of the total
    mass.
    """
    z = logits.astype(np.float64)
    output = history[prompt_len:]
    for token in set(history):
        z[token] = z[token] / row["repetition_penalty"] if z[token] > 0 else z[token] * row["repetition_penalty"]
        count = output.count(token)
        z[token] -= row["frequency_penalty"] * count + row["presence_penalty"] * (count > 0)
    if row["temperature"] == 0:
        return int(np.argmax(z)), 1.0
    order = np.lexsort((np.arange(len(z)), -z))
    weights = np.exp((z[order] - z.max()) / row["temperature"])
    if row["top_k"] > 0:
        weights = weights[: row["top_k"]]
    margin = 1.0
    if row["top_p"] < 1:
        mass = np.cumsum(weights) / weights.sum()
        margin = np.abs(mass - row["top_p"]).min()
        weights = weights[: int(np.searchsorted(mass, row["top_p"])) + 1]
    weights = weights[weights >= row["min_p"]]
    mass = np.cumsum(weights) / weights.sum()
    u = uniform(row["seed"], row["sample_position"])
    return int(order[np.searchsorted(mass, u, side="right")]), float(min(margin, np.abs(mass - u).min()))


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("vocab_size", [1, 2, 17, 1000, 32003])
def test_equals_the_rendering(vocab_size: int, spread: float) -> None:
    rng = np.random.default_rng([vocab_size, int(spread * 100)])
    rows = 40
    logits = (rng.standard_normal((rows, vocab_size)) * spread).astype(np.float32)
    settings = {
        "temperature": rng.choice(np.array([0, 0.3, 0.5, 1, 2], np.float32), rows),
        "top_k": rng.choice([0, 0, 1, 2, 5, 50, 40000], rows),
        "top_p": rng.choice(np.array([1, 1, 0.25, 0.5, 0.9], np.float32), rows),
        "min_p": rng.choice(np.array([0, 0, 0.125, 0.5], np.float32), rows),
        "repetition_penalty": rng.choice(np.array([1, 1, 1.5, 0.5], np.float32), rows),
        "presence_penalty": rng.choice(np.array([0, 0, 0.5, -1], np.float32), rows),
        "frequency_penalty": rng.choice(np.array([0, 0, 0.25], np.float32), rows),
        "seed": rng.integers(0, 2**63, rows),
        "sample_position": rng.integers(0, 1000, rows),
    }
    histories = [rng.integers(0, vocab_size, rng.integers(0, 30)).astype(np.int32) for _ in range(rows)]
    prompt_lens = [int(rng.integers(0, len(history) + 1)) for history in histories]
    got = draw(logits, inputs(rows, **settings, histories=histories, prompt_lens=prompt_lens))
    compared = 0
    for i in range(rows):
        row = {name: values[i].item() for name, values in settings.items()}
        token, margin = rendering(logits[i], row, histories[i].tolist(), prompt_lens[i])
        if margin > 1e-4:
            assert got.sampled_ids[i] == token, row
            compared += 1
        assert got.sampled_logit[i] == logits[i, got.sampled_ids[i]]
    assert compared > rows / 2
    exact = np.log(np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
    np.testing.assert_allclose(got.logsumexp, exact, rtol=1e-6, atol=1e-5)


def test_greedy_takes_the_smaller_id_on_a_tie() -> None:
    logits = np.zeros((3, 100), np.float32)
    logits[0, [90, 17, 40]] = 2
    logits[1, [0, 99]] = 1
    assert draw(logits, inputs(3, temperature=0)).sampled_ids.tolist() == [17, 0, 0]


def test_top_k_takes_the_smaller_ids_on_a_tie() -> None:
    logits = np.zeros((200, 50), np.float32)
    got = draw(logits, inputs(200, top_k=3, seed=np.arange(200)))
    assert set(got.sampled_ids.tolist()) == {0, 1, 2}


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    logits = np.log(np.array([[0.1, 0.4, 0.2, 0.3]], np.float32)).repeat(300, 0)
    for top_p, kept in [
        (0.01, {1}),
        (0.39, {1}),
        (0.41, {1, 3}),
        (0.69, {1, 3}),
        (0.71, {1, 3, 2}),
        (0.95, {0, 1, 2, 3}),
    ]:
        assert set(draw(logits, inputs(300, top_p=top_p, seed=np.arange(300))).sampled_ids.tolist()) == kept


def test_min_p_is_relative_to_the_most_probable() -> None:
    logits = np.log(np.array([[0.1, 0.4, 0.2, 0.3]], np.float32)).repeat(300, 0)
    for min_p, kept in [(0.8, {1}), (0.74, {1, 3}), (0.49, {1, 3, 2}), (0.24, {0, 1, 2, 3})]:
        assert set(draw(logits, inputs(300, min_p=min_p, seed=np.arange(300))).sampled_ids.tolist()) == kept


def test_masked_tokens_are_never_drawn() -> None:
    logits = np.full((500, 64), -np.inf, np.float32)
    logits[:, [3, 60]] = [1.0, 0.5]
    got = draw(logits, inputs(500, temperature=5.0, seed=np.arange(500)))
    assert set(got.sampled_ids.tolist()) == {3, 60}


def test_logits_that_are_not_finite_are_marked_and_change_no_other_row() -> None:
    """Rows whose logits are not finite get the id NOT_FINITE instead of a token, and other rows do not change.

    The logit -infinity is accepted for an impossible token if another logit of the row is finite.
    """
    clean = np.random.default_rng(4).standard_normal((6, 40)).astype(np.float32)
    logits = clean.copy()
    logits[0], logits[1], logits[2, 7], logits[3, 39], logits[5, 3] = np.nan, -np.inf, np.inf, np.nan, -np.inf
    for temperature in (0, 1):
        given = inputs(6, temperature=temperature, num_top_logits=3)
        got, wanted = draw(logits, given), draw(clean, given)
        assert got.sampled_ids[:4].tolist() == [NOT_FINITE] * 4
        assert (got.logsumexp[:4] == 0).all()
        assert (got.top_ids[:4] == -1).all()
        for name in ("sampled_ids", "sampled_logit", "logsumexp", "top_ids", "top_logits"):
            np.testing.assert_array_equal(getattr(got, name)[4], getattr(wanted, name)[4])
        assert 0 <= got.sampled_ids[5] < 40
        assert got.sampled_ids[5] != 3


def test_the_draw_follows_the_distribution() -> None:
    probabilities = np.array([0.35, 0.25, 0.2, 0.12, 0.05, 0.03])
    count = 20000
    logits = np.log(probabilities).astype(np.float32)[None].repeat(count, 0)
    got = draw(logits, inputs(count, seed=1234, sample_position=np.arange(count)))
    seen = np.bincount(got.sampled_ids, minlength=6)
    chi_square = ((seen - count * probabilities) ** 2 / (count * probabilities)).sum()
    # A correct sampler exceeds this limit with a probability of 0.1 % (five degrees of freedom).
    assert chi_square < 20.5


def test_a_row_depends_on_nothing_but_itself(record_property: RecordProperty) -> None:
    rng = np.random.default_rng(8)
    rows, vocab_size = 24, 5003
    logits = (rng.standard_normal((rows, vocab_size)) * 3).astype(np.float32)
    histories = [rng.integers(0, vocab_size, 20).astype(np.int32) for _ in range(rows)]
    given = inputs(
        rows, seed=np.arange(rows), top_p=rng.uniform(0.5, 1, rows), repetition_penalty=1.3, num_top_logits=8,
        histories=histories, prompt_lens=[10] * rows,
    )  # fmt: skip
    with threads_as_before():
        set_threads(2)
        whole = draw(logits, given)
        set_threads(1)
        changed = 0
        for i in range(rows):
            one = {
                name: given.inputs[name][i : i + 1]
                for name in ("seed", "top_p", "repetition_penalty", "num_top_logits")
            }
            alone = draw(logits[i : i + 1], inputs(1, **one, histories=histories[i : i + 1], prompt_lens=[10]))
            changed += not all(
                np.array_equal(getattr(alone, name)[0], getattr(whole, name)[i])
                for name in ("sampled_ids", "sampled_logit", "logsumexp", "top_ids", "top_logits")
            )
    record_property("changed_rows", f"{changed} of {rows}")
    assert changed == 0


def test_top_logits_are_the_raw_ones_best_first() -> None:
    rng = np.random.default_rng(9)
    logits = np.round(rng.standard_normal((6, 300)) * 4).astype(np.float32)  # many ties
    wanted = np.array([0, 1, 5, 31, 32, 32])
    histories = [np.arange(300, dtype=np.int32)] * 6
    got = draw(
        logits, inputs(6, num_top_logits=wanted, repetition_penalty=2.0, histories=histories, prompt_lens=[0] * 6)
    )
    for i, count in enumerate(wanted):
        order = np.lexsort((np.arange(300), -logits[i]))[:count]
        assert got.top_ids[i].tolist() == [*order.tolist(), *[-1] * (32 - count)]
        np.testing.assert_array_equal(got.top_logits[i, :count], logits[i, order])


def test_more_top_logits_than_tokens_are_padded() -> None:
    got = draw(np.array([[1, 3, 2]], np.float32), inputs(1, num_top_logits=32))
    assert got.top_ids[0, :5].tolist() == [1, 2, 0, -1, -1]


def test_rows_that_do_not_sample_are_skipped() -> None:
    logits = np.arange(20, dtype=np.float32).reshape(2, 10)
    skipped = draw(logits, inputs(2, temperature=0, num_top_logits=1, do_sample=np.array([0, 1], np.int32)))
    assert skipped.sampled_ids.tolist() == [-1, 9]
    assert skipped.top_ids[:, 0].tolist() == [-1, 9]


def test_known_best_ids_and_unwanted_logsumexp_change_no_token() -> None:
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((6, 300)).astype(np.float32)
    logits[2, [7, 9]] = 11.0
    history = np.arange(40, dtype=np.int32)
    mixed = {
        "temperature": [0, 0, 0, 1, 0, 0.5], "seed": np.arange(6), "repetition_penalty": [1, 1, 1, 1, 2.5, 1],
        "histories": [history] * 6, "prompt_lens": [4] * 6,
    }  # fmt: skip
    plain = draw(logits, inputs(6, **mixed))
    best_ids = logits.argmax(1).astype(np.int32)
    known = draw(logits, inputs(6, **mixed, num_top_logits=-1, best_ids=best_ids))
    assert known.sampled_ids.tolist() == plain.sampled_ids.tolist()
    assert known.sampled_logit.tolist() == plain.sampled_logit.tolist()
    assert plain.sampled_ids[2] == 7, "the smaller id on a tie"
    assert (known.logsumexp == 0).all()
    assert (plain.logsumexp != 0).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -1.0}, "temperature[0] is -1; it must be at least 0"),
        ({"temperature": np.nan}, "temperature[0] is nan; it must be at least 0"),
        ({"best_ids": np.array([10], np.int32)}, "best_ids[0] is 10; it must be from 0 to 9"),
        ({"num_top_logits": 33}, "num_top_logits[0] is 33; it must be -1 to 32"),
        ({"presence_penalty": 1.0}, "row 0 has penalties, so it needs a history"),
        (
            {"repetition_penalty": 0.0, "histories": [None], "prompt_lens": [0]},
            "repetition_penalty[0] is 0; it must be above 0",
        ),
        (
            {"presence_penalty": 1.0, "histories": [np.array([10], np.int32)], "prompt_lens": [0]},
            "history[0] is 10; it must be from 0 to 9",
        ),
        (
            {"presence_penalty": 1.0, "histories": [np.array([1], np.int32)], "prompt_lens": [2]},
            "history_prompt_lens[0] is 2",
        ),
    ],
)
def test_bad_parameters_are_refused(changes: dict[str, Any], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KernelError, match="the sampler refused its arguments"):
        draw(np.zeros((1, 10), np.float32), inputs(1, **changes))
    assert f"llm_kernels: Sample: {message}" in capfd.readouterr().err


def test_bad_arrays_are_refused() -> None:
    good, outputs = inputs(2).inputs, SampleOutputs.allocate(2)
    with pytest.raises(ValueError, match="top_k is int64, 2 elements"):
        SampleCall({**good, "top_k": np.zeros(2, np.int64)}, outputs, 2)
    with pytest.raises(ValueError, match="top_ids is int32, 64 elements"):
        SampleCall(inputs(3).inputs, replace(SampleOutputs.allocate(3), top_ids=outputs.top_ids), 3)
    call = SampleCall(good, outputs, 2)
    with pytest.raises(ValueError, match="logits is float64"):
        call.run(np.zeros((2, 4)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="contiguous False"):
        call.run(np.zeros((4, 4), np.float32)[::2])
    with pytest.raises(ValueError, match="logits has 3 rows; the other arrays have 2"):
        call.run(np.zeros((3, 4), np.float32))
    with pytest.raises(ValueError, match="best_ids is int64"):
        call.run(np.zeros((2, 4), np.float32), np.zeros(2, np.int64))  # type: ignore[arg-type]


def test_a_prepared_call_forgets_the_run_before(record_property: RecordProperty) -> None:
    logits = np.array([[1, 3, 2], [5, 4, 6]], np.float32)
    given, outputs = inputs(2, temperature=0), SampleOutputs.allocate(2)
    call = SampleCall(given.inputs, outputs, 2)
    call.run(logits, best_ids=np.array([1, 2], np.int32))
    assert outputs.sampled_ids.tolist() == [1, 2]
    call.run(logits[::-1].copy())
    record_property("changed_rows", f"{sum(a != b for a, b in zip(outputs.sampled_ids, [2, 1], strict=True))} of 2")
    assert outputs.sampled_ids.tolist() == [2, 1], "no best_ids: looked for"
    call.run(logits[:1])
    assert outputs.sampled_ids.tolist() == [1, 1], "one row: the other is left alone"


def test_what_a_row_sampled_is_remembered_where_its_sequence_is() -> None:
    logits = np.array([[1, 3, 2], [5, 4, 6], [9, 1, 1]], np.float32)
    skipped = inputs(3, temperature=0, do_sample=np.array([1, 0, 1], np.int32), rows=np.array([4, 0, 2], np.int32))
    outputs = replace(SampleOutputs.allocate(3), last_token=np.full(5, -1, np.int32))
    SampleCall(skipped.inputs, outputs, 3).run(logits)
    assert outputs.sampled_ids.tolist() == [1, -1, 0]
    assert outputs.last_token is not None
    assert outputs.last_token.tolist() == [-1, -1, 0, -1, 1], "the row that does not sample keeps what it had"


@pytest.mark.parametrize("row", [-1, 5])
def test_a_row_outside_the_table_is_refused_before_anything_is_written(row: int) -> None:
    given = inputs(2, temperature=0, rows=np.array([1, row], np.int32))
    outputs = replace(SampleOutputs.allocate(2), last_token=np.full(5, -1, np.int32))
    outputs.sampled_ids[:] = 7
    with pytest.raises(KernelError):
        SampleCall(given.inputs, outputs, 2).run(np.zeros((2, 3), np.float32))
    assert outputs.last_token is not None
    assert (outputs.last_token == -1).all()
    assert (outputs.sampled_ids == 7).all()


def test_a_table_needs_the_rows() -> None:
    outputs = replace(SampleOutputs.allocate(1), last_token=np.zeros(5, np.int32))
    with pytest.raises(ValueError, match="last_token needs rows"):
        SampleCall(inputs(1).inputs, outputs, 1)


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_are_seen_of_rows_that_sample(name: str) -> None:
    values = np.array([1, 1, 0.5] if name == "repetition_penalty" else [0, 0, 0.5])
    samples = np.array([1, 0, 1], np.int32)
    given = inputs(3, do_sample=samples, **{name: values})
    call = SampleCall(given.inputs, SampleOutputs.allocate(3), 3)
    assert call.has_penalties(3)
    assert not call.has_penalties(2)
    samples[2] = 0
    assert not call.has_penalties(3)


def masks_of(rng: np.random.Generator, rows: int, vocab_size: int) -> tuple[Array, Array]:
    """Returns random masks as words of 32 bits, and whether they allow each token [rows, vocabulary].

    Each mask allows at least one token.
    """
    allowed = rng.random((rows, vocab_size)) < rng.choice([0.001, 0.1, 0.9], (rows, 1))
    allowed[np.arange(rows), rng.integers(0, vocab_size, rows)] = True
    padded = np.zeros((rows, -(-vocab_size // 32) * 32), np.uint8)
    padded[:, :vocab_size] = allowed
    return np.packbits(padded, axis=1, bitorder="little").view(np.uint32), allowed


@pytest.mark.parametrize("knows_best", [False, True])
@pytest.mark.parametrize("vocab_size", [2, 33, 1000, 32003])
def test_a_mask_is_like_logits_of_minus_infinity_but_logprobs_stay_raw(vocab_size: int, knows_best: bool) -> None:
    rng, rows = np.random.default_rng(vocab_size), 60
    logits = (rng.standard_normal((rows, vocab_size)) * 4).astype(np.float32)
    masks, allowed = masks_of(rng, rows, vocab_size)
    number = rng.permutation(rows).astype(np.int32)  # the number of each row's mask; 0 stands for no mask
    allowed = np.vstack([np.ones(vocab_size, np.bool_), allowed])[number]
    settings: dict[str, Any] = {
        "temperature": rng.choice(np.array([0, 0.5, 1.5], np.float32), rows),
        "top_k": rng.choice([0, 1, 5, 50], rows),
        "top_p": rng.choice(np.array([1, 0.5], np.float32), rows),
        "repetition_penalty": rng.choice(np.array([1, 1.5], np.float32), rows),
        "presence_penalty": rng.choice(np.array([0, -1], np.float32), rows),
        "seed": rng.integers(0, 2**63, rows),
        "num_top_logits": rng.choice([-1, 0, 2], rows),
        "histories": [rng.integers(0, vocab_size, 20).astype(np.int32) for _ in range(rows)],
        "prompt_lens": [10] * rows,
    }
    best = {"best_ids": logits.argmax(1).astype(np.int32)} if knows_best else {}
    raw = draw(logits, inputs(rows, **settings, **best))
    given = inputs(rows, **settings, **best, mask_number=number)
    got = SampleOutputs.allocate(rows)
    SampleCall(given.inputs, got, rows, masks).run(logits, **given.run)
    expected = draw(np.where(allowed, logits, np.float32(-np.inf)), inputs(rows, **settings))
    assert got.sampled_ids.tolist() == expected.sampled_ids.tolist()
    assert got.sampled_logit.tolist() == logits[np.arange(rows), got.sampled_ids].tolist()
    assert got.logsumexp.tolist() == raw.logsumexp.tolist()
    assert (got.top_ids.tolist(), got.top_logits.tolist()) == (raw.top_ids.tolist(), raw.top_logits.tolist())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_with_only_impossible_tokens_gives_the_first_of_them(temperature: float) -> None:
    logits = np.full((1, 70), -np.inf, np.float32)
    logits[0, 5] = 1
    masks = np.array([[0, 1 << 8 | 1 << 20, 1]], np.uint32)
    given, got = inputs(1, temperature=temperature, mask_number=np.ones(1, np.int32)), SampleOutputs.allocate(1)
    SampleCall(given.inputs, got, 1, masks).run(logits)
    assert got.sampled_ids.tolist() == [40]


@pytest.mark.parametrize(
    ("number", "masks"),
    [(2, np.ones((1, 2), np.uint32)), (-1, np.ones((1, 2), np.uint32)), (1, np.ones((1, 1), np.uint32)),
     (1, np.array([[0, 1 << 31]], np.uint32))],
    ids=["no such mask", "negative", "too short", "allows only an id beyond the vocabulary"],
)  # fmt: skip
def test_wrong_masks_are_refused(number: int, masks: Array) -> None:
    given, got = inputs(1, mask_number=np.array([number], np.int32)), SampleOutputs.allocate(1)
    with pytest.raises(KernelError):
        SampleCall(given.inputs, got, 1, masks).run(np.zeros((1, 40), np.float32))
