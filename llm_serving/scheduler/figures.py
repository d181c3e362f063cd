"""The figures of one scheduler, as ``Figures`` names them: for the status pages, the log and the flight recorder.

What is free in a scheduler for one more request to start.
"""

from __future__ import annotations

from dataclasses import dataclass

from llm_serving.scheduler.lifecycle import Lifecycle
from llm_serving.scheduler.slo_order import SloOrder
from llm_serving.scheduler.state import SchedulerState

__all__ = ["SchedulerFigures", "StartRoom"]


class SchedulerFigures:
    """Read off where they are kept. Any thread may look, at numbers a step apart from one another."""

    def __init__(self, state: SchedulerState, lifecycle: Lifecycle) -> None:
        self._state = state
        self._kv_cache = state.kv_cache
        self._running = state.running
        self._lifecycle = lifecycle

    @property
    def num_running(self) -> int:
        """Requests with a row and blocks, but for those that only wait for their last steps to be answered."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without blocks, those preempted among them, but for those swapped."""
        return len(self._lifecycle.sequences) - len(self._running) - len(self._state.swapped)

    @property
    def num_swapped(self) -> int:
        """Requests whose keys and values are in host memory."""
        return len(self._state.swapped)

    @property
    def num_preemptions(self) -> int:
        """Times that a request lost its blocks to others, since the start."""
        return self._lifecycle.num_preemptions

    @property
    def num_swaps(self) -> int:
        """How many of the preemptions were by swapping."""
        return self._lifecycle.num_swaps

    @property
    def num_blocks(self) -> int:
        """Blocks that can be given to sequences."""
        return self._kv_cache.num_usable_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds. What they hold may be found again by the prefix cache."""
        return self._kv_cache.num_free_blocks

    @property
    def kv_waste(self) -> float:
        """Share of the token slots in all block tables that hold nothing, 0 to 1. Prompts that run count as held."""
        return max(0.0, self._kv_cache.waste(self._running.num_held_tokens))

    @property
    def prefix_query_tokens(self) -> int:
        """Tokens that sequences started with."""
        return self._kv_cache.prefix_query_tokens

    @property
    def prefix_hit_tokens(self) -> int:
        """Those of them that the prefix cache had."""
        return self._kv_cache.prefix_hit_tokens

    @property
    def num_steps_in_flight(self) -> int:
        return self._state.in_flight.num_steps

    def counts(self) -> tuple[int, int, int, int, int, int, int]:
        """``num_running``, ``num_waiting``, ``num_free_blocks``, ``num_preemptions``, ``num_steps_in_flight``,
        ``num_swapped``, ``num_swaps``: all at once, for who asks after each call."""
        lifecycle = self._lifecycle
        num_running, num_swapped = len(self._running), len(self._state.swapped)
        return (
            num_running,
            len(lifecycle.sequences) - num_running - num_swapped,
            self._kv_cache.num_free_blocks,
            lifecycle.num_preemptions,
            self._state.in_flight.num_steps,
            num_swapped,
            lifecycle.num_swaps,
        )


@dataclass(frozen=True, slots=True)
class StartRoom:
    """A picture of the moment. A forecast: the batching mode, the admission and the policy are not asked."""

    num_waiting: int
    """Requests that wait here and never ran, but for those that are ``late``: they go behind one on time."""
    num_late: int
    num_returned: int
    """Requests that were preempted, or ran elsewhere, and wait here to go on: they go first."""
    num_free_rows: int
    num_startable: int
    """Free rows that nothing keeps those that wait here from, as far as is known; see ``RequestQueue.limit_starts``."""
    num_free_blocks: int
    """Less those that a start leaves free."""
    num_waiting_blocks: int
    """Blocks for the tokens of all that wait here."""
    is_held_up: bool
    """Somebody is to come back from the host, or the first in line has found no room and nothing has changed since."""
    is_idle: bool
    """Nobody runs or waits: whatever can be served at all can start."""

    @classmethod
    def of(cls, state: SchedulerState) -> StartRoom:
        """That of a scheduler."""
        waiting, running, kv_cache = state.waiting, state.running, state.kv_cache
        num_late = state.order.num_late if isinstance(state.order, SloOrder) else 0
        num_new = len(state.order)
        return cls(
            num_waiting=num_new - num_late,
            num_late=num_late,
            num_returned=waiting.num_returned,
            num_free_rows=running.num_free_rows,
            num_startable=waiting.num_startable(running.num_free_rows),
            num_free_blocks=kv_cache.num_free_blocks - running.reserve(state.limits.watermark_blocks),
            num_waiting_blocks=waiting.num_tokens // kv_cache.block_size + len(waiting),
            is_held_up=bool(state.swapped or running.num_preempted_leaving or state.is_held_up),
            is_idle=not (waiting or len(running) or running.num_leaving or state.swapped),
        )

    @property
    def num_all(self) -> int:
        """Requests that wait here."""
        return self.num_returned + self.num_waiting + self.num_late

    def has_gained(self, before: StartRoom) -> bool:
        """Whether somebody may find room here who found none before."""
        return (
            self.is_idle
            or self.num_free_rows > before.num_free_rows
            or self.num_free_blocks > before.num_free_blocks
            or self.num_waiting_blocks < before.num_waiting_blocks
            or self.num_all < before.num_all
            or self.is_held_up < before.is_held_up
        )

    def num_ahead(self, *, is_late: bool, has_run: bool) -> int:
        """How many of those that wait here go before one more request. ``is_late``: it misses its objective anyway;
        ``has_run``: it was preempted, or ran elsewhere."""
        if has_run:
            return self.num_returned
        return self.num_returned + self.num_waiting + (self.num_late if is_late else 0)

    def holds(self, num_blocks: int, num_ahead: int) -> bool:
        """Whether one more request, of so many blocks that are not there already, finds a row and blocks beside the
        ``num_ahead`` that go before it."""
        if self.is_idle:
            return True
        if self.is_held_up:
            return False
        ahead_blocks = self.num_waiting_blocks * num_ahead // self.num_all if self.num_all else 0
        return self.num_free_rows > num_ahead and self.num_free_blocks >= num_blocks + ahead_blocks
