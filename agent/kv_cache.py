"""The memory of the KV cache: keys and values of each layer in blocks of fixed size (Kwon et al. 2023)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agent.backends.base import BlockMoves, CacheLayout, OpTable
from agent.weights.storage import Array, zeros
from llm_serving.config import Config


class KVCache:
    """Owns the arrays that the attention layers write in place. The server decides which sequence owns which block.

    On a device with its own memory, the cache is created from these arrays. Each layer has an array of keys and one of
    values with the layout of ``OpTable.cache_layout``. With latent attention, each layer has one array with the layout
    of ``OpTable.latent_cache_layout``. The first axis is the block.
    """

    def __init__(self, config: Config, ops: OpTable) -> None:
        shape, cache = config.shape, config.pa_config

        def layout(num_blocks: int) -> CacheLayout:
            if shape.latent is not None:
                return ops.latent_cache_layout(num_blocks, cache.block_size, shape.latent.cache_dim)
            return ops.cache_layout(num_blocks, cache.block_size, shape.num_key_value_heads, shape.head_dim)

        parts = ("key_cache", "value_cache") if shape.latent is None else ("latent_cache",)
        names = [f"layers.{layer}.attention.{part}" for part in parts for layer in range(shape.num_layers)]
        with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
            made = pool.map(lambda _: zeros(*layout(cache.num_blocks)), names)
            self.arrays: dict[str, Array] = dict(zip(names, made, strict=True))
            """All arrays, by the names of the model's parameters."""
        self._host_layout = layout(config.num_host_blocks)
        self._ops = ops

    @property
    def num_bytes(self) -> int:
        """Size of the device's cache."""
        return sum(array.nbytes for array in self.arrays.values())

    def block_moves(self, parameters: Sequence[Any]) -> BlockMoves:
        """Makes the block moves of this cache and allocates the host pool.

        ``parameters`` are bound to ``arrays`` and have the same order.
        """
        return self._ops.block_moves(list(self.arrays.values()), parameters, self._host_layout)
