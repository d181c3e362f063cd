"""Tests that an observer of the prefix cache knows exactly the full blocks of the index, after any operations."""

from __future__ import annotations

import random

import pytest

from llm_serving.kvcache.block_hash import BlockHash, blake2b_128, pack_tokens
from llm_serving.kvcache.prefix_index import Parent
from support.kv_cache_model import KVCacheModel, Outcome, random_operation


class Mirror:
    """An observer that keeps a copy of the index, made from its calls alone."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[bytes, bytes, Parent]] = {}
        self.num_removed = 0
        self.num_cleared = 0

    def stored(self, entry: int, block_hash: bytes, content: bytes, parent: Parent) -> None:
        assert entry not in self.blocks
        self.blocks[entry] = (block_hash, content, parent)

    def removed(self, entry: int) -> None:
        del self.blocks[entry]
        self.num_removed += 1

    def cleared(self) -> None:
        self.blocks.clear()
        self.num_cleared += 1


def one_byte(data: bytes) -> bytes:
    """Returns a hash with 256 possible values, so that different blocks often have the same hash."""
    return blake2b_128(data)[:1]


@pytest.mark.parametrize("block_hash", [blake2b_128, one_byte])
def test_the_observer_knows_the_index_after_random_operations(block_hash: BlockHash) -> None:
    choose = random.Random(1)
    num_removed = 0
    for _ in range(20):
        model = KVCacheModel(choose.choice([6, 10, 16]), choose.choice([1, 2, 4]), 8, block_hash)
        index, mirror = model.manager.prefix_index, Mirror()
        index.observer = mirror
        for number in range(200):
            random_operation(model, choose, max_tokens=12)
            if number == 150:
                model.lose_device()
            expected = {
                entry: (index._hashes[block], content, parent)
                for entry, block, parent, content in index.in_order()
                if index._hashes[block]
            }
            assert mirror.blocks == expected, f"after operation {number}"
        model.drain()
        assert mirror.num_cleared
        num_removed += mirror.num_removed
    assert num_removed > 200


def test_the_loss_of_the_device_is_one_call() -> None:
    model = KVCacheModel(10, 2, 0, blake2b_128)
    model.manager.prefix_index.observer = mirror = Mirror()
    sequence = model.add([1, 2, 3, 4, 5], b"")
    model.look(sequence)
    assert model.start(sequence)
    model.compute(sequence, 5)
    model.stop(sequence, finished=True)
    while model.steps:
        model.answer(Outcome.ANSWERED)
    assert [content for _, content, _ in mirror.blocks.values()] == [pack_tokens([1, 2]), pack_tokens([3, 4])]
    model.lose_device()
    assert (mirror.blocks, mirror.num_removed, mirror.num_cleared) == ({}, 0, 1)
