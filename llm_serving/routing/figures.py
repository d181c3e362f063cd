"""The figures of many schedulers and the queue before them, as those of one."""

from __future__ import annotations

from collections.abc import Sequence

from llm_serving.scheduler.intake import RequestQueue
from llm_serving.scheduler.protocols import Figures

__all__ = ["RouterFigures"]


class RouterFigures:
    """The ``Figures`` of a ``Router``: the sums of its replicas', with the requests in its ``queue`` as waiting."""

    def __init__(self, replicas: Sequence[Figures], queue: RequestQueue) -> None:
        self._replicas = replicas
        self._queue = queue

    @property
    def num_running(self) -> int:
        return sum(replica.num_running for replica in self._replicas)

    @property
    def num_waiting(self) -> int:
        return self.num_unplaced + sum(replica.num_waiting for replica in self._replicas)

    @property
    def num_unplaced(self) -> int:
        """Requests that no replica has."""
        return len(self._queue)

    @property
    def num_swapped(self) -> int:
        return sum(replica.num_swapped for replica in self._replicas)

    @property
    def num_preemptions(self) -> int:
        return sum(replica.num_preemptions for replica in self._replicas)

    @property
    def num_swaps(self) -> int:
        return sum(replica.num_swaps for replica in self._replicas)

    @property
    def num_blocks(self) -> int:
        return sum(replica.num_blocks for replica in self._replicas)

    @property
    def num_free_blocks(self) -> int:
        return sum(replica.num_free_blocks for replica in self._replicas)

    @property
    def kv_waste(self) -> float:
        """The replicas' mean, by the blocks in use."""
        used = [replica.num_blocks - replica.num_free_blocks for replica in self._replicas]
        wasted = sum(replica.kv_waste * blocks for replica, blocks in zip(self._replicas, used, strict=True))
        return wasted / sum(used) if sum(used) else 0.0

    @property
    def prefix_query_tokens(self) -> int:
        return sum(replica.prefix_query_tokens for replica in self._replicas)

    @property
    def prefix_hit_tokens(self) -> int:
        return sum(replica.prefix_hit_tokens for replica in self._replicas)
