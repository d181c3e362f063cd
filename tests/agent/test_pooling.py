"""Tests the pooling of hidden states: equal bits for all chunks and batches, and values that are not finite."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from agent.pooling.pooler import POOLED, Pooler
from agent.pooling.weights import DenseWeights, PoolingWeights, read_pooling_weights
from agent.step_inputs import StepInputs
from llm_serving.errors import CheckpointError, ProtocolError
from llm_serving.ipc.shm import NOT_FINITE, SlotLayout, SlotLimits, StepSlot
from llm_serving.model.pooling import Pooling
from support.embedding_folders import class_weights, write_classifier_folder
from support.small_configs import small_config

HIDDEN, WIDTH, ROWS = 40, 24, 4
RANDOM = np.random.default_rng(3)
NORM = RANDOM.standard_normal(HIDDEN).astype(np.float32)
WEIGHT = RANDOM.standard_normal((WIDTH, HIDDEN)).astype(np.float32)
BIAS = RANDOM.standard_normal(WIDTH).astype(np.float32)
STREAMS = [RANDOM.standard_normal((length, HIDDEN)).astype(np.float32) for length in (1, 7, 30)]
Part = tuple[int, npt.NDArray[np.float32], int, bool]
"""A sequence in a step: its row, its hidden states, the position of their first token, and whether the prompt is
complete.
"""


def pooler_of(method: str) -> Pooler:
    weights = PoolingWeights(NORM, np.float32(1e-5), (DenseWeights(WEIGHT, BIAS, "tanh"),))
    pooler = Pooler(Pooling(method, WIDTH), weights, ROWS, "float32")
    pooler.reset()
    return pooler


def step(pooler: Pooler, parts: list[Part]) -> tuple[list[int], list[bytes]]:
    """Runs one step. Returns the sampled ids and the pooled results of its sequences."""
    limits = SlotLimits(max_tokens=128, max_seqs=ROWS, max_blocks_per_seq=8, pooled_width=WIDTH)
    layout = SlotLayout.of(limits)
    slot = StepSlot(layout, bytearray(layout.slot_bytes))
    lens = np.array([len(part) for _, part, _, _ in parts], np.int32)
    positions = np.concatenate([np.arange(start, start + len(part)) for _, part, start, _ in parts]).astype(np.int32)
    slot.do_sample[: len(parts)] = [complete for *_, complete in parts]
    empty = np.zeros(0, np.int32)
    inputs = StepInputs(
        token_ids=positions,
        positions=positions,
        slot_mapping=positions,
        block_tables=empty.reshape(0, 0),
        context_lens=empty,
        query_lens=lens,
        rows=np.array([row for row, *_ in parts], np.int32),
        last_tokens=empty,
        sampled_tokens=empty,
        adapters=empty,
        whole_prompts=False,
    )
    pooler.take(np.concatenate([part for _, part, _, _ in parts]), inputs, slot)
    results = slot.pooled.reshape(ROWS, WIDTH)
    return slot.sampled_ids[: len(parts)].tolist(), [results[index].tobytes() for index in range(len(parts))]


@pytest.mark.parametrize("method", ["last", "mean", "weighted_mean"])
def test_chunks_and_batches_change_no_bit(method: str) -> None:
    alone = [step(pooler_of(method), [(0, stream, 0, True)])[1][0] for stream in STREAMS]
    pooler = pooler_of(method)
    batch: list[Part] = [(row, stream, 0, True) for row, stream in enumerate(STREAMS)]
    assert step(pooler, batch) == ([POOLED] * 3, alone)
    long = STREAMS[2]
    for cuts in ((1,), (29,), (8, 16, 24)):
        edges = [0, *cuts, len(long)]
        for begin, end in pairwise(edges):
            last = end == len(long)
            ids, results = step(pooler, [(1, long[begin:end], begin, last), (3, STREAMS[1], 0, True)])
            assert ids == [POOLED if last else -1, POOLED]
            assert results[1] == alone[1]
        assert results[0] == alone[2]


def test_the_result_is_the_mean_after_norm_and_dense_layer() -> None:
    stream = STREAMS[1].astype(np.float64)
    normed = stream / np.sqrt((stream**2).mean(axis=1, keepdims=True) + 1e-5) * NORM
    _, [found] = step(pooler_of("mean"), [(2, STREAMS[1], 0, True)])
    np.testing.assert_allclose(np.frombuffer(found, np.float32), np.tanh(WEIGHT @ normed.mean(axis=0) + BIAS), 1e-4)
    weights = np.arange(1, 8)[:, None] / 28
    _, [found] = step(pooler_of("weighted_mean"), [(2, STREAMS[1], 0, True)])
    weighted = np.tanh(WEIGHT @ (normed * weights).sum(axis=0) + BIAS)
    np.testing.assert_allclose(np.frombuffer(found, np.float32), weighted, 1e-4)


def test_a_result_that_is_not_finite_ends_its_own_request_only() -> None:
    broken = STREAMS[1].copy()
    broken[3, 5] = np.nan
    ids, results = step(pooler_of("mean"), [(0, broken, 0, True), (1, STREAMS[0], 0, True)])
    assert ids == [NOT_FINITE, POOLED]
    assert results[1] == step(pooler_of("mean"), [(0, STREAMS[0], 0, True)])[1][0]


def test_a_mean_needs_every_token_of_its_sequence() -> None:
    pooler = pooler_of("mean")
    step(pooler, [(1, STREAMS[2][:8], 0, False)])
    with pytest.raises(ProtocolError, match="row 1 has the sum of 8 tokens, and position 9 follows"):
        step(pooler, [(1, STREAMS[2][9:], 9, True)])


@pytest.mark.parametrize("labels", [("good",), ("good", "bad", "ugly", "odd")])
def test_a_classifier_needs_a_row_for_each_label(tmp_path: Path, labels: tuple[str, ...]) -> None:
    """With too few rows, the logits of the other labels would be uninitialised memory."""
    folder = write_classifier_folder(tmp_path / "model", ("good", "bad", "ugly"))
    config = small_config(tmp_path, [f"model_config.model_path={folder}"])
    assert config.pooling is not None
    rows = read_pooling_weights(config, config.pooling).class_rows
    assert np.array_equal(rows, class_weights(3, config.shape.hidden_size))  # type: ignore[arg-type]
    values = json.loads((folder / "config.json").read_text())
    names = {str(index): label for index, label in enumerate(labels)}
    (folder / "config.json").write_text(json.dumps({**values, "id2label": names}))
    config = small_config(tmp_path, [f"model_config.model_path={folder}"])
    assert config.pooling is not None
    with pytest.raises(CheckpointError, match=r"score\.weight"):
        read_pooling_weights(config, config.pooling)
