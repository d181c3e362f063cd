"""Pools of replicas by the length of the prompt (``parallel_config.pools``).

A request belongs to the pool that it names, or else to the pool with the smallest limit that its prompt does not
exceed. While a replica of this pool is ready, the request waits for a replica of this pool. While none is ready, it
goes to the pool with the next larger limit that has a ready replica. A request never goes to a pool whose limit its
prompt exceeds. The limit is for the prompt only: outputs, preemptions and restarts do not change the pool.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from llm_serving.request import Request
from llm_serving.routing.replica import RoutedReplica


@dataclass(frozen=True, slots=True)
class PromptPool:
    """A pool of replicas, and the length of its longest prompt. None: any length."""

    name: str
    num_replicas: int
    max_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """The present state of a pool, for ``/server_info`` and metrics."""

    name: str
    max_prompt_tokens: int | None
    replicas: tuple[int, ...]
    """Numbers of the pool's replicas."""
    ready: int
    """Number of the pool's replicas that may get requests."""
    waiting: int
    """Number of the pool's requests that wait for a replica."""
    running: int
    """Number of requests in the batches of the pool's replicas."""
    needing: int
    """Number of requests that need the pool: its own ones that have not ended, wherever they run, and those of other
    pools at its replicas.
    """
    placed: int
    """Number of requests that the router placed at the pool's replicas since the start."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class PoolState(NamedTuple):
    """The state of a pool by prompt length, which decides whether its nodes are used."""

    is_idle: bool
    """True if the pool has no requests, and its replicas have none."""
    is_ready: bool
    """True if a replica of the pool may get requests."""


class PromptPools:
    """The pools of a router, numbered by their limits: pool 0 has the smallest limit."""

    def __init__(self, pools: Iterable[PromptPool]) -> None:
        """At most one pool may have no limit."""
        self._pools = sorted(pools, key=lambda pool: (pool.max_prompt_tokens is None, pool.max_prompt_tokens or 0))
        self._limits = [pool.max_prompt_tokens for pool in self._pools if pool.max_prompt_tokens is not None]
        self._numbers = {pool.name: number for number, pool in enumerate(self._pools)}
        self._pool_of_replica = _deal([pool.num_replicas for pool in self._pools])

    @classmethod
    def of_all(cls, num_replicas: int) -> PromptPools:
        """Returns one pool without a name, which has all replicas and serves prompts of any length."""
        return cls([PromptPool("", num_replicas)])

    def __len__(self) -> int:
        return len(self._pools)

    def name_of(self, replica: int) -> str:
        """Returns the name of the pool to which a replica belongs."""
        return self._pools[self._pool_of_replica[replica]].name

    def pool_of(self, request: Request) -> int:
        """Returns the number of the pool that the request names, or else of the pool for the length of its prompt.

        The last pool gets all prompts that no other pool takes.
        """
        if request.pool:
            return self._numbers[request.pool]
        return min(bisect_left(self._limits, len(request.prompt_token_ids)), len(self._pools) - 1)

    def able(self, pool: int, replicas: Sequence[RoutedReplica]) -> list[RoutedReplica]:
        """Returns the members of ``replicas`` that may serve the requests of a pool: those of this pool. If there are
        none, returns those of the next pool for longer prompts that has some.
        """
        if len(self._pools) == 1:
            return list(replicas)
        for number in range(pool, len(self._pools)):
            if own := self._own(number, replicas):
                return own
        return []

    def ready(self, pool: int, replicas: Sequence[RoutedReplica]) -> list[RoutedReplica]:
        """Returns the ready members of ``replicas`` that may serve the requests of a pool."""
        return self.able(pool, [replica for replica in replicas if replica.is_live])

    def loss_of(self, pool: int) -> str:
        """Returns the error for a request of a pool if neither this pool nor a pool for longer prompts has replicas."""
        names = ", ".join(one.name for one in self._pools[pool:])
        return f"no replica is left for prompts of this length: all replicas of the pools for them ({names}) were lost"

    def _own(self, pool: int, replicas: Sequence[RoutedReplica]) -> list[RoutedReplica]:
        return [replica for replica in replicas if self._pool_of_replica[replica.index] == pool]

    def states(self, replicas: Sequence[RoutedReplica], unended: Sequence[Collection[str]]) -> dict[str, PoolState]:
        """Returns whether each pool is idle and ready. ``unended`` has the ids of each pool's requests."""
        found = {}
        for number, pool in enumerate(self._pools):
            own = self._own(number, replicas)
            is_idle = not unended[number] and all(not one.entries and one.scheduler.is_idle for one in own)
            found[pool.name] = PoolState(is_idle, any(replica.is_live for replica in own))
        return found

    def statuses(
        self, replicas: Sequence[RoutedReplica], waiting: Sequence[int], unended: Sequence[Collection[str]]
    ) -> list[PoolStatus]:
        """Returns the status of each pool. ``waiting`` has the number of waiting requests of each pool, and ``unended``
        the ids of its requests that have not ended.
        """
        found = []
        for number, pool in enumerate(self._pools):
            own = self._own(number, replicas)
            guests = sum(name not in unended[number] for one in own for name in list(one.entries))
            found.append(
                PoolStatus(
                    name=pool.name,
                    max_prompt_tokens=pool.max_prompt_tokens,
                    replicas=tuple(replica.index for replica in own),
                    ready=sum(replica.is_live for replica in own),
                    waiting=waiting[number],
                    running=sum(replica.scheduler.figures.running for replica in own),
                    needing=len(unended[number]) + guests,
                    placed=sum(sum(replica.num_placed.values()) for replica in own),
                )
            )
        return found


def _deal(counts: Sequence[int]) -> list[int]:
    """Returns the pool of each replica. Each pool gets one replica in a round, and the last pool is the first in it.

    So replica 0 serves all prompts, and the first replicas cover all pools. Replicas get nodes in order. So prompts of
    every length are served even if there are fewer nodes than replicas.
    """
    left, dealt = list(counts), list[int]()
    while any(left):
        for number in reversed(range(len(left))):
            if left[number]:
                left[number] -= 1
                dealt.append(number)
    return dealt
