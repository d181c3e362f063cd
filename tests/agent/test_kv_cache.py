"""The cache's memory and its moves, without a device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from model_folders import write_model_folder

from agent.backends.base import CacheLayout
from agent.kv_cache import KVCache
from llm_serving.config import Config, load_config
from llm_serving.errors import AgentError, AgentStartError
from llm_serving.ipc.shm import MoveKind

MOVES = np.array(
    [(MoveKind.SWAP_OUT, 3, 1), (MoveKind.COPY, 4, 3), (MoveKind.SWAP_IN, 1, 4)], np.int32
)  # blocks 3 and 4 change places


class Layout:
    """Of an op table as much as a cache asks for: an int8 cache with scales."""

    def cache_layout(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> CacheLayout:
        return (num_blocks, num_kv_heads, block_size, head_dim + 4), "int8"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    folder = write_model_folder(tmp_path / "model")
    overrides = [f"model_config.model_path={folder}", "pa_config.num_blocks=160", "pa_config.num_host_blocks=2"]
    return load_config("llama_tiny_cpu.yaml", overrides, ascend=False)


def on_an_ascend(config: Config, num_host_blocks: int) -> Config:
    cache = replace(config.pa_config, num_host_blocks=num_host_blocks)
    return replace(config, model_config=replace(config.model_config, device_target="Ascend"), pa_config=cache)


def test_every_layer_moves_keys_and_values(config: Config) -> None:
    cache = KVCache(config, Layout())
    arrays, rng = [*cache.keys, *cache.values], np.random.default_rng(0)
    assert len(arrays) == 2 * config.shape.num_layers
    for array in arrays:
        array[:] = rng.integers(-128, 128, array.shape)
    before = [array.copy() for array in arrays]
    cache.move(MOVES)
    for array, old in zip(arrays, before, strict=True):
        old[[3, 4]] = old[[4, 3]]
        assert array.tobytes() == old.tobytes()


def test_the_hosts_pool_has_blocks_of_the_same_size(config: Config) -> None:
    cache = KVCache(config, Layout())
    assert cache.num_bytes == 160 * 16 * 2 * (16 + 4) * 2 * config.shape.num_layers
    assert cache.num_host_bytes * 80 == cache.num_bytes
    without = replace(config, pa_config=replace(config.pa_config, num_host_blocks=0))
    assert KVCache(without, Layout()).num_host_bytes == 0


def test_a_device_with_its_own_memory_refuses_moves(config: Config) -> None:
    with pytest.raises(AgentStartError, match=r"cannot copy its blocks; set pa_config\.num_host_blocks: 0"):
        KVCache(on_an_ascend(config, 2), Layout())
    cache = KVCache(on_an_ascend(config, 0), Layout())
    with pytest.raises(AgentError, match=r"the cache of device Ascend is not .* scheduler_config\.prefix_cache: false"):
        cache.move(MOVES[1:2])
