"""Counts of a scheduler's requests, blocks and tokens, for the status pages, the log, the metrics and the router."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from llm_serving.scheduler.integrity import check_integrity
from llm_serving.scheduler.preemption import Preemption
from llm_serving.scheduler.running import RunningSet
from llm_serving.scheduler.state import SchedulerState

if TYPE_CHECKING:
    from llm_serving.block_supply.state_supply import StateSupply


@dataclass(frozen=True, slots=True)
class Figures:
    """Counts of requests, blocks and tokens (figures) of one scheduler, or their sums over several schedulers.

    To add a figure, add a field here, set it in ``of``, and give it a metric in ``telemetry/status_metrics``.
    """

    running: int = 0
    """Running requests: requests with a batch row and blocks that have not ended and were not preempted."""
    waiting: int = 0
    """Requests without blocks that wait to start: new and preempted requests, but not swapped ones."""
    swapped: int = 0
    """Requests whose keys and values are in host memory."""
    preemptions: int = 0
    """Number of times since the start that a running request lost its blocks to other requests."""
    swaps: int = 0
    """Number of preemptions that moved the request's blocks to host memory."""
    total_blocks: int = 0
    """Blocks that sequences can get."""
    free_blocks: int = 0
    """Blocks that no sequence holds. The prefix cache may still find their content."""
    prefix_query_tokens: int = 0
    """Number of tokens looked up in the prefix cache. At each start of a sequence, all its known tokens count."""
    prefix_hit_tokens: int = 0
    """Number of looked-up tokens that were found in the prefix cache."""
    reserved_tokens: int = 0
    """Number of KV positions in the blocks of all block tables."""
    held_tokens: int = 0
    """Number of KV positions that have a token, or will have one when the prompts of running requests are computed."""
    steps_in_flight: int = 0

    @classmethod
    def of(cls, state: SchedulerState, preemption: Preemption) -> Figures:
        """Returns the present figures of a scheduler."""
        intake, running, kv_cache, num_swapped = state.intake, state.running, state.kv_cache, len(state.swapped)
        return cls(
            running=len(running),
            waiting=max(0, len(intake.sequences) - len(running) - num_swapped),
            swapped=num_swapped,
            preemptions=preemption.num_preemptions,
            swaps=preemption.num_swaps,
            total_blocks=kv_cache.num_usable_blocks,
            free_blocks=kv_cache.num_free_blocks,
            prefix_query_tokens=kv_cache.prefix_query_tokens,
            prefix_hit_tokens=kv_cache.prefix_hit_tokens,
            reserved_tokens=kv_cache.num_reserved_tokens,
            held_tokens=_num_held_tokens(running, kv_cache.block_size),
            steps_in_flight=state.in_flight.num_steps,
        )

    def __add__(self, other: Figures) -> Figures:
        return Figures(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(Figures)))

    def as_json(self) -> dict[str, float]:
        """Returns the figures for the status pages as JSON: {public name: value}."""
        names = ("running", "waiting", "free_blocks", "total_blocks", "preemptions", "swapped", "swaps", "kv_waste",
                 "prefix_hit_tokens", "prefix_query_tokens")  # fmt: skip
        return {name: getattr(self, name) for name in names}

    @property
    def used_blocks(self) -> int:
        """Number of blocks that block tables or copies hold."""
        return self.total_blocks - self.free_blocks

    @property
    def kv_waste(self) -> float:
        """Fraction of the KV positions in all block tables that have no token, from 0 to 1."""
        return max(0.0, 1.0 - self.held_tokens / self.reserved_tokens) if self.reserved_tokens else 0.0


def _num_held_tokens(running: RunningSet, block_size: int) -> int:
    """Returns the number of KV positions that have a token, or will have one when the prompts of running requests are
    computed.
    """
    held = 0
    for sequence in running.holders:
        request = sequence.request
        held += min(max(request.num_tokens, request.num_computed_tokens), len(sequence.block_table) * block_size)
    return held


