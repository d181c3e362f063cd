"""Allocates the memory of the KV cache: keys and values of each layer in fixed-size blocks (Kwon et al. 2023)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agent.backends.base import CacheLayout, OpTable
from agent.backends.device import BlockMoves
from agent.cache_pages import CachePages
from agent.step_inputs import Int32Array
from agent.weights.storage import STORAGE_DTYPES, Array, future_zeros
from llm_serving.config import Config
from llm_serving.errors import AgentStartError
from llm_serving.ipc.host_pool import HostPoolMemory
from llm_serving.model.shape import ModelShape


class KVCache:
    """Owns the arrays that the attention layers write in place: the KV cache, and the states of linear attention.

    The server decides which sequence owns which block. The states of linear attention belong to batch rows.

    Each layer has one array of keys and one array of values, with the layout of ``OpTable.cache_layout``. If
    ``OpTable.scale_layout`` is not None, a third array has the scales of keys and values. With latent attention, each
    layer has only one array, with the layout of ``OpTable.latent_cache_layout``. The first axis of each array is the
    block. If the device has its own memory, this object has no arrays in host memory. Then ``bind`` creates the KV
    cache on the device.
    """

    def __init__(self, config: Config, ops: OpTable, pool: HostPoolMemory | None = None) -> None:
        """``pool`` has the host blocks in shared memory. If it is None, the host blocks are allocated here."""
        shape = config.shape
        self._layers = [layer for layer in range(shape.num_layers) if shape.has_cache(layer)]
        layouts = _layouts(config, ops, config.pa_config.num_blocks)
        self._host_layouts = _layouts(config, ops, config.num_pool_blocks)
        self._names = [name for part in layouts for name in self._names_of(part)]
        self.num_bytes = len(self._layers) * sum(map(_num_bytes, layouts.values()))
        """Size of the KV cache in bytes, without the host pool."""
        self._pool = None if pool is None else self._shared_pool(pool)
        self._ops = ops
        self.arrays: dict[str, Array] = {}
        """All arrays in host memory, by the names of the model's parameters."""
        if not ops.traits.own_memory:
            for part, layout in layouts.items():
                self.arrays |= {name: future_zeros(*layout) for name in self._names_of(part)}
        states = state_arrays(shape, ops)
        self.state_bytes = sum(array.nbytes for array in states.values())
        """Size of the states of linear attention in bytes. 0 if there are none."""
        self.arrays |= states
        self.pages = CachePages(list(self.arrays.values()))
        self.pages.allocate_first()

    @property
    def block_arrays(self) -> list[Array]:
        """The arrays in host memory whose first axis is the block, in order. Empty if the device has its own memory."""
        return [self.arrays[name] for name in self._names if name in self.arrays]

    def bind(self, parameters: Mapping[str, Any]) -> BlockMoves:
        """Makes this cache the memory of the model's ``parameters``, and allocates the host pool.

        Returns the object that copies blocks of the cache.
        """
        self.bind_parameters(parameters)
        return self.block_moves([parameters[name] for name in self._names])

    def bind_parameters(self, parameters: Mapping[str, Any]) -> None:
        """Makes this cache the memory of the model's ``parameters``."""
        from agent.layers.parameter import bind, create_on_device  # imports mindspore

        self._ops.hooks.take_caches(self.arrays)
        for name, array in self.arrays.items():
            bind(parameters[name], array)
        for name in self._names:
            if name not in self.arrays:
                create_on_device(parameters[name])

    def block_moves(self, parameters: Sequence[Any]) -> BlockMoves:
        """Makes the object that copies blocks of this cache, and allocates the host pool.

        ``parameters`` are the MindSpore Parameters of this cache, in the order of ``arrays``.
        """
        by_name = dict(zip(self._names, parameters, strict=False))
        groups: dict[CacheLayout, list[str]] = {}
        for part, layout in self._host_layouts.items():
            groups.setdefault(layout, []).extend(self._names_of(part))
        moves = [
            self._ops.block_moves(
                [self.arrays[name] for name in names if name in self.arrays],
                [by_name[name] for name in names if name in by_name],
                layout,
                self._pool,
            )
            for layout, names in groups.items()
            if names  # a pipeline stage may have only layers with linear attention
        ]
        return moves[0] if len(moves) == 1 else AllMoves(moves)

    def _shared_pool(self, pool: HostPoolMemory) -> list[Array]:
        """Returns the shared host blocks as one array for each array of the cache.

        Raises AgentStartError unless the arrays have the sizes that the server has calculated.
        """
        layouts = set(self._host_layouts.values())
        (sizes, dtype) = layout = next(iter(layouts))
        wanted, found = (len(self._names), _num_bytes(layout)), (len(pool.arrays), pool.arrays[0].nbytes)
        if len(layouts) != 1 or found != wanted:
            raise AgentStartError(
                f"the shared host blocks are {found[0]} arrays of {found[1]} bytes; the KV cache has {wanted[0]} of"
                f" {wanted[1]} bytes, in {len(layouts)} layouts; set kv_tier_config.host_blocks: 0"
            )
        return [array.view(STORAGE_DTYPES[dtype]).reshape(sizes) for array in pool.arrays]

    def _names_of(self, part: str) -> list[str]:
        return [f"layers.{layer}.attention.{part}" for layer in self._layers]


def state_arrays(shape: ModelShape, ops: OpTable) -> dict[str, Array]:
    """Allocates the states of linear attention. Returns their arrays by the names of the model's parameters.

    The result is empty if the model has no linear attention.
    """
    if shape.delta is None:
        return {}
    layout, layers = ops.state_layout(shape.delta), range(shape.num_layers)
    return {f"layers.{n}.attention.states": future_zeros(*layout) for n in layers if not shape.has_cache(n)}


class AllMoves(BlockMoves):
    """Copies blocks of caches with different layouts: passes the moves to one ``BlockMoves`` for each layout."""

    def __init__(self, parts: Sequence[BlockMoves]) -> None:
        self.parts = parts
        self.num_host_bytes = sum(part.num_host_bytes for part in parts)

    def run(self, moves: Int32Array) -> None:
        for part in self.parts:  # all parts have the same numbers of blocks, so only the first can refuse the moves
            part.run(moves)


def _layouts(config: Config, ops: OpTable, num_blocks: int) -> dict[str, CacheLayout]:
    """Returns the layout of each array in which a layer caches keys and values, by the array's name in the layer."""
    shape, size = config.shape, config.pa_config.block_size
    if shape.latent is not None:
        return {"latent_cache": ops.latent_cache_layout(num_blocks, size, shape.latent.cache_dim)}
    layout = ops.cache_layout(num_blocks, size, shape.num_key_value_heads, shape.head_dim)
    scales = ops.scale_layout(num_blocks, size, shape.num_key_value_heads)
    layouts = {"key_cache": layout, "value_cache": layout}
    return layouts if scales is None else layouts | {"scale_cache": scales}


def _num_bytes(layout: CacheLayout) -> int:
    sizes, dtype = layout
    return math.prod(sizes) * np.dtype(STORAGE_DTYPES[dtype]).itemsize
