"""Tests the order of a step's sequences for graphs that multiply the rows of each LoRA adapter together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from agent.run_ahead.inserted import InsertedIds
from agent.step_graph.adapter_order import AdapterOrder
from agent.step_inputs import StepInputs
from llm_serving.ipc.shm import NO_ADAPTER

SLOTS = 3


def step(lens: list[int], adapters: list[int]) -> StepInputs:
    """Returns a step whose arrays name the sequence and the token: token 3 of sequence 2 is number 203."""
    numbers = np.concatenate([100 * seq + np.arange(count) for seq, count in enumerate(lens)]).astype(np.int32)
    seqs = np.arange(len(lens), dtype=np.int32)
    return StepInputs(
        token_ids=numbers,
        positions=numbers,
        slot_mapping=numbers,
        block_tables=seqs.reshape(-1, 1),
        context_lens=seqs,
        query_lens=np.array(lens, np.int32),
        rows=seqs,
        last_tokens=np.cumsum(lens, dtype=np.int32) - 1,
        sampled_tokens=np.where(seqs % 2 == 0, np.cumsum(lens, dtype=np.int32) - 1, -1),
        adapters=np.repeat(np.array(adapters, np.int32), lens),
        whole_prompts=False,
        rotary_positions=np.stack([numbers, numbers + 1, numbers + 2], axis=1),
    )


def test_random_steps_have_groups_of_adapters_and_results_in_the_order_of_the_step() -> None:
    rng, order = np.random.default_rng(0), AdapterOrder(SLOTS + 1, orders_entry=True)
    for _ in range(200):
        seqs = int(rng.integers(1, 9))
        lens, adapters = rng.integers(1, 5, seqs).tolist(), rng.integers(NO_ADAPTER, SLOTS, seqs).tolist()
        given = step(lens, adapters)
        before: Any = SimpleNamespace()
        inserted = InsertedIds(before, given.token_ids + 1000, given.token_ids + 2000)
        found, entry, ids = order.sorted(given, given.token_ids, inserted)
        groups = [SLOTS if slot == NO_ADAPTER else slot for slot in adapters]
        wanted = sorted(range(seqs), key=lambda seq: groups[seq])
        tokens = [100 * seq + token for seq in wanted for token in range(lens[seq])]
        for array in (entry, found.token_ids, found.positions, found.slot_mapping):
            assert array.tolist() == tokens
        assert found.rotary_positions.T.tolist() == [[token + more for token in tokens] for more in range(3)]
        assert ids is not None
        assert (ids.places - 1000).tolist() == (ids.mask - 2000).tolist() == tokens
        assert found.block_tables.ravel().tolist() == found.context_lens.tolist() == found.rows.tolist() == wanted
        assert found.query_lens.tolist() == [lens[seq] for seq in wanted]
        assert entry[found.last_tokens].tolist() == [100 * seq + lens[seq] - 1 for seq in range(seqs)]
        assert found.sampled_tokens.tolist() == [
            last if seq % 2 == 0 else -1 for seq, last in enumerate(found.last_tokens.tolist())
        ]
        assert order.restored(entry).tolist() == given.token_ids.tolist()
        counts = [sum(lens[seq] for seq in range(seqs) if groups[seq] == group) for group in range(SLOTS + 1)]
        assert order.rows(found.adapters).tolist() == counts


def test_a_later_stage_gets_its_entry_in_order() -> None:
    given, stream = step([1, 1], [1, 0]), np.array([[0.0], [1.0]])
    found, entry, _ = AdapterOrder(SLOTS + 1, orders_entry=False).sorted(given, stream, None)
    assert entry is stream
    assert found.positions.tolist() == [100, 0]
