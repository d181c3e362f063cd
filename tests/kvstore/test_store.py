"""Tests the tiers of a replica with a scripted scheduler: when blocks are read, and when a request stops waiting."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import pytest

from llm_serving.block_moves.tier_moves import BlockKey, WantedBlocks
from llm_serving.config import load_config
from llm_serving.errors import ConfigError
from llm_serving.kvstore.disk import DiskTier
from llm_serving.kvstore.store import MIN_PATIENCE_S, BlockStore
from llm_serving.scheduler.scheduler import Scheduler
from support.fake_device import FakeDevice
from support.fakes import make_limits
from support.small_configs import small_config
from support.tiered_simulation import NAMESPACE, DevicePool, ManualMover, disk_tier

CONTENT_BYTES = 1000


class Pool:
    block_bytes = CONTENT_BYTES
    blocks_at_once = 2
    is_usable = True

    def __init__(self) -> None:
        self.blocks: dict[int, bytes] = {}

    def read(self, blocks: Sequence[int]) -> list[bytes]:
        return [self.blocks.get(block, bytes(CONTENT_BYTES)) for block in blocks]

    def write(self, blocks: Sequence[int], contents: Sequence[bytes]) -> int:
        self.blocks.update(zip(blocks, contents, strict=True))
        return len(blocks)


class Source:
    """A scheduler whose offers of blocks and questions for hits come from a script. It completes each move immediately.
    """

    def __init__(self) -> None:
        self.offers: list[BlockKey | None] = []
        self.wanted: list[WantedBlocks] = []
        self.replies: list[list[int]] = []
        self.released: list[tuple[int, bool]] = []

    def fresh_blocks(self, limit: int) -> list[BlockKey | None]:
        return self.offers[:limit]

    def store_blocks(self, hosts: Iterable[int]) -> None:
        hosts = list(hosts)
        del self.offers[: len(hosts)]
        self.released += [(host, True) for host in hosts if host >= 0]

    def take_wanted(self) -> list[WantedBlocks]:
        wanted, self.wanted = self.wanted, []
        return wanted

    def load_blocks(self, request_id: str, first: int, hosts: Iterable[int]) -> None:
        self.replies.append(list(hosts))
        self.released += [(host, True) for host in self.replies[-1]]

    def take_released(self) -> list[tuple[int, bool]]:
        released, self.released = self.released, []
        return released

    def ask(self, count: int, block_s: float | None) -> None:
        self.wanted.append(WantedBlocks("r", 0, [key(number) for number in range(count)], block_s))


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "little"), number.to_bytes(4, "little") * 16)


@pytest.fixture
def parts(tmp_path):
    """Provides a store with four blocks on its disk and none in memory, and the mover of the disk."""
    disk, mover = disk_tier(tmp_path / "tier")
    source, filling = Source(), BlockStore(0, 8, disk, lambda: None)
    filling.open(Pool())
    source.offers = [key(number) for number in range(4)]
    for _ in range(3):
        filling.exchange(source, 0.0)
    mover.run()
    assert disk.figures.blocks == 4
    store = BlockStore(0, 8, disk, lambda: None)
    store.open(Pool())
    yield store, mover, disk
    disk.close()


def test_a_read_that_takes_longer_than_the_computation_does_not_begin(parts):
    store, mover, disk = parts
    source = Source()
    source.ask(4, None)  # the time of the computation is unknown, so the blocks are read
    store.exchange(source, 0.0)
    mover.run()
    assert store.exchange(source, 0.0)
    assert len(source.replies[0]) == 4
    again = BlockStore(0, 8, disk, lambda: None)
    again.open(Pool())
    disk._read_s, disk._read_bytes = 1.0, 10_000.0  # a block of 1,160 bytes takes 0.116 s
    for block_s, number in ((0.11, 0), (0.13, 4)):
        asked = Source()
        asked.ask(4, block_s)
        again.exchange(asked, 0.0)
        mover.run()
        again.exchange(asked, 0.0)
        assert [len(hosts) for hosts in asked.replies] == [number]
    assert again.figures.too_slow == 4


def test_a_request_waits_for_a_slow_read_for_a_limited_time(parts):
    store, mover, _ = parts
    source = Source()
    source.ask(4, 0.001)
    store.exchange(source, 0.0)
    assert source.replies == []
    assert store.next_due == pytest.approx(MIN_PATIENCE_S)
    assert not store.exchange(source, 0.9 * MIN_PATIENCE_S)
    assert store.exchange(source, MIN_PATIENCE_S)
    assert source.replies == [[]], "the request is computed"
    mover.run()
    store.exchange(source, 1.0)
    source.ask(4, 0.001)
    store.exchange(source, 1.0)
    assert len(source.replies[-1]) == 4, "the blocks of the late read are in memory now"
    assert (store.figures.expired, store.next_due) == (1, None)


def test_after_a_distrust_no_block_of_this_run_is_written_or_read(parts):
    """A write waits for the mover at the time of the call. A request asks for blocks before the mover removes them."""
    store, mover, disk = parts
    source = Source()
    source.offers = [key(9)]
    for _ in range(2):
        store.exchange(source, 0.0)
    assert mover.others, "the block waits to be written"
    store.distrust()
    source.ask(4, None)
    store.exchange(source, 0.0)
    mover.run()
    store.exchange(source, 0.0)
    assert source.replies == [[]]
    assert (disk.figures.blocks, disk.find(key(9))) == (0, None)
    source.ask(4, None)
    store.exchange(source, 0.0)
    assert source.replies == [[], []]


def test_a_distrusted_block_in_memory_is_not_used_although_a_request_already_waits(parts):
    """The request waits for blocks on the disk, which follow the block in memory."""
    store, mover, _ = parts
    source = Source()
    source.ask(1, None)
    store.exchange(source, 0.0)
    mover.run()
    store.exchange(source, 0.0)
    assert len(source.replies.pop()) == 1, "the first block is in memory"
    source.ask(4, None)
    store.exchange(source, 0.0)
    store.distrust()
    mover.run()
    store.exchange(source, 0.0)
    assert source.replies == [[]]


def test_a_failed_copy_to_the_host_is_not_used():
    store, source = BlockStore(0, 2, None, lambda: None), Source()
    store.open(Pool())
    source.offers = [key(0)]
    store.exchange(source, 0.0)
    source.released = [(host, False) for host, _ in source.released]
    source.ask(1, None)
    store.exchange(source, 0.0)
    assert source.replies == [[]]


def test_offers_wait_while_all_host_blocks_are_held():
    store, source = BlockStore(5, 2, None, lambda: None), Source()
    store.open(Pool())
    source.offers = [key(number) for number in range(3)]
    store.exchange(source, 0.0)
    assert sorted(host for host, _ in source.released) == [5, 6]
    assert source.offers == [key(2)]
    store.exchange(source, 0.0)
    assert source.offers == []


def test_blocks_that_are_stored_before_the_disk_is_open_are_written_later(tmp_path):
    disk = DiskTier(tmp_path, 1 << 20, [].append)
    disk.mover = mover = ManualMover()
    woken = []
    store, source = BlockStore(0, 8, disk, lambda: woken.append(True)), Source()
    store.open(Pool())
    source.offers = [key(number) for number in range(6)]
    for _ in range(2):
        store.exchange(source, 0.0)
    assert mover.run() == 0
    disk.open(lambda: NAMESPACE)
    mover.run()
    assert woken, "the engine thread must hand the blocks over"
    for _ in range(3):
        store.exchange(source, 0.0)
        mover.run()
    assert disk.figures.blocks == 6
    disk.close()


def test_blocks_that_are_stored_before_a_node_compared_its_weights_are_written_later(tmp_path):
    disk, mover = disk_tier(tmp_path / "tier")
    store, source, pool = BlockStore(0, 8, disk, lambda: None), Source(), Pool()
    pool.is_usable = None
    store.open(pool)
    source.offers = [key(number) for number in range(6)]
    for _ in range(3):
        store.exchange(source, 0.0)
    assert mover.run() == 0
    pool.is_usable = True
    for _ in range(3):
        store.exchange(source, 0.0)
        mover.run()
    assert disk.figures.blocks == 6
    disk.close()


@pytest.mark.parametrize("usable", [False, None])
def test_no_block_is_read_from_the_disk_for_a_node_that_does_not_take_it(parts, usable):
    store, mover, _ = parts
    source = Source()
    store.pool.is_usable = usable
    source.ask(4, None)
    assert store.exchange(source, 0.0)
    assert (source.replies, mover.run()) == ([[]], 0)


def test_before_the_agents_are_ready_nothing_is_found():
    store, source = BlockStore(0, 2, None, lambda: None), Source()
    source.ask(1, None)
    assert store.exchange(source, 0.0)
    assert source.replies == [[]]


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (["kv_tier_config.ssd_folder=tier"], "set kv_tier_config.host_blocks above 0"),
        (["kv_tier_config.host_blocks=8", "scheduler_config.prefix_cache=false"], "prefix_cache: True"),
        (["kv_tier_config.host_blocks=8", "kv_tier_config.ssd_max_bytes=1000"], "ssd_max_bytes"),
        (["kv_tier_config.loads=sometimes"], "loads"),
        (
            [
                *("kv_tier_config.host_blocks=8", "model_config.op_table=native", "model_config.kv_format=int8"),
                "model_config.model_dtype=bfloat16",
            ],
            "blocks of another size; use kv_format auto",
        ),
    ],
)
def test_settings_that_exclude_each_other_are_refused(tmp_path, overrides, error):
    with pytest.raises(ConfigError, match=error):
        small_config(tmp_path, overrides)


def test_tiers_are_off_by_default():
    assert load_config("llama_tiny_cpu.yaml").kv_tier_config.host_blocks == 0


def test_an_exchange_without_work_makes_few_calls():
    """The engine thread exchanges data with the tiers twice for each step. Without hits, this must cost few calls."""
    limits = make_limits(num_blocks=100, prefix_cache=True, has_tiers=True)
    scheduler, store = Scheduler(limits), BlockStore(0, 100, None, lambda: None)
    store.open(DevicePool(FakeDevice(limits)))
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        store.exchange(scheduler, 1.0)
    finally:
        sys.setprofile(None)
    assert calls <= 24
