"""The KV cache's memory: for each layer, keys and values in blocks of a fixed number of tokens (Kwon et al. 2023).

Beside it a pool of blocks of the same layout in host memory, for sequences that are swapped out.
"""

from __future__ import annotations

from agent.backends.base import CacheLayout, OpTable
from agent.kernels import BlockCopies
from agent.step_inputs import Int32Array
from agent.weights.storage import Array, allocate
from llm_serving.config import Config
from llm_serving.errors import AgentError, AgentStartError


class KVCache:
    """Owns the arrays the attention layers write to in place. Which block belongs to whom is the server's business.

    ``keys[layer]`` and ``values[layer]`` have the layout of ``OpTable.cache_layout``, the block first; so have the
    arrays of the host's pool, where a block is as good as on the device but no graph reads it.
    """

    def __init__(self, config: Config, ops: OpTable) -> None:
        shape, cache = config.shape, config.pa_config

        def layout(num_blocks: int) -> CacheLayout:
            return ops.cache_layout(num_blocks, cache.block_size, shape.num_key_value_heads, shape.head_dim)

        self.keys = [_zeros(*layout(cache.num_blocks)) for _ in range(shape.num_layers)]
        self.values = [_zeros(*layout(cache.num_blocks)) for _ in range(shape.num_layers)]
        self._host = [_zeros(*layout(config.num_host_blocks)) for _ in range(2 * shape.num_layers)]
        if config.device != "CPU" and config.num_host_blocks:
            raise AgentStartError(f"{_cannot_move(config.device)}; set pa_config.num_host_blocks: 0")
        self._device = config.device
        self._copies = BlockCopies(self.keys + self.values, self._host)

    @property
    def num_bytes(self) -> int:
        """Of the device's cache."""
        return sum(array.nbytes for array in self.keys + self.values)

    @property
    def num_host_bytes(self) -> int:
        """Of the pool in host memory."""
        return sum(array.nbytes for array in self._host)

    def move(self, moves: Int32Array) -> None:
        """Copy blocks over all layers, in order; moves [M, 3] are ``MoveKind``, source and destination.

        Raises AgentError when one does not exist; nothing is copied then.
        """
        if self._device != "CPU":
            raise AgentError(f"{_cannot_move(self._device)}; set scheduler_config.prefix_cache: false")
        self._copies.run(moves)


def _cannot_move(device: str) -> str:
    return f"the cache of device {device} is not in the host's memory, and this version cannot copy its blocks"


def _zeros(shape: tuple[int, ...], dtype: str) -> Array:
    """Written now, so that the pages are really there and not only promised."""
    array = allocate(shape, dtype)
    array.fill(0)
    return array
