"""Tests the memory of the KV cache and its block moves, without a device."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent import cache_pages
from agent.backends.base import CacheLayout
from agent.backends.cpu.blocks import HostBlockMoves
from agent.backends.device import BlockMoves, DeviceTraits
from agent.cache_pages import CachePages
from agent.kv_cache import KVCache
from agent.weights import storage
from agent.weights.storage import Array, future_zeros
from llm_serving.config import Config, load_config
from llm_serving.ipc.shm import MoveKind
from llm_serving.planning.machine import Machine
from support.model_folders import write_model_folder

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
    pages.allocate_rest()
    assert (pages._thread is not None) == (available > 0)
    pages.wait()
    assert [resident_bytes(array) for array in arrays] == [8 << 20, 8 << 20]
    assert (arrays[0] == 1).all()
    assert (arrays[1][::100] == 2).all()
    assert int(arrays[1].sum(dtype=np.int64)) == 2 * arrays[1][::100].size


def test_pages_are_allocated_without_the_call_of_new_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_pages, "START_BYTES", 2 << 20)
    for module in (cache_pages, storage):
        monkeypatch.setattr(module, "populate", lambda pages, *, write: False)
    array = future_zeros((4 << 20,), "int8")
    pages = CachePages([array])
    pages.allocate_first()
    pages.allocate_rest()
    assert resident_bytes(array) == 4 << 20
    assert not array.any()


def test_an_array_below_a_page_is_zero() -> None:
    array = future_zeros((3,), "float32")
    pages = CachePages([array])
    pages.allocate_first()
    pages.allocate_rest()
    assert array.tolist() == [0, 0, 0]
    assert future_zeros((0, 2), "int8").size == 0
