"""The KV cache's memory: for each layer, keys and values in blocks of a fixed number of tokens (Kwon et al. 2023)."""

from __future__ import annotations

from agent.backends.base import OpTable
from agent.weights.storage import Array, allocate
from llm_serving.config import Config


class KVCache:
    """Owns the arrays the attention layers write to in place. Which block belongs to whom is the server's business.

    ``keys[layer]`` and ``values[layer]`` have the layout of ``OpTable.cache_layout``, the block first.
    """

    def __init__(self, config: Config, ops: OpTable) -> None:
        shape, cache = config.shape, config.pa_config
        layout = ops.cache_layout(cache.num_blocks, cache.block_size, shape.num_key_value_heads, shape.head_dim)
        self.keys = [_zeros(*layout) for _ in range(shape.num_layers)]
        self.values = [_zeros(*layout) for _ in range(shape.num_layers)]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.keys + self.values)


def _zeros(shape: tuple[int, ...], dtype: str) -> Array:
    """Written now, so that the pages are really there and not only promised."""
    array = allocate(shape, dtype)
    array.fill(0)
    return array
