"""Moves blocks of a cache in device memory with MindSpore's ``swap_cache``. Sources: docs/ascend.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from mindspore import Tensor
from mindspore._c_expression import swap_cache

from agent.backends.base import CacheLayout
from agent.backends.device import BlockMoves
from agent.layers.parameter import as_tensor
from agent.step_inputs import Int32Array
from agent.weights.storage import Array, zeros
from llm_serving.errors import AgentError
from llm_serving.ipc.shm import MoveKind

Pair = tuple[int, int]

STAGING_BLOCKS = 16
"""Size, in blocks, of the host buffer for copies from one block of the device to another. These copies pass through
host memory."""


class DeviceBlockMoves(BlockMoves):
    """Copies blocks with MindSpore's ``swap_cache``. This function reports no errors. Therefore this class checks every
    copy before it runs, and checks once that ``swap_cache`` works.

    ``swap_cache(host, device, mapping, is_device_to_host)`` waits for all streams. Then it copies one block for each
    row (source, destination) of ``mapping`` and waits for the copies. It cannot copy from one block of the device to
    another. Copies within the device therefore go through a buffer in host memory.
    """

    def __init__(
        self,
        parameters: Sequence[Any],
        host: CacheLayout,
        pool: Sequence[Array] | None = None,
        *,
        pinned: bool = True,
    ) -> None:
        """Allocates the host pool. If ``pinned`` is set, the pool is in pinned memory, which the device can access
        directly.

        MindSpore can pin memory only on a machine with an Ascend, so tests on a CPU set ``pinned=False``. A given
        ``pool`` in shared memory is not pinned, because MindSpore can pin only a copy of an array. Transfers to and
        from an unpinned pool take longer.
        """
        (num_host_blocks, *block), dtype = host
        self._caches, self._pinned = list(parameters), pinned
        self._num_blocks, self._num_host_blocks = int(self._caches[0].shape[0]), num_host_blocks
        pools = self._caches if num_host_blocks else []
        if pool is None:
            self._pool = [self._tensor(zeros((num_host_blocks, *block), dtype)) for _ in pools]
        else:
            self._pool = [as_tensor(array) for array in pool]
        self._staging = self._tensor(zeros((STAGING_BLOCKS, *block), dtype))
        self._one_block = zeros((1, *block), dtype)
        self.num_host_bytes = self._one_block.nbytes * num_host_blocks * len(pools)
        self._is_proven = False

    def run(self, moves: Int32Array) -> None:
        for move in moves.tolist():
            self._check(*move)
        if not self._is_proven:
            self._prove()
        for kind, pairs in batches(moves):
            if kind == MoveKind.COPY:
                for start in range(0, len(pairs), STAGING_BLOCKS):
                    self._copy_within(pairs[start : start + STAGING_BLOCKS])
                continue
            mapping = _mapping(pairs)
            for pool, cache in zip(self._pool, self._caches, strict=True):
                swap_cache(pool, cache, mapping, kind == MoveKind.SWAP_OUT)

    def _copy_within(self, pairs: Sequence[Pair]) -> None:
        out = _mapping([(source, place) for place, (source, _) in enumerate(pairs)])
        back = _mapping([(place, destination) for place, (_, destination) in enumerate(pairs)])
        for cache in self._caches:
            swap_cache(self._staging, cache, out, True)
            swap_cache(self._staging, cache, back, False)

    def _check(self, kind: int, source: int, destination: int) -> None:
        if not MoveKind.COPY <= kind <= MoveKind.SWAP_IN:  # hand-overs do not reach this class
            raise AgentError(f"a move has kind {kind}; kinds are 0 to {MoveKind.SWAP_IN}")
        source_limit = self._num_host_blocks if kind == MoveKind.SWAP_IN else self._num_blocks
        destination_limit = self._num_host_blocks if kind == MoveKind.SWAP_OUT else self._num_blocks
        for name, block, limit in (("source", source, source_limit), ("destination", destination, destination_limit)):
            if not 0 <= block < limit:
                raise AgentError(f"a move's {name} is block {block}; it must be at least 0 and below {limit}")

    def _prove(self) -> None:
        """Checks that ``swap_cache`` works: copies a test pattern to the device and back, and compares the bytes.

        The copies use the null block of the first and of the last layer's cache, and restore its content. Raises
        AgentError if the bytes differ. Without this check, a broken ``swap_cache`` would corrupt the cache unnoticed.
        """
        kept, returned = self._tensor(self._one_block.copy()), self._tensor(self._one_block.copy())
        pattern = self._one_block.copy()
        pattern.view(np.uint8).reshape(-1)[:] = np.arange(pattern.nbytes) % 251
        sent, block = self._tensor(pattern), _mapping([(0, 0)])
        for number in (0, len(self._caches) - 1):
            cache = self._caches[number]
            swap_cache(kept, cache, block, True)
            swap_cache(sent, cache, block, False)
            swap_cache(returned, cache, block, True)
            swap_cache(kept, cache, block, False)
            if returned.asnumpy().tobytes() != pattern.tobytes():
                raise AgentError(
                    f"a block that was copied to cache {number} of the device and back has changed: MindSpore's "
                    "swap_cache does not work on this machine; set pa_config.num_host_blocks: 0 and "
                    "scheduler_config.prefix_cache: false"
                )
        self._is_proven = True

    def _tensor(self, array: Array) -> Tensor:
        tensor = as_tensor(array)
        return tensor.pin_memory() if self._pinned else tensor


def batches(moves: Int32Array) -> Iterator[tuple[MoveKind, list[Pair]]]:
    """Groups consecutive moves of the same kind into batches. Yields the kind and the moves of each batch.

    The copies of a batch run together: a batch of copies within the cache reads all source blocks before it writes any
    block. So a copy whose source is the destination of an earlier copy starts a new batch.
    """
    kind = MoveKind.COPY
    pairs: list[Pair] = []
    for code, source, destination in moves.tolist():
        reads_written = kind == MoveKind.COPY and any(source == written for _, written in pairs)
        if pairs and (code != kind or reads_written):
            yield kind, pairs
            pairs = []
        kind = MoveKind(code)
        pairs.append((source, destination))
    if pairs:
        yield kind, pairs


def _mapping(pairs: Sequence[Pair]) -> Tensor:
    array: npt.NDArray[np.int64] = np.array(pairs, np.int64)
    return Tensor(array)
