"""Allocates the memory of the KV cache: keys and values of each layer in fixed-size blocks (Kwon et al. 2023)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agent.backends.base import BlockMoves, CacheLayout, OpTable
from agent.cache_pages import CachePages
from agent.weights.storage import STORAGE_DTYPES, Array, future_zeros
from llm_serving.config import Config


class KVCache:
    """Owns the arrays that the attention layers write in place. The server decides which sequence owns which block.

    Each layer has one array of keys and one array of values, with the layout of ``OpTable.cache_layout``. With latent
    attention, each layer has one array with the layout of ``OpTable.latent_cache_layout``. The first axis is the block.
    If the device has its own memory, there are no arrays, and ``bind`` creates the cache on the device.
    """

    def __init__(self, config: Config, ops: OpTable) -> None:
        shape, cache = config.shape, config.pa_config

        def layout(num_blocks: int) -> CacheLayout:
            if shape.latent is not None:
                return ops.latent_cache_layout(num_blocks, cache.block_size, shape.latent.cache_dim)
            return ops.cache_layout(num_blocks, cache.block_size, shape.num_key_value_heads, shape.head_dim)

        sizes, dtype = layout(cache.num_blocks)
        parts = ("key_cache", "value_cache") if shape.latent is None else ("latent_cache",)
        self._names = [f"layers.{layer}.attention.{part}" for part in parts for layer in range(shape.num_layers)]
        self.num_bytes = len(self._names) * math.prod(sizes) * np.dtype(STORAGE_DTYPES[dtype]).itemsize
        """Size of the device's cache."""
        self._host_layout = layout(config.num_host_blocks)
        self._ops = ops
        self.arrays: dict[str, Array] = {}
        """All arrays in host memory, by the names of the model's parameters."""
        if not ops.traits.own_memory:
            self.arrays = {name: future_zeros(sizes, dtype) for name in self._names}
        self.pages = CachePages(list(self.arrays.values()))
        self.pages.allocate_first()

    def bind(self, parameters: Mapping[str, Any]) -> BlockMoves:
        """Makes this cache the memory of the model's ``parameters``, and allocates the host pool.

        Returns the object that copies blocks of the cache.
        """
        self.bind_parameters(parameters)
        return self.block_moves([parameters[name] for name in self._names])

    def bind_parameters(self, parameters: Mapping[str, Any]) -> None:
        """Makes this cache the memory of the model's ``parameters``."""
        from agent.layers.parameter import bind, create_on_device  # imports mindspore

        for name in self._names:
            if name in self.arrays:
                bind(parameters[name], self.arrays[name])
            else:
                create_on_device(parameters[name])

    def block_moves(self, parameters: Sequence[Any]) -> BlockMoves:
        """Makes the object that copies blocks of this cache, and allocates the host pool.

        ``parameters`` are the parameters that use this cache, in the order of ``arrays``.
        """
        return self._ops.block_moves(list(self.arrays.values()), parameters, self._host_layout)
