"""Tests the memory of the KV cache and its block moves, without a device."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agent import cache_pages
from agent.backends.base import CacheLayout
from agent.backends.cpu.blocks import HostBlockMoves
from agent.backends.device import BlockMoves, DeviceTraits
from agent.cache_pages import CachePages, LaterPages
from agent.kv_cache import KVCache
from agent.step_cost import StepCost
from agent.task_queue import TaskQueue
from agent.weights import storage
from agent.weights.storage import Array, future_zeros
from agent.worker import Worker
from llm_serving.config import Config, load_config
from llm_serving.ipc.messages import Decode, Shutdown, StepDone
from llm_serving.ipc.shm import NUM_SLOTS, MoveKind
from llm_serving.planning.machine import Machine
from support.model_folders import write_model_folder
from support.time_limits import time_limit

MOVES = np.array(
    [(MoveKind.SWAP_OUT, 3, 1), (MoveKind.COPY, 4, 3), (MoveKind.SWAP_IN, 1, 4)], np.int32
)  # together, the moves exchange the contents of blocks 3 and 4


class Layout:
    """Replaces the op table of a KVCache. Its cache is int8, with a scale of four bytes behind each head."""

    traits = DeviceTraits("fused")

    def cache_layout(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> CacheLayout:
        return (num_blocks, num_kv_heads, block_size, head_dim + 4), "int8"

    def scale_layout(self, num_blocks: int, block_size: int, num_kv_heads: int) -> CacheLayout | None:
        return None

    def block_moves(
        self,
        arrays: Sequence[Array],
        parameters: Sequence[Any],
        host: CacheLayout,
        pool: Sequence[Array] | None = None,
    ) -> BlockMoves:
        return HostBlockMoves(arrays, host, pool)


class LayoutWithScales(Layout):
    """Replaces the op table of a KVCache with native operators, whose scales have a cache of their own."""

    def cache_layout(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> CacheLayout:
        return (num_blocks, block_size, num_kv_heads, head_dim), "int8"

    def scale_layout(self, num_blocks: int, block_size: int, num_kv_heads: int) -> CacheLayout | None:
        return (num_blocks, block_size, 1, 16), "float16"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    folder = write_model_folder(tmp_path / "model")
    overrides = [f"model_config.model_path={folder}", "pa_config.num_blocks=160", "pa_config.num_host_blocks=2"]
    return load_config("llama_tiny_cpu.yaml", overrides, ascend=False)


@pytest.mark.parametrize(("table", "parts"), [(Layout, 2), (LayoutWithScales, 3)])
def test_moves_apply_to_all_arrays_of_every_layer(config: Config, table: type[Layout], parts: int) -> None:
    cache = KVCache(config, table())
    arrays, rng = list(cache.arrays.values()), np.random.default_rng(0)
    assert len(arrays) == parts * config.shape.num_layers
    assert cache.num_bytes == sum(array.nbytes for array in arrays)
    for array in arrays:
        array[:] = rng.integers(-128, 128, array.shape)
    before = [array.copy() for array in arrays]
    cache.block_moves([]).run(MOVES)
    for array, old in zip(arrays, before, strict=True):
        old[[3, 4]] = old[[4, 3]]
        assert array.tobytes() == old.tobytes()


def test_arrays_have_the_names_of_the_models_parameters(config: Config) -> None:
    cache, last = KVCache(config, Layout()), config.shape.num_layers - 1
    assert len(cache.arrays) == 2 * config.shape.num_layers
    assert next(iter(cache.arrays)) == "layers.0.attention.key_cache"
    assert list(cache.arrays)[-1] == f"layers.{last}.attention.value_cache"


def test_the_hosts_pool_has_blocks_of_the_same_size(config: Config) -> None:
    cache = KVCache(config, Layout())
    assert cache.num_bytes == 160 * 16 * 2 * (16 + 4) * 2 * config.shape.num_layers
    assert cache.block_moves([]).num_host_bytes * 80 == cache.num_bytes
    without = replace(config, pa_config=replace(config.pa_config, num_host_blocks=0))
    assert KVCache(without, Layout()).block_moves([]).num_host_bytes == 0


def resident_bytes(array: Array) -> int:
    """Returns how many bytes of an array have physical memory (mincore)."""
    pages = np.zeros(-(-array.nbytes // mmap.PAGESIZE), np.uint8)
    address, size, out = (ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes), pages.ctypes.data)
    assert ctypes.CDLL(None).mincore(address, size, ctypes.c_void_p(out)) == 0
    return int((pages & 1).sum()) * mmap.PAGESIZE


@pytest.mark.parametrize("available", [1 << 50, 0], ids=["enough", "short"])
def test_a_large_cache_gets_its_first_pages_at_the_start_and_the_rest_before_or_while_it_serves(
    monkeypatch: pytest.MonkeyPatch, available: int
) -> None:
    monkeypatch.setattr(cache_pages, "START_BYTES", 4 << 20)
    monkeypatch.setattr(cache_pages.Machine, "detect", lambda: Machine(available, "test"))
    arrays = [future_zeros((8 << 20,), "int8") for _ in range(2)]
    pages = CachePages(arrays)
    assert sum(map(resident_bytes, arrays)) == 0
    pages.allocate_first()
    assert [resident_bytes(array) for array in arrays] == [2 << 20, 2 << 20]
    arrays[0][:] = 1
    arrays[1][::100] = 2
    later = LaterPages.of([pages])
    assert (later.wait_s is not None) == (available > 0)
    while later.wait_s is not None:
        later.allocate_idle()
    assert [resident_bytes(array) for array in arrays] == [8 << 20, 8 << 20]
    assert (arrays[0] == 1).all()
    assert (arrays[1][::100] == 2).all()
    assert int(arrays[1].sum(dtype=np.int64)) == 2 * arrays[1][::100].size


def test_a_busy_agent_allocates_pages_for_a_fiftieth_of_its_time_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0

    def populate(pages: Array, *, write: bool) -> bool:
        nonlocal now
        now += 0.004
        return True

    monkeypatch.setattr(cache_pages, "populate", populate)
    later = LaterPages([np.zeros(1, np.uint8)] * 6, clock=lambda: now)
    later.allocate_idle()
    assert later.wait_s == 0.0, "an idle agent goes on at once"
    counts = []
    for _ in range(5):
        before = len(later._pieces)
        for _ in range(20):  # steps of 10 ms: a piece of 4 ms is due after 200 ms
            later.allocate_busy()
            now += 0.01
        counts.append(before - len(later._pieces))
    assert counts == [0, 1, 1, 1, 1]
    assert later.wait_s == cache_pages.IDLE_S, "the agent must be idle again before it goes on"
    later.allocate_idle()
    assert later.wait_s is None


def test_no_page_is_allocated_while_a_step_runs_and_all_pages_are_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker runs steps of which each ends when the test permits it."""
    monkeypatch.setattr(cache_pages, "IDLE_S", 0.0)
    monkeypatch.setattr(cache_pages, "BUSY_SHARE", 1e-9)  # no piece between the steps after the first one
    array = future_zeros((16 << 20,), "int8")
    queue, sizes = TaskQueue("fcfs", NUM_SLOTS), []
    started: SimpleQueue[None] = SimpleQueue()
    may_end: SimpleQueue[None] = SimpleQueue()
    sent: SimpleQueue[Any] = SimpleQueue()

    def run_step(slot: Any, *, is_decode: bool) -> StepCost:
        sizes.append(resident_bytes(array))
        started.put(None)
        may_end.get(timeout=time_limit(60))
        sizes.append(resident_bytes(array))
        return StepCost(1)

    later = LaterPages([array[at : at + (2 << 20)].view(np.uint8) for at in range(0, array.size, 2 << 20)])
    slot = SimpleNamespace(check_header=lambda seq: None, checked_row=0, num_tokens=1, num_seqs=1)
    runner: Any = SimpleNamespace(
        ahead=None, run_step=run_step, later_pages=later, profiling=SimpleNamespace(add_step=lambda *_: None)
    )
    server: Any = SimpleNamespace(send=sent.put)
    worker = Worker(lambda report: runner, queue, server, {})
    for seq in range(3):
        queue.put(Decode(seq=seq, slot=seq))
    memory: Any = SimpleNamespace(slots=[slot] * NUM_SLOTS)
    thread = threading.Thread(target=worker._serve, args=(memory, runner), daemon=True)
    thread.start()
    for _ in range(3):
        started.get(timeout=time_limit(60))
        may_end.put(None)
        assert isinstance(sent.get(timeout=time_limit(60)), StepDone)
    assert sizes == [0, 0, 2 << 20, 2 << 20, 2 << 20, 2 << 20]
    deadline = time.monotonic() + time_limit(60)
    while later.wait_s is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    queue.put(Shutdown(seq=4))
    thread.join(time_limit(60))
    assert not thread.is_alive()
    assert resident_bytes(array) == array.size


def test_pages_are_allocated_without_the_call_of_new_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_pages, "START_BYTES", 2 << 20)
    for module in (cache_pages, storage):
        monkeypatch.setattr(module, "populate", lambda pages, *, write: False)
    array = future_zeros((4 << 20,), "int8")
    pages = CachePages([array])
    pages.allocate_first()
    assert LaterPages.of([pages]).wait_s is None
    assert resident_bytes(array) == 4 << 20
    assert not array.any()


def test_an_array_below_a_page_is_zero() -> None:
    array = future_zeros((3,), "float32")
    pages = CachePages([array])
    pages.allocate_first()
    assert LaterPages.of([pages]).wait_s is None
    assert array.tolist() == [0, 0, 0]
    assert future_zeros((0, 2), "int8").size == 0
