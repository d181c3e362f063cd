"""The KV cache's memory: for each layer, keys and values in blocks of a fixed number of tokens (Kwon et al. 2023)."""

from __future__ import annotations

from agent.weights.storage import Array, allocate
from llm_serving.config import Config


class KVCache:
    """Owns the arrays the attention layers write to in place. Which block belongs to whom is the server's business.

    ``keys[layer]`` and ``values[layer]`` are [num_blocks, block_size, key-value heads, head_dim].
    """

    def __init__(self, config: Config) -> None:
        shape, cache, dtype = config.shape, config.pa_config, config.model_config.model_dtype
        block_shape = (cache.block_size, shape.num_key_value_heads, shape.head_dim)
        layer_shape = (cache.num_blocks, *block_shape)
        self.keys = [_zeros(layer_shape, dtype) for _ in range(shape.num_layers)]
        self.values = [_zeros(layer_shape, dtype) for _ in range(shape.num_layers)]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.keys + self.values)


def _zeros(shape: tuple[int, ...], dtype: str) -> Array:
    """Written now, so that the pages are really there and not only promised."""
    array = allocate(shape, dtype)
    array.fill(0)
    return array
