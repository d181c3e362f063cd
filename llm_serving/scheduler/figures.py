"""The figures of one scheduler, as ``Figures`` names them: for the status pages, the log and the flight recorder."""

from __future__ import annotations

from llm_serving.scheduler.lifecycle import Lifecycle
from llm_serving.scheduler.state import SchedulerState

__all__ = ["SchedulerFigures"]


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
