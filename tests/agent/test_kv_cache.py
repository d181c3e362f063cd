"""The KV cache's memory and block moves, without a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.backends.base import BlockMoves, CacheLayout, DeviceTraits
from agent.backends.cpu.blocks import HostBlockMoves
from agent.kv_cache import KVCache
from agent.weights.storage import Array
from llm_serving.config import Config, load_config
from llm_serving.ipc.shm import MoveKind
from support.model_folders import write_model_folder

MOVES = np.array(
    [(MoveKind.SWAP_OUT, 3, 1), (MoveKind.COPY, 4, 3), (MoveKind.SWAP_IN, 1, 4)], np.int32
)  # exchanges blocks 3 and 4


class Layout:
    """Replaces the op table for a KVCache: an int8 cache with scales."""

    traits = DeviceTraits("fused")

    def cache_layout(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> CacheLayout:
        return (num_blocks, num_kv_heads, block_size, head_dim + 4), "int8"

    def block_moves(self, arrays: Sequence[Array], parameters: Sequence[Any], host: CacheLayout) -> BlockMoves:
        return HostBlockMoves(arrays, host)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    folder = write_model_folder(tmp_path / "model")
    overrides = [f"model_config.model_path={folder}", "pa_config.num_blocks=160", "pa_config.num_host_blocks=2"]
    return load_config("llama_tiny_cpu.yaml", overrides, ascend=False)


def test_moves_apply_to_keys_and_values_of_every_layer(config: Config) -> None:
    cache = KVCache(config, Layout())
    arrays, rng = list(cache.arrays.values()), np.random.default_rng(0)
    assert len(arrays) == 2 * config.shape.num_layers
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
