"""Which requests policy ``slo`` lets start in a step, beyond what rows, blocks and admission allow.

Pace
    No more than leave every row its time between tokens; the policy says how many that are.

Late ones
    Where somebody on time waits, the order of the queue sees to it (``slo_order``). Where nobody does, those that are
    late anyway could have all room at once; but then they grow into every block there is, nobody starts for seconds,
    and all who come meanwhile are late too: the next wave. So while requests that can be on time keep coming, the
    number of running ones goes up slowly on behalf of late ones: one may start for each request that has ended and
    was not replaced, and one more every ``STEPS_FOR_ONE_MORE`` steps. What ended while nobody could start is not made
    up for. This is a token bucket whose depth is one request, or all that ended since the step before.

    Nothing is held back where less than half of the blocks, and of the rows that can keep their pace, are in use, or
    when nobody has come for as long as an objective for the first token takes. And the turn that late ones have after
    so many others is theirs.
"""

from __future__ import annotations

from llm_serving.scheduler.sequence import Sequence
from llm_serving.scheduler.slo_order import SloOrder
from llm_serving.scheduler.state import SchedulerState

__all__ = ["STEPS_FOR_ONE_MORE", "SloStarts"]

STEPS_FOR_ONE_MORE = 32
"""Steps after which late requests may be one more. From 8 on overload comes in waves again."""

_PLENTY = 0.5
"""Share of blocks, and of the rows that can keep their pace, in use below which late ones start as they like."""


class SloStarts:
    """A ``StartGate``; ``begin_step`` comes before every step that it is asked about."""

    def __init__(self, state: SchedulerState, order: SloOrder) -> None:
        self._state = state
        self._order = order
        self._credit = 1.0
        """Late ones that may start; negative when more others started than requests ended."""
        self._num_started = 0
        self._num_left: int | None = None
        self._holds_back = False

    def begin_step(self, max_starts: int | None, now: float) -> None:
        """``max_starts``: that many requests start in the step at most; None for any number."""
        state, order = self._state, self._order
        num_ended = max(self._num_started - state.num_started, 0)
        self._num_started = state.num_started
        self._num_left = max_starts
        self._holds_back = bool(order.num_late) and now < order.next_expected and self._use(max_starts) >= _PLENTY
        if self._holds_back:
            most = max(1.0, num_ended)
            self._credit = min(self._credit + num_ended + 1 / STEPS_FOR_ONE_MORE, most)
        elif not order.num_late:
            self._credit = 1.0

    def may_start(self, sequence: Sequence) -> bool:
        if self._num_left is not None and self._num_left <= 0:
            return False
        return not self._holds_back or self._credit >= 1.0 or not self._order.is_spare(sequence)

    def started(self, sequence: Sequence) -> None:
        self._num_started += 1
        self._credit -= 1.0
        if self._num_left is not None:
            self._num_left -= 1

    def _use(self, max_starts: int | None) -> float:
        state = self._state
        num_running, num_rows = len(state.running), state.limits.max_num_seqs
        if max_starts is not None:
            num_rows = min(num_rows, num_running + max_starts)
        return max(state.page_use, num_running / num_rows if num_rows else 1.0)
