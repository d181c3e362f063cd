"""Tests the operators GatedDeltaNet and SigmoidGate: against float64, and for equal bits in any division into steps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from agent.kernels import compiled_sets
from agent.kernels.library import load_library
from performance.kernels.attention_calls import EntryCall
from performance.kernels.calls import Array, load, store

ROOT = Path(__file__).resolve().parents[2]
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TAPS, EPSILON = 2, 4, 16, 80, 4, 1e-6
KEYS, VALUES = KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM
CHANNELS = 2 * KEYS + VALUES
LOGGED = 20
"""Number of drafts in the log of a state. It is more than the tokens that the operator computes in one piece."""
FORM = (KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TAPS, LOGGED)
STATE = VALUE_HEADS * KEY_DIM * VALUE_DIM + (TAPS - 1 + LOGGED) * CHANNELS + 2 * LOGGED * VALUE_HEADS
SETTLED = VALUE_HEADS * KEY_DIM * VALUE_DIM + (TAPS - 1) * CHANNELS
"""Number of values of a state without its log."""
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
Float64Array = npt.NDArray[np.float64]


class Layer:
    """Random weights of a layer, and the inputs of one sequence of 40 tokens."""

    def __init__(self, dtype: str) -> None:
        rng = np.random.default_rng(5)
        self.dtype = dtype
        self.projected = store(rng.standard_normal((40, CHANNELS + VALUES + 2 * VALUE_HEADS)), dtype)
        self.weights = [
            (rng.standard_normal((CHANNELS, 1, TAPS)) * 0.6).astype(np.float32),
            (rng.standard_normal(VALUE_HEADS) - 1).astype(np.float32),
            rng.standard_normal(VALUE_HEADS).astype(np.float32),
            (1 + rng.standard_normal(VALUE_DIM) / 4).astype(np.float32),
        ]
        self.states = np.full((6, STATE), np.nan, np.float32)

    def run(
        self, tokens: list[int], runs: list[tuple[int, ...]], form: tuple[int, ...] = FORM
    ) -> tuple[int, Array]:
        """Runs the operator for some tokens. Returns its status code and the output, which has one spare row.

        A run has four numbers, and two more for each state that it saves. A run with drafts has all ten numbers.
        """
        x = np.concatenate([self.projected[tokens], self.projected[:1]])
        out = np.zeros((len(x), VALUES), x.dtype)
        table = np.zeros((6, 10), np.int32)
        table[0, 0] = len(runs)
        for place, run in enumerate(runs, 1):
            table[place, 9] = run[1]
            table[place, : len(run)] = run
        tensors = [
            (x, self.dtype), (np.array(form, np.int32), None), (np.full(1, EPSILON, np.float32), None),
            *((each, None) for each in self.weights), (self.states, None), (table, None),
            (np.array([len(tokens), 0, 0, 0], np.int32), None), (out, self.dtype),
        ]  # fmt: skip
        return EntryCall(tensors).run(load_library().GatedDeltaNet), out

    def exact(self) -> Float64Array:
        """Returns the output for all tokens, computed in float64 with the formulas of ``ops/gated_delta.h``."""
        x = load(self.projected, self.dtype)
        conv, log_rate, rate_bias, gamma = (each.astype(np.float64) for each in self.weights)
        padded = np.concatenate([np.zeros((TAPS - 1, CHANNELS)), x[:, :CHANNELS]])
        mixed = silu(sum(padded[tap : tap + len(x)] * conv[:, 0, tap] for tap in range(TAPS)))
        query, key = (unit(mixed[:, at : at + KEYS].reshape(-1, KEY_HEADS, KEY_DIM)) for at in (0, KEYS))
        value = mixed[:, 2 * KEYS :].reshape(-1, VALUE_HEADS, VALUE_DIM)
        gate = x[:, CHANNELS : CHANNELS + VALUES].reshape(value.shape)
        b, a = x[:, -2 * VALUE_HEADS : -VALUE_HEADS], x[:, -VALUE_HEADS:]
        decay, strength = np.exp(-np.exp(log_rate) * np.log1p(np.exp(a + rate_bias))), 1 / (1 + np.exp(-b))
        out = np.empty(value.shape)
        for head in range(VALUE_HEADS):
            shared = head // (VALUE_HEADS // KEY_HEADS)
            state = np.zeros((KEY_DIM, VALUE_DIM))
            for token in range(len(x)):
                state *= decay[token, head]
                delta = (value[token, head] - key[token, shared] @ state) * strength[token, head]
                state += np.outer(key[token, shared], delta)
                out[token, head] = query[token, shared] @ state / KEY_DIM**0.5
        normed = out / np.sqrt((out * out).mean(-1, keepdims=True) + EPSILON) * gamma
        return (normed * silu(gate)).reshape(len(x), VALUES)


def silu(x: Float64Array) -> Float64Array:
    return x / (1 + np.exp(-x))


def unit(x: Float64Array) -> Float64Array:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_prompt_equals_float64(dtype: str) -> None:
    check_prompt(dtype)


def check_prompt(dtype: str) -> None:
    layer = Layer(dtype)
    status, out = layer.run(list(range(40)), [(0, 40, -1, 0)])
    assert status == 0
    assert not out[40:].any(), "rows after the step are not written"
    np.testing.assert_allclose(load(out[:40], dtype), layer.exact(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("isa", compiled_sets()[1:])
def test_other_instruction_sets_equal_float64(isa: str) -> None:
    code = "import test_gated_delta as t; [t.check_prompt(each) for each in t.TOLERANCE]"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={**os.environ, "LLM_KERNELS_ISA": isa, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_has_the_same_bits_in_a_prompt_a_chunk_and_a_batch(dtype: str) -> None:
    layer = Layer(dtype)
    _, whole = layer.run(list(range(40)), [(0, 40, -1, 0)])
    final = layer.states[0, :SETTLED].copy()
    found, begin, state = [], 0, -1
    for end in (1, 2, 4, 21, 22, 38, 40):  # chunks that are shorter and longer than the convolution and a piece
        others, own = list(range(5)), list(range(begin, end))
        target = 3 if state == 2 else 2
        # two runs of one other sequence are in each batch, before and after the tested tokens
        runs = [(0, 5, -1, 4), (5, len(own), state, target), (5 + len(own), 5, -1, 5)]
        status, out = layer.run(others + own + others, runs)
        assert status == 0
        found.append(out[5 : 5 + len(own)].copy())
        np.testing.assert_array_equal(out[:5], whole[:5])
        begin, state = end, target
    np.testing.assert_array_equal(np.concatenate(found), whole[:40])
    np.testing.assert_array_equal(layer.states[state, :SETTLED], final)


def test_a_run_leaves_the_state_that_it_reads() -> None:
    layer = Layer("float32")
    layer.run(list(range(9)), [(0, 9, -1, 0)])
    before = layer.states[0].copy()
    _, first = layer.run([9, 10], [(0, 2, 0, 1)])
    _, again = layer.run([9, 10], [(0, 2, 0, 1)])
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(layer.states[0], before)
    assert np.isnan(layer.states[2:]).all(), "other states are not touched"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_saves_the_states_that_shorter_runs_would_write(dtype: str) -> None:
    """Saves states in the middle of a piece, at its end, and after fewer tokens than the convolution has taps."""
    layer = Layer(dtype)
    _, whole = layer.run(list(range(40)), [(0, 40, -1, 0)])
    final = layer.states[0, :SETTLED].copy()
    for first, second in ((1, 2), (2, 16), (15, 17), (16, 32), (23, 40), (40, 0)):
        layer.states[:] = np.nan
        layer.run(list(range(first)), [(0, first, -1, 0)])
        wanted = layer.states[0, :SETTLED].copy()
        saves = (first, 2, second, 3) if second else (first, 2)
        status, out = layer.run(list(range(5)) + list(range(40)), [(0, 5, -1, 4), (5, 40, -1, 1, *saves)])
        assert status == 0
        np.testing.assert_array_equal(out[5:45], whole[:40])
        np.testing.assert_array_equal(layer.states[1, :SETTLED], final)
        np.testing.assert_array_equal(layer.states[2, :SETTLED], wanted)
        assert np.isnan(layer.states[5]).all()
        if 0 < second < 40:
            _, rest = layer.run(list(range(second, 40)), [(0, 40 - second, 3, 0)])
            np.testing.assert_array_equal(rest[: 40 - second], whole[second:40])
            np.testing.assert_array_equal(layer.states[0, :SETTLED], final)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_drafts", [1, 2, 5, LOGGED])
def test_accepted_drafts_are_replayed_with_the_same_bits(dtype: str, num_drafts: int) -> None:
    """The wrong drafts have the inputs of later tokens. Other runs surround the tested ones."""
    layer = Layer(dtype)
    _, whole = layer.run(list(range(40)), [(0, 40, -1, 0)])
    layer.run(list(range(12)), [(0, 12, -1, 0)])
    wanted = layer.states[0, :SETTLED].copy()
    layer.run(list(range(13)), [(0, 13, -1, 0)])
    settled = layer.states[0, :SETTLED].copy()
    for accepted in {0, 1, num_drafts // 2, num_drafts}:
        layer.states[:] = np.nan
        layer.states[0, :SETTLED] = wanted
        others = list(range(5))
        drafts = list(range(13, 13 + accepted)) + [39 - place for place in range(num_drafts - accepted)]
        run = (5, 1 + num_drafts, 0, 1, 0, 0, 0, 0, 0, 1)
        status, out = layer.run([*others, 12, *drafts, *others], [(0, 5, -1, 4), run, (6 + num_drafts, 5, -1, 5)])
        assert status == 0
        np.testing.assert_array_equal(out[5 : 6 + accepted], whole[12 : 13 + accepted])
        np.testing.assert_array_equal(layer.states[1, :SETTLED], settled)
        np.testing.assert_array_equal(layer.states[0, :SETTLED], wanted)
        begin = 13 + accepted
        for settles in (1, 2):  # the first time, the next step has a draft too
            run = (0, 2, 1, 0, 1, 2, 0, 0, accepted, settles)
            status, out = layer.run([begin, begin + 1], [run])
            assert status == 0
            np.testing.assert_array_equal(out[:2], whole[begin : begin + 2])
        for state, end in ((2, begin + 1), (0, begin + 2)):
            found = layer.states[state, :SETTLED].copy()
            layer.run(list(range(end)), [(0, end, -1, 3)])
            np.testing.assert_array_equal(found, layer.states[3, :SETTLED])
        assert np.isnan(layer.states[2, SETTLED:]).all(), "a snapshot has no log"


def test_a_draft_may_end_with_a_saved_state() -> None:
    layer = Layer("bfloat16")
    layer.run(list(range(30)), [(0, 30, -1, 0)])
    wanted = layer.states[0, :SETTLED].copy()
    layer.run(list(range(12)), [(0, 12, -1, 0)])
    assert layer.run(list(range(12, 32)), [(0, 20, 0, 1, 1, 2, 18, 3, 0, 1)])[0] == 0
    np.testing.assert_array_equal(layer.states[2, :SETTLED], layer.states[1, :SETTLED])
    np.testing.assert_array_equal(layer.states[3, :SETTLED], wanted)


def test_a_prompt_may_end_with_drafts() -> None:
    """The log of a long run has only its last tokens. These are more tokens than the convolution reads."""
    layer = Layer("float32")
    _, whole = layer.run(list(range(40)), [(0, 40, -1, 0)])
    status, out = layer.run(list(range(38)), [(0, 38, -1, 1, 0, 0, 0, 0, 0, 18)])
    assert status == 0
    np.testing.assert_array_equal(out[:38], whole[:38])
    for accepted in (0, 7, 16, 17, 20):
        _, out = layer.run([18 + accepted], [(0, 1, 1, 0, 0, 0, 0, 0, accepted, 1)])
        np.testing.assert_array_equal(out[0], whole[18 + accepted])


@pytest.mark.parametrize(
    ("runs", "form", "problem"),
    [
        ([(0, 2, 1, 1)], FORM, "reads state 1 and writes state 1 of 6"),
        ([(0, 2, 6, 1)], FORM, "reads state 6 and writes state 1 of 6"),
        ([(0, 2, -1, 6)], FORM, "reads state -1 and writes state 6 of 6"),
        ([(0, 3, -1, 0)], FORM, "run 0 has 3 tokens from token 0 on; it must begin at token 0 of 2"),
        ([(0, 1, -1, 0)], FORM, "the runs have 1 tokens; the step has 2"),
        ([(0, 2, -1, 0, 3, 1)], FORM, "run 0 saves the state after 3 of 2 tokens in state 1 of 6"),
        ([(0, 2, -1, 0, -1, 1)], FORM, "run 0 saves the state after -1 of 2 tokens in state 1 of 6"),
        ([(0, 2, -1, 0, 1, 6)], FORM, "run 0 saves the state after 1 of 2 tokens in state 6 of 6"),
        ([(0, 2, 2, 0, 1, 2)], FORM, "it must be another state than those that it reads and writes"),
        ([(0, 2, 2, 0, 1, 0)], FORM, "it must be another state than those that it reads and writes"),
        ([(0, 2, -1, 0, 2, 1, 1, 3)], FORM, "run 0 saves the state after 1 of 2 tokens in state 3 of 6"),
        ([(0, 2, -1, 0, 0, 0, 1, 3)], FORM, "run 0 saves the state after 1 of 2 tokens in state 3 of 6"),
        ([(0, 2, 1, 0, 0, 0, 0, 0, 21, 2)], FORM, "replays 21 tokens and settles 2 of its 2 tokens; it may replay 20"),
        ([(0, 2, 1, 0, 0, 0, 0, 0, -1, 2)], FORM, "replays -1 tokens"),
        ([(0, 2, -1, 0, 0, 0, 0, 0, 1, 2)], FORM, "it may replay 0, log 20"),
        ([(0, 2, 1, 0, 0, 0, 0, 0, 0, 0)], FORM, "settles 0 of its 2 tokens"),
        ([(0, 2, 1, 0, 0, 0, 0, 0, 0, 3)], FORM, "settles 3 of its 2 tokens"),
        ([(0, 2, -1, 0)], (2, 4, 20, 80, 4, LOGGED), "sizes must be multiples of 16"),
        ([(0, 2, -1, 0)], (2, 4, 16, 80, 4, -1), "logged tokens from 0 to 64"),
        ([(0, 2, -1, 0)], (2, 4, 16, 80, 4, 65), "logged tokens from 0 to 64"),
        ([(0, 2, -1, 0)], (2, 4, 16, 80, 4, 19), "states must be float32"),
        ([(0, 2, -1, 0)], (2, 4, 16, 64, 4, LOGGED), "argument 0 is float32"),
    ],
)
def test_wrong_runs_and_sizes_are_refused(
    capfd: pytest.CaptureFixture[str], runs: list[tuple[int, ...]], form: tuple[int, ...], problem: str
) -> None:
    layer = Layer("float32")
    status, out = layer.run([0, 1], runs, form)
    assert status != 0
    assert not out.any()
    assert problem in capfd.readouterr().err


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_sigmoid_gate_equals_float64(dtype: str) -> None:
    rng = np.random.default_rng(6)
    x, gate = (store(rng.standard_normal((3, 37)) * 3, dtype) for _ in range(2))
    out = np.zeros_like(x)
    tensors = [(x, dtype), (gate, dtype), (np.array([2, 0, 0, 0], np.int32), None), (out, dtype)]
    assert EntryCall(tensors).run(load_library().SigmoidGate) == 0
    wanted = load(x, dtype) / (1 + np.exp(-load(gate, dtype)))
    np.testing.assert_allclose(load(out[:2], dtype), wanted[:2], rtol=TOLERANCE[dtype])
    assert not out[2:].any()
