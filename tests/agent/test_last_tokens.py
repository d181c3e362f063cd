"""Tests how the agents of a group replace LAST_TOKEN, the input that stands for a token that only the agent knows.

Two ranks run in one process, with a real exchange.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from agent.group.exchange import Exchange
from agent.group.last_tokens import SharedLastTokens
from agent.group.model_part import ModelPart
from agent.sampler import RowTable
from agent.warm_up import make_step
from llm_serving.config import Config, ParallelConfig
from llm_serving.errors import GroupDownError, ProtocolError
from llm_serving.ipc.exchange import ExchangeLayout, ExchangeMemory
from llm_serving.ipc.shm import LAST_TOKEN, StepSlot
from llm_serving.model.parallel import place, shard_of
from support.small_configs import TINY_LLAMA
from support.some_machine import SHAPE
from support.step_config import make_config

LAST, ONE = np.full(1, LAST_TOKEN, np.int32), np.ones(1, np.int32)


class Pair:
    """Two agents of a pipeline: one of the first stage, and one of the last stage, which samples."""

    def __init__(self) -> None:
        parallel = ParallelConfig(1, 2, 1)
        self.config: Config = make_config(TINY_LLAMA, "float32", "fused")
        layout = ExchangeLayout.of(SHAPE, self.config.slot_limits(), parallel)
        self.memory = ExchangeMemory.create(layout)
        self.tables = [RowTable(layout.max_rows, 64, 100) for _ in range(2)]
        parts = [self._part(rank, parallel) for rank in range(2)]
        attached = [ExchangeMemory.attach(self.memory.name, layout) for _ in range(2)]
        self.exchanges = [Exchange(each, part, 0.2) for each, part in zip(attached, parts, strict=True)]
        self.first, self.last = (
            SharedLastTokens(exchange, part, table)
            for exchange, part, table in zip(self.exchanges, parts, self.tables, strict=True)
        )

    @staticmethod
    def _part(rank: int, parallel: ParallelConfig) -> ModelPart:
        where = place(rank, parallel)
        return ModelPart(parallel, where, shard_of(SHAPE, where, parallel), SHAPE)

    def step(self, rows: list[int], sampled: list[bool]) -> StepSlot:
        slot = make_step(self.config, [1] * len(rows), [1] * len(rows))
        slot.rows[: len(rows)], slot.do_sample[: len(rows)] = rows, sampled
        return slot


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.memory.close()


def row(number: int) -> Any:
    return np.full(1, number, np.int32)


def resolved(agent: SharedLastTokens, token_ids: Any, rows: Any, query_lens: Any) -> list[int]:
    tokens = token_ids.copy()
    agent.resolve(tokens, rows, query_lens)
    return list(tokens.tolist())


def test_the_first_stage_gets_the_tokens_of_the_last_stage(pair: Pair) -> None:
    slot = pair.step([3, 1], [True, False])
    pair.first.step_done(slot)
    pair.tables[1].last_token[3] = 42
    pair.last.step_done(slot)
    for agent in (pair.first, pair.last):
        agent.check(LAST, row(3), ONE)
    assert resolved(pair.first, LAST, row(3), ONE) == [42]
    mixed = np.array([7, LAST_TOKEN, 8], np.int32)
    assert resolved(pair.first, mixed, np.array([5, 3], np.int32), np.array([1, 2], np.int32)) == [7, 42, 8]


def test_both_stages_refuse_a_row_without_a_last_token(pair: Pair) -> None:
    slot = pair.step([3, 1], [True, False])
    for agent in (pair.first, pair.last):
        agent.step_done(slot)
        with pytest.raises(ProtocolError, match="the last token of row 1, which has not sampled one"):
            agent.check(LAST, row(1), ONE)
        agent.reset()
        with pytest.raises(ProtocolError, match="row 3"):
            agent.check(LAST, row(3), ONE)


def test_resolve_waits_for_the_sampling_step_until_the_timeout(pair: Pair) -> None:
    pair.first.step_done(pair.step([3], [True]))
    pair.first.check(LAST, row(3), ONE)
    with pytest.raises(GroupDownError, match="tokens of the last stage"):
        resolved(pair.first, LAST, row(3), ONE)
    assert pair.memory.is_down


def test_a_failed_sampling_publishes_a_valid_token(pair: Pair) -> None:
    """If sampling fails, the group still publishes a valid token for the batch row.

    The next step may already be queued with this batch row, although the requests of the failed step have ended.
    """
    slot = pair.step([3], [True])
    pair.first.step_done(slot)
    pair.last.step_done(slot)
    assert resolved(pair.first, LAST, row(3), ONE) == [0]


def test_after_a_failed_sampling_all_agents_use_the_tokens_of_the_device(pair: Pair) -> None:
    slot, chosen = pair.step([3, 1], [True, False]), np.array([42, 43], np.int32)
    for agent in (pair.first, pair.last):
        agent.record(slot)
    pair.tables[1].last_token[[3, 1]] = 5, 6
    pair.last.replace_tokens(slot, chosen)
    pair.last.publish(slot, chosen)
    for agent in (pair.first, pair.last):
        sampled, drawn = agent.of_step(0, slot.rows[:2])
        assert sampled.tolist() == [42, 6], "the second sequence does not sample"
        assert drawn.tolist() == [42, 43]
        assert resolved(agent, LAST, row(3), ONE) == [42]


def test_the_tokens_of_a_step_can_be_read_until_the_second_step_after_it_is_sampled(pair: Pair) -> None:
    """The other agents compare the tokens that the device has drawn in a step, while the next step is sampled already.

    Every agent gets the same tokens. The token of a sequence whose logits are not finite stays negative.
    """
    slot = pair.step([3, 1], [True, True])
    for number in range(5):
        assert {agent.record(slot) for agent in (pair.first, pair.last)} == {number}
        pair.tables[1].last_token[[3, 1]] = 10 * number, -1
        pair.last.publish(slot, np.array([10 * number + number % 2, 7], np.int32))
        for agent in (pair.first, pair.last):
            for step in range(max(0, number - 1), number + 1):
                sampled, drawn = agent.of_step(step, slot.rows[:2])
                assert sampled.tolist() == [10 * step, -1]
                assert drawn.tolist() == [10 * step + step % 2, 7]
    with pytest.raises(GroupDownError, match="tokens of the last stage"):
        pair.first.of_step(5, slot.rows[:2])


def test_streams_go_from_stage_to_stage_in_order(pair: Pair) -> None:
    sender, receiver = pair.exchanges
    width, out = SHAPE.hidden_size, np.zeros((2, SHAPE.hidden_size), np.float32)
    streams = [np.full((2, width), number, np.float32) for number in range(4)]
    sender.send(streams[0])
    sender.send(streams[1])
    receiver.receive(out)
    assert (out == 0).all()
    sender.send(streams[2])
    for number in (1, 2):
        receiver.receive(out)
        assert (out == number).all()
    sender.send(streams[3])
    sender.send(streams[0])
    with pytest.raises(GroupDownError, match="activations for the next stage"):
        sender.send(streams[1])  # the sender is already two steps ahead of the receiver