@dataclass(frozen=True, slots=True)
class Capacity:
    """A scheduler's free capacity and its waiting requests. With these numbers, the router forecasts whether a request
    can start.

    The forecast can be wrong: batching mode, admission control and policy may keep a request waiting even if there is
    capacity.
    """

    num_waiting: int
    """Number of waiting requests that never ran and are on time. They start before late requests."""
    num_late: int
    """Number of waiting requests that never ran and will miss their objective."""
    num_preempted: int
    """Number of waiting requests that were preempted here or ran on another replica. They start before all others."""
    num_free_rows: int
    num_startable: int
    """Maximum number of requests that may start now: the free batch rows, or fewer if an admission control, the policy
    or missing blocks limit starts.
    """
    num_free_blocks: int
    """Free blocks minus the number of blocks that must stay free when a sequence starts."""
    num_waiting_blocks: int
    """Number of blocks that the tokens of all waiting requests need."""
    is_held_up: bool
    """True if no new request can start yet, for one of two reasons. A preempted sequence must continue first. Or the
    first waiting request lacked capacity, and nothing has become free since then."""
    is_idle: bool
    """True if no request runs or waits. Then a request can start immediately, whatever its length."""

    @classmethod
    def of(cls, state: SchedulerState) -> Capacity:
        """Returns the present capacity of a scheduler."""
        intake, running, kv_cache = state.intake, state.running, state.kv_cache
        num_late = intake.order.num_late
        return cls(
            num_waiting=len(intake.order) - num_late,
            num_late=num_late,
            num_preempted=intake.num_preempted,
            num_free_rows=running.num_free_rows,
            num_startable=intake.num_startable(running.num_free_rows),
            num_free_blocks=kv_cache.num_free_blocks - running.reserve(state.limits.watermark_blocks),
            num_waiting_blocks=intake.num_tokens // kv_cache.block_size + len(intake),
            is_held_up=bool(state.swapped or running.has_preempted_leaving or _lacks_capacity(state)),
            is_idle=not (intake or len(running) or running.num_leaving or state.swapped),
        )

    @property
    def num_all(self) -> int:
        """Number of waiting requests, including preempted and late requests."""
        return self.num_preempted + self.num_waiting + self.num_late

    def has_grown(self, before: Capacity) -> bool:
        """Returns True if a request that did not fit with the earlier capacity ``before`` may fit now."""
        return (
            self.is_idle
            or self.num_free_rows > before.num_free_rows
            or self.num_free_blocks > before.num_free_blocks
            or self.num_waiting_blocks < before.num_waiting_blocks
            or self.num_all < before.num_all
            or self.is_held_up < before.is_held_up
        )

    def num_ahead(self, *, is_late: bool, has_run: bool) -> int:
        """Returns the number of waiting requests that start before one more request would start.

        ``is_late``: the additional request will miss its objective in any case. ``has_run``: the additional request was
        preempted or ran on another replica.
        """
        if has_run:
            return self.num_preempted
        return self.num_preempted + self.num_waiting + (self.num_late if is_late else 0)

    def fits(self, num_blocks: int, num_ahead: int) -> bool:
        """Returns True if the capacity suffices for one more request with ``num_blocks`` blocks, after the
        ``num_ahead`` requests before it have started.
        """
        if self.is_idle:
            return True
        if self.is_held_up:
            return False
        blocks_ahead = self.num_waiting_blocks * num_ahead // self.num_all if self.num_all else 0
        return self.num_free_rows > num_ahead and self.num_free_blocks >= num_blocks + blocks_ahead


def _lacks_capacity(state: SchedulerState) -> bool:
    """Returns True if the first waiting request lacked capacity, and no capacity has become free since then."""
    if state.no_capacity is None:
        return False
    num_changes, rows, blocks = state.no_capacity
    running = state.running
    return (
        num_changes == running.num_changes
        and running.num_free_rows <= rows
        and state.kv_cache.num_free_blocks <= blocks
    )


class SchedulerFigures:
    """The methods of a scheduler that only read its state, for the status pages, the log, the metrics and a router."""

    _state: SchedulerState
    _preemption: Preemption
    _states: StateSupply | None

    @property
    def figures(self) -> Figures:
        """The present figures.

        Any thread may read them. If a thread reads them during ``update``, some figures may be from before the update
        and some from after it.
        """
        return Figures.of(self._state, self._preemption)

    @property
    def num_preemptions(self) -> int:
        """The same as ``figures.preemptions``, at a lower cost. The engine reads it in every loop iteration."""
        return self._preemption.num_preemptions

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests. The same as ``figures.waiting``, at a lower cost."""
        return len(self._state.intake.sequences) - len(self._state.running) - len(self._state.swapped)

    def counts(self) -> tuple[int, int, int, int, int, int, int]:
        """Returns seven figures at a lower cost than ``figures``: ``running``, ``waiting``, ``free_blocks``,
        ``preemptions``, ``steps_in_flight``, ``swapped`` and ``swaps``.
        """
        preemption, num_running, num_swapped = self._preemption, len(self._state.running), len(self._state.swapped)
        return (
            num_running,
            len(self._state.intake.sequences) - num_running - num_swapped,
            self._state.kv_cache.num_free_blocks,
            preemption.num_preemptions,
            self._state.in_flight.num_steps,
            num_swapped,
            preemption.num_swaps,
        )

    @property
    def is_idle(self) -> bool:
        """True if there is no request and no step in flight."""
        return not self._state.intake.sequences and not self._state.in_flight.num_steps

    @property
    def num_requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self._state.intake.sequences)

    @property
    def num_spare_rows(self) -> int:
        """Number of requests that could start in free batch rows, minus the waiting requests that never ran.

        The number may be negative. A router reads it for each request, because ``capacity`` costs more.
        """
        intake = self._state.intake
        return intake.num_startable(self._state.running.num_free_rows) - len(intake.order)

    def capacity(self) -> Capacity:
        """Returns the present capacity to start requests. Changes nothing."""
        return Capacity.of(self._state)

    def known_prefix(self, hashes: Iterable[bytes]) -> tuple[int, int]:
        """Returns ``(known, held)`` for a request. ``hashes`` are the chained hashes of its blocks.

        ``known`` is the number of leading blocks that are cached or that steps in flight compute. ``held`` is the
        number of these blocks that are in use.
        """
        return self._state.kv_cache.prefixes.known(hashes) if self._state.limits.prefix_cache else (0, 0)

    @property
    def prefill_estimate(self) -> tuple[float, float]:
        """The learned time of a prefill step as (seconds of a nearly empty step, seconds per token). (0, 0) if it is
        unknown.
        """
        return self._state.intake.order.estimate

    def check_integrity(self) -> None:
        """Raises AssertionError unless each block and batch row is either held or free, and the counts agree with the
        steps in flight.

        The cost is proportional to the number of held blocks. An idle scheduler holds no blocks.
        """
        check_integrity(self._state)
        if self._states is not None:
            self._states.check_integrity()
