"""Tests copies of blocks between the tiers and the event loop, with losses of agents at every point of a copy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from llm_serving.block_moves.tier_moves import BlockKey
from llm_serving.kvstore.store import BlockStore
from llm_serving.kvstore.transfers import BlockTransfers
from support.tiered_simulation import ManualMover, disk_tier

BYTES = 64
KEYS = [BlockKey(number.to_bytes(16, "little"), bytes([number]) * 8) for number in range(6)]
CONTENTS = [bytes([number]) * BYTES for number in range(6)]


class Pool:
    block_bytes = BYTES
    blocks_at_once = 2
    is_usable = True

    def __init__(self) -> None:
        self.blocks: dict[int, bytes] = {}

    def read(self, blocks: Sequence[int]) -> list[bytes]:
        return [self.blocks[block] for block in blocks]

    def write(self, blocks: Sequence[int], contents: Sequence[bytes]) -> int:
        self.blocks.update(zip(blocks, contents, strict=True))
        return len(blocks)


class LostPool(Pool):
    """Host blocks on a machine that cannot be reached."""

    def read(self, blocks: Sequence[int]) -> list[bytes]:
        return []

    def write(self, blocks: Sequence[int], contents: Sequence[bytes]) -> int:
        return 0


class Setup:
    """Two replicas with eight host blocks each. The test decides when the engine thread and the mover run."""

    def __init__(self, disk: Any = None, mover: Any = None) -> None:
        self.mover = mover or ManualMover()
        self.stores = [BlockStore(0, 8, disk, lambda: None) for _ in range(2)]
        for store in self.stores:
            store.open(Pool())
        self.commands: list[Callable[[Any], None]] = []
        self.transfers = BlockTransfers(self.commands.append, self.mover, disk)

    def run(self, work: Coroutine[Any, Any, Any], between: Callable[[], None] = lambda: None, at: int = 0) -> Any:
        """Runs a copy to its end. ``between`` is called before its part number ``at``."""

        async def whole() -> Any:
            task = asyncio.ensure_future(work)
            await asyncio.sleep(0)
            part = 0
            while self.commands or self.mover.urgent:
                if part == at:
                    between()
                part += 1
                self.commands.pop(0)(self.stores) if self.commands else self.mover.run(1)
            return await task

        return asyncio.run(whole())

    def check_quiet(self) -> None:
        for store in self.stores:
            assert not store._hosts._holds
            assert len(store._hosts._free) + len(store._hosts._idle) == 8

    def lose(self) -> None:
        for store in self.stores:
            store.lose()
            store.open(Pool())

    def distrust(self) -> None:
        for store in self.stores:
            store.distrust()


def test_written_blocks_are_read_again_up_to_the_first_missing_one():
    setup = Setup()
    assert setup.run(setup.transfers.write(KEYS[:4], CONTENTS[:4])) == 4
    assert setup.run(setup.transfers.read([*KEYS[:2], KEYS[5], KEYS[3]])).contents == CONTENTS[:2]
    assert setup.run(setup.transfers.read(KEYS[4:])).contents == []
    setup.check_quiet()


def test_a_content_of_another_size_is_not_written():
    setup = Setup()
    assert setup.run(setup.transfers.write(KEYS[:3], [CONTENTS[0], b"short", CONTENTS[2]])) == 1
    assert setup.run(setup.transfers.read(KEYS[:3])).contents == CONTENTS[:1]
    setup.check_quiet()


def test_blocks_of_a_machine_that_cannot_be_reached_are_missing():
    setup = Setup()
    setup.run(setup.transfers.write(KEYS[:3], CONTENTS[:3]))
    for store in setup.stores:
        store.open(LostPool())
    assert setup.run(setup.transfers.read(KEYS[:3])).contents == []
    assert setup.run(setup.transfers.write(KEYS[3:], CONTENTS[3:])) == 0
    assert setup.run(setup.transfers.read(KEYS[3:])).contents == []
    setup.check_quiet()


def test_a_replica_without_agents_takes_no_part_in_a_write():
    """With agents on nodes, some replicas may never have a node."""
    setup = Setup()
    setup.stores[1].lose()
    assert setup.run(setup.transfers.write(KEYS[:4], CONTENTS[:4])) == 4
    assert setup.run(setup.transfers.read(KEYS[:4])).contents == CONTENTS[:4]
    setup.stores[0].lose()
    assert setup.run(setup.transfers.write(KEYS[:4], CONTENTS[:4])) == 0


@pytest.mark.parametrize("usable", [False, None])
def test_a_replica_whose_blocks_are_not_usable_takes_no_part_in_a_copy(usable):
    """The node of the replica has other weights, or its weights were not compared yet."""
    setup = Setup()
    setup.run(setup.transfers.write(KEYS[:2], CONTENTS[:2]))
    pool = setup.stores[0].pool
    pool.is_usable = usable
    pool.read, pool.write = lambda blocks: [], lambda blocks, contents: 0
    assert setup.run(setup.transfers.write(KEYS[2:4], CONTENTS[2:4])) == 2
    assert setup.run(setup.transfers.read(KEYS[:4])).contents == CONTENTS[:4]
    setup.check_quiet()


def test_blocks_of_several_replicas_are_read_up_to_the_first_one_that_does_not_arrive():
    setup = Setup()
    first, second = (store.pool for store in setup.stores)
    for number, usable in enumerate((first, second)):
        first.is_usable, second.is_usable = usable is first, usable is second
        assert setup.run(setup.transfers.write(KEYS[3 * number : 3 * number + 3], CONTENTS[3 * number :])) == 3
    first.is_usable = second.is_usable = True
    assert setup.run(setup.transfers.read(KEYS)).contents == CONTENTS
    read = first.read
    first.read = lambda blocks: read(blocks[:2])
    assert setup.run(setup.transfers.read(KEYS)).contents == CONTENTS[:2]
    setup.check_quiet()


def test_no_more_blocks_are_written_than_the_host_has():
    setup = Setup()
    keys = [BlockKey(bytes([9, number]) * 8, bytes(8)) for number in range(12)]
    assert setup.run(setup.transfers.write(keys, [bytes(BYTES)] * 12)) == 8
    assert setup.run(setup.transfers.max_guests()) == 4
    setup.check_quiet()


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("event", ["lose", "distrust"])
def test_a_loss_during_a_copy_gives_no_block(event, at):
    setup = Setup()
    setup.run(setup.transfers.write(KEYS[:3], CONTENTS[:3]))
    before = setup.run(setup.transfers.read([]))
    found = setup.run(setup.transfers.read(KEYS[:3]), getattr(setup, event), at)
    assert found.contents == []
    assert found.versions != before.versions, "blocks from before and after are not combined"
    setup.check_quiet()
    setup.run(setup.transfers.write(KEYS[3:], CONTENTS[3:]), getattr(setup, event), at)
    assert setup.run(setup.transfers.read(KEYS[3:])).contents == []
    setup.check_quiet()


def test_blocks_are_read_from_the_disk(tmp_path):
    disk, mover = disk_tier(tmp_path / "tier")
    setup = Setup(disk, mover)
    setup.run(setup.transfers.write(KEYS[:3], CONTENTS[:3]))
    for store in setup.stores:
        store._write_behind()
    mover.run()
    setup.lose()
    assert setup.run(setup.transfers.read(KEYS[:4])).contents == CONTENTS[:3]
    disk.close()


def test_a_copy_after_the_end_of_the_engine_has_no_blocks():
    setup = Setup()
    setup.stores = []
    assert setup.run(setup.transfers.read(KEYS)).contents == []
    assert setup.run(setup.transfers.write(KEYS, CONTENTS)) == 0
    assert setup.run(setup.transfers.max_guests()) == 0
