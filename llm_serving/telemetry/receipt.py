"""The receipt of a request: the time that it spent in each phase. The scheduler keeps one receipt for each request.

A request is in one phase at a time. Times are whole microseconds, and the duration of a phase is the difference of two
times. The phases of a receipt therefore add up exactly to its whole time.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

MAX_BLOCKERS = 8
"""Maximum number of blocking requests that a receipt names."""
_TRACKED_BLOCKERS = 4 * MAX_BLOCKERS
"""Maximum number of blocking requests that are counted for a request."""


class Phase(enum.IntEnum):
    """The phases of a request."""

    QUEUED = 0
    """The phase from the arrival in the queue to the first scheduled step."""
    PREFILL = 1
    """The phase from the first scheduled step to the first token."""
    DECODE = 2
    """The phase from the first token to the last token, except while the request is in one of the next three phases."""
    PREEMPTED = 3
    """The phase from a preemption with recompute to the next token. The request waits, and its tokens are computed
    again."""
    SWAPPED = 4
    """The phase from a preemption with swap, which moves blocks to host memory, to the next token."""
    RESTARTED = 5
    """The phase from the loss of an agent, or of a step that never ran, to the next token. The request waits for the
    restart of the agent and then in the queue, and its tokens are computed again."""
    DONE = 6


class BlockReason(enum.Enum):
    """Reasons why the first request of the queue could not start."""

    ROWS = "rows"
    """The request waits because every batch row is in use."""
    BLOCKS = "blocks"
    """The request waits because the KV cache has too few free blocks."""
    ADMISSION = "admission"
    """The request waits because the running requests are expected to need the free blocks."""
    BATCH = "batch"
    """The request waits because the next step is full, or because the batch waits for more requests."""
    POLICY = "policy"
    """The request waits because the policy chose another kind of step."""
    PREFIX = "prefix"
    """The request waits for a step that computes its prefix for another request. Both requests then share the blocks.
    """
    LOAD = "load"
    """The request waits for its blocks from a KV tier. Loading them takes less time than computing them."""
    PREEMPTED_FIRST = "preempted_first"
    """The request waits because a request that was preempted or restarted starts first."""


class WaitingLine:
    """Measures, for each reason, how long the first request of a queue could not start. Each queue has one object.

    The receipts of all requests in the queue include this time, because all of them wait behind the first one.
    """

    __slots__ = ("_blocked_us", "_reason", "_since", "blockers")

    def __init__(self) -> None:
        self.blockers: tuple[str, ...] = ()
        """Ids of the requests that prevented the first request from starting at the last attempt."""
        self._reason: BlockReason | None = None
        self._since = 0
        self._blocked_us: dict[BlockReason, int] = {}

    def blocked(self, reason: BlockReason, by: Sequence[str], now: float) -> None:
        """Records why the first request cannot start now. The time until the next attempt counts for ``reason``."""
        self.moved(now)
        self._reason, self._since = reason, microseconds(now)
        if by:
            self.blockers = tuple(by[:MAX_BLOCKERS])

    def moved(self, now: float) -> None:
        """Records that the first request starts, or that the queue is empty, so the queue is no longer blocked."""
        if self._reason is not None:
            self._blocked_us = self.total(microseconds(now))
            self._reason = None

    def total(self, now_us: int) -> dict[BlockReason, int]:
        """Returns, for each reason, the microseconds for which it has blocked the queue up to ``now_us``."""
        total, reason = self._blocked_us.copy(), self._reason
        if reason is not None:
            total[reason] = total.get(reason, 0) + max(0, now_us - self._since)
        return total


class Receipt:
    """The times of one request: the time in each phase, and the time for which it was blocked, by reason.

    The arguments ``start`` and ``now`` are seconds of one monotonic clock. One thread changes the receipt, and other
    threads may read it.
    """

    __slots__ = ("_blocked_before", "_blocked_since", "_blockers", "_joined_at", "_line", "_reason", "_state",
                 "blocked_us", "cached_tokens", "chunks", "num_blocked", "preemptions", "start_us",
                 "swaps")  # fmt: skip

    def __init__(self, start: float = 0.0) -> None:
        self.start_us = microseconds(start)
        # The phase, its start and the times of completed phases are one tuple, so that other threads read a consistent
        # state.
        self._state = (Phase.QUEUED, self.start_us, (0,) * len(Phase))
        self.preemptions = 0
        """Number of times that the request lost its blocks and had to be computed again."""
        self.swaps = 0
        """Number of times that the request moved to host memory."""
        self.chunks = 0
        """Number of prefill steps of the request."""
        self.cached_tokens = 0
        """Number of prompt tokens found in the prefix cache at the first start."""
        self.num_blocked: dict[BlockReason, int] = {}
        """Number of failed attempts to start the request while it was first in its queue, by reason."""
        self.blocked_us: dict[BlockReason, int] = {}
        """Microseconds for which the request waited, by the reason why the first request of its queue could not start.

        The first request may be this request itself.
        """
        self._blockers: dict[str, int] = {}
        self._reason: BlockReason | None = None
        self._blocked_since = 0
        self._line: WaitingLine | None = None
        self._joined_at: dict[BlockReason, int] = {}
        self._blocked_before: dict[BlockReason, int] = {}
        """Microseconds for which the request was blocked in the queues that it has left, by reason."""

    def join(self, line: WaitingLine, now: float | None = None) -> None:
        """Records that the request waits in a queue from ``now`` on. ``line`` measures how long the queue is blocked.
        """
        now_us = self.start_us if now is None else microseconds(now)
        if self._line is not None:
            self._blocked_before = self._blocked_in_lines(now_us)
        self._line, self._joined_at = line, line.total(now_us)

    def enter(self, phase: Phase, now: float) -> None:
        """Ends the present phase and begins ``phase``. For PREEMPTED and SWAPPED, also counts a preemption or a swap.
        """
        before, since, _ = self._state
        if before is Phase.DONE:
            raise AssertionError(f"a request that has ended enters {phase.name}")
        now_us = max(microseconds(now), since)
        self._state = (phase, now_us, self._phases_until(now_us))
        self._close_block(now_us)
        self._leave(now_us)
        if phase is Phase.PREEMPTED:
            self.preemptions += 1
        elif phase is Phase.SWAPPED:
            self.swaps += 1

    def blocked(self, reason: BlockReason, by: Sequence[str], now: float | None = None) -> None:
        """Records a failed attempt to start the request while it is the first of its queue.

        ``by`` are the ids of the requests that blocked it, the most important first. Only the first 8 are recorded. If
        ``now`` is given, the time from ``now`` to the next attempt counts as blocked for ``reason``. If it is None,
        only the attempt is counted.
        """
        self.num_blocked[reason] = self.num_blocked.get(reason, 0) + 1
        if now is not None:
            now_us = max(microseconds(now), self.end_us)
            self._close_block(now_us)
            self._reason, self._blocked_since = reason, now_us
        for request_id in by[:MAX_BLOCKERS]:
            self._note_blocker(request_id)

    def unblocked(self, now: float) -> None:
        """Records that the request is no longer blocked, because it starts.

        Call this method for a preempted request that starts again, because its phase does not change until its next
        token. For other requests, ``enter`` records that they are no longer blocked.
        """
        self._close_block(microseconds(now))

    def blocked_until(self, now: float) -> dict[BlockReason, int]:
        """Returns the microseconds for which the request was blocked up to ``now``, by reason.

        The result includes the time in the request's present queue. ``blocked_us`` gets this time only when the request
        leaves the queue.
        """
        return self.blocked_us.copy() if self._line is None else self._blocked_in_lines(microseconds(now))

    @property
    def phase(self) -> Phase:
        """The present phase."""
        return self._state[0]

    @property
    def phase_us(self) -> tuple[int, ...]:
        """Microseconds in each completed phase. The index is a ``Phase``."""
        return self._state[2]

    @property
    def end_us(self) -> int:
        """Start of the present phase in microseconds. For an ended request, this is its end."""
        return self._state[1]

    @property
    def blockers(self) -> list[str]:
        """Ids of at most 8 blocking requests, the most frequent first."""
        seen = sorted(self._blockers.copy().items(), key=lambda entry: -entry[1])
        return [request_id for request_id, _ in seen[:MAX_BLOCKERS]]

    def phases_until(self, now: float) -> tuple[int, ...]:
        """Returns the microseconds in each phase up to ``now``, including the present phase.

        The index is a ``Phase``.
        """
        return self._phases_until(microseconds(now))

    def _phases_until(self, now_us: int) -> tuple[int, ...]:
        phase, since, phase_us = self._state
        if phase is Phase.DONE or now_us <= since:
            return phase_us
        return (*phase_us[:phase], phase_us[phase] + now_us - since, *phase_us[phase + 1 :])

    def _close_block(self, now_us: int) -> None:
        if self._reason is not None:
            spent = max(0, now_us - self._blocked_since)
            self.blocked_us[self._reason] = self.blocked_us.get(self._reason, 0) + spent
            self._reason = None

    def _leave(self, now_us: int) -> None:
        line = self._line
        if line is None:
            return
        self.blocked_us = self._blocked_in_lines(now_us)
        self._line, self._joined_at, self._blocked_before = None, {}, {}
        # A request without recorded blockers was never the first of the queue. It waited behind the first request, so
        # it gets the blockers of the first request.
        if self.blocked_us and not self._blockers:
            for request_id in line.blockers:
                self._note_blocker(request_id)

    def _blocked_in_lines(self, now_us: int) -> dict[BlockReason, int]:
        """Returns, by reason, the microseconds for which the request was blocked up to ``now_us`` in all its queues."""
        line, joined_at, total = self._line, self._joined_at, self._blocked_before
        if line is None:
            return total.copy()
        here = _difference(line.total(now_us), joined_at)
        return {reason: total.get(reason, 0) + here.get(reason, 0) for reason in {**total, **here}} if total else here

    def _note_blocker(self, request_id: str) -> None:
        """Counts a blocking request in bounded memory (Space-Saving, Metwally et al. 2005).

        A new id replaces the least frequent one and takes over its count, so frequent ids stay.
        """
        blockers = self._blockers
        if request_id in blockers:
            blockers[request_id] += 1
        elif len(blockers) < _TRACKED_BLOCKERS:
            blockers[request_id] = 1
        else:
            least = min(blockers, key=blockers.__getitem__)
            blockers[request_id] = blockers.pop(least) + 1


def _difference(total: dict[BlockReason, int], before: dict[BlockReason, int]) -> dict[BlockReason, int]:
    """Returns, for each reason, by how many microseconds ``total`` exceeds ``before``. Leaves out reasons without an
    increase.
    """
    more = {reason: total_us - before.get(reason, 0) for reason, total_us in total.items()}
    return {reason: us for reason, us in more.items() if us > 0}


def microseconds(seconds: float) -> int:
    """Returns seconds as whole microseconds, the unit of receipts."""
    return round(seconds * 1e6)
