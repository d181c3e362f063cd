"""Limits how many requests may start in one step under policy ``slo``.

The limit keeps running requests fast. It also prevents late requests from starting instead of requests on time.
"""

from __future__ import annotations

from llm_serving.scheduler.sequence import Sequence
from llm_serving.scheduler.snapshot import Stateful
from llm_serving.scheduler.state import SchedulerState
from llm_serving.waiting.slo_order import SloOrder

STEPS_FOR_ONE_MORE = 32
"""Even if no request ends, one late request may start after this number of steps. With 8 or less, late requests
overload the server in waves."""

_PLENTY = 0.5
"""Late requests start without limit while less than this fraction of blocks and batch rows is in use."""


class SloStarts(Stateful):
    """Decides which requests start in a step, by objectives only. ``Starter`` checks batch rows, blocks and admission.

    Pace
        At most ``max_starts`` requests start, so that running sequences keep their objective for the time between
        tokens.

    Late requests
        While requests on time are expected, one late request may start for each request that has ended since the last
        step, and one more after every ``STEPS_FOR_ONE_MORE`` steps. At most one unused start is kept for later steps.
        Without this limit, late requests would use all free capacity whenever no request on time waits. They would soon
        hold every block. Then no request could start for seconds, and all requests that arrive in this time would also
        become late.

    Late requests start without this limit in three cases:

    * Less than half of the blocks and less than half of the usable batch rows are in use.
    * No request has arrived for the duration of an objective.
    * ``SloOrder`` has reserved the start: every ``LATE_SHARE``-th start is for a late request.
    """

    STATE = ("_credit", "_num_started", "_num_left", "_holds_back")

    def __init__(self, state: SchedulerState, order: SloOrder) -> None:
        self._state = state
        self._order = order
        self._credit = 1.0
        """Number of late requests that may start. The start of a request on time also subtracts 1, so the number can be
        negative.
        """
        self._num_started = 0
        self._num_left: int | None = None
        self._holds_back = False

    def begin_step(self, max_starts: int | None, now: float) -> None:
        """Begins a step in which at most ``max_starts`` requests may start. None means no limit."""
        state, order = self._state, self._order
        num_ended = max(self._num_started - state.num_started, 0)
        self._num_started = state.num_started
        self._num_left = max_starts
        self._holds_back = order.num_late > 0 and order.expects_more(now) and self._use(max_starts) >= _PLENTY
        if self._holds_back:
            self._credit = min(self._credit + num_ended + 1 / STEPS_FOR_ONE_MORE, max(1.0, num_ended))
        elif not order.num_late:
            self._credit = 1.0

    def may_start(self, sequence: Sequence) -> bool:
        """Returns True if ``sequence``, the first waiting request, may start."""
        if self._num_left is not None and self._num_left <= 0:
            return False
        return not self._holds_back or self._credit >= 1.0 or not self._order.is_spare(sequence)

    def started(self, sequence: Sequence) -> None:
        """Records that a request starts."""
        self._num_started += 1
        self._credit -= 1.0
        if self._num_left is not None:
            self._num_left -= 1

    def _use(self, max_starts: int | None) -> float:
        """Returns the larger of two fractions: that of the blocks in use, and that of the usable batch rows in use.
        """
        state = self._state
        num_running, num_rows = len(state.running), state.limits.max_num_seqs
        if max_starts is not None:
            num_rows = min(num_rows, num_running + max_starts)
        return max(state.page_use, num_running / num_rows if num_rows else 1.0)
