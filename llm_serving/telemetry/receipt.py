"""Where a request's time went: one receipt a request, kept by the scheduler, read by whoever asks why it was slow.

A request is in one phase at a time. Instants are whole microseconds and a phase's time is the difference of two of
them, so the phases of a receipt add up to its whole time exactly, whatever the order they are added in.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

__all__ = ["MAX_BLOCKERS", "BlockReason", "Phase", "Receipt", "WaitingLine", "microseconds"]

MAX_BLOCKERS = 8
"""Requests a receipt names as those it waited for."""
_TRACKED_BLOCKERS = 4 * MAX_BLOCKERS


class Phase(enum.IntEnum):
    """What a request is doing."""

    QUEUED = 0
    """From its arrival in the queue to the first step it is scheduled in."""
    PREFILL = 1
    """Until the step that samples its first token is answered."""
    DECODE = 2
    """Until its last token."""
    PREEMPTED = 3
    """From losing its blocks to its next token: waiting again, and computing again what was lost."""
    SWAPPED = 4
    """From leaving for host memory to its next token."""
    RESTARTED = 5
    """From losing what was computed with its agent, or with a step that never ran, to its next token: waiting for the
    agent to be replaced, waiting again, and computing again."""
    DONE = 6


class BlockReason(enum.Enum):
    """Why the request at the head of the queue could not start."""

    ROWS = "rows"
    """Every row of the agent's state table is taken."""
    BLOCKS = "blocks"
    """Too few free blocks of the KV cache."""
    ADMISSION = "admission"
    """The running requests are expected to grow into the space."""
    BATCH = "batch"
    """The step has no room left, or the batch waits for more requests."""
    POLICY = "policy"
    """It is the turn of another kind of step."""
    PREFIX = "prefix"
    """Its prefix is being computed for another request, and will be shared."""
    PREEMPTED_FIRST = "preempted_first"
    """A request that was preempted or restarted goes first."""


class WaitingLine:
    """Why the first in line could not start, over time: what everybody behind it waited for, too. One a queue."""

    __slots__ = ("_blocked_us", "_reason", "_since", "blockers")

    def __init__(self) -> None:
        self.blockers: tuple[str, ...] = ()
        """The requests that were in the way when one was last."""
        self._reason: BlockReason | None = None
        self._since = 0
        self._blocked_us: dict[BlockReason, int] = {}

    def blocked(self, reason: BlockReason, by: Sequence[str], now: float) -> None:
        """The first in line was passed over; the time until the next look counts for ``reason``."""
        self.moved(now)
        self._reason, self._since = reason, microseconds(now)
        if by:
            self.blockers = tuple(by[:MAX_BLOCKERS])

    def moved(self, now: float) -> None:
        """The first in line starts, or the line was empty: nothing stands in the way for now."""
        if self._reason is not None:
            self._blocked_us = self.total(microseconds(now))
            self._reason = None

    def total(self, now_us: int) -> dict[BlockReason, int]:
        """Microseconds by reason up to ``now_us``, since the line was made."""
        total, reason = self._blocked_us.copy(), self._reason
        if reason is not None:
            total[reason] = total.get(reason, 0) + max(0, now_us - self._since)
        return total


class Receipt:
    """Time in each phase, and what held the request up. ``start`` and ``now`` are seconds on one clock that never goes
    back; written by one thread, while others may read."""

    __slots__ = ("_blocked_before", "_blocked_since", "_blockers", "_joined_at", "_line", "_reason", "_state",
                 "blocked_us", "cached_tokens", "chunks", "num_blocked", "preemptions", "start_us",
                 "swaps")  # fmt: skip

    def __init__(self, start: float = 0.0) -> None:
        self.start_us = microseconds(start)
        self._state = (Phase.QUEUED, self.start_us, (0,) * len(Phase))  # replaced as one, so readers see no half of it
        self.preemptions = 0
        """Times it lost its blocks and had to be computed again."""
        self.swaps = 0
        """Times it left for host memory."""
        self.chunks = 0
        """Prefill steps it was in."""
        self.cached_tokens = 0
        """Prompt tokens found in the prefix cache at its first start."""
        self.num_blocked: dict[BlockReason, int] = {}
        """Times the scheduler passed over it at the head of the queue, by reason."""
        self.blocked_us: dict[BlockReason, int] = {}
        """Microseconds by reason in which nobody could start from where it waited: while it was in a line, what the
        first in that line was held up by, itself or another; else what it was held up by itself."""
        self._blockers: dict[str, int] = {}
        self._reason: BlockReason | None = None
        self._blocked_since = 0
        self._line: WaitingLine | None = None
        self._joined_at: dict[BlockReason, int] = {}
        self._blocked_before: dict[BlockReason, int] = {}
        """What it was held up by in the lines it was in before this one."""

    def join(self, line: WaitingLine, now: float | None = None) -> None:
        """It waits in this line, from its start, or from ``now`` on, until it enters another phase or line."""
        now_us = self.start_us if now is None else microseconds(now)
        if self._line is not None:
            self._blocked_before = self._blocked_in_lines(now_us)
        self._line, self._joined_at = line, line.total(now_us)

    def enter(self, phase: Phase, now: float) -> None:
        """The phase before ends. Entering PREEMPTED or SWAPPED counts a preemption or a swap."""
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
        """The request at the head of the queue was passed over, on account of the requests ``by``, the most important
        first: the first 8 are taken down. With ``now`` the time until the next look counts for ``reason``, too."""
        self.num_blocked[reason] = self.num_blocked.get(reason, 0) + 1
        if now is not None:
            now_us = max(microseconds(now), self.end_us)
            self._close_block(now_us)
            self._reason, self._blocked_since = reason, now_us
        for request_id in by[:MAX_BLOCKERS]:
            self._note_blocker(request_id)

    def unblocked(self, now: float) -> None:
        """It starts: what stood in its way is gone. ``enter`` says the same, but a preempted request starts without
        entering a phase."""
        self._close_block(microseconds(now))

    def blocked_until(self, now: float) -> dict[BlockReason, int]:
        """``blocked_us`` with the line it is in counted up to ``now``."""
        return self.blocked_us.copy() if self._line is None else self._blocked_in_lines(microseconds(now))

    @property
    def phase(self) -> Phase:
        """What the request is doing."""
        return self._state[0]

    @property
    def phase_us(self) -> tuple[int, ...]:
        """Microseconds in each phase, but for the present one's since it was entered; index: ``Phase``."""
        return self._state[2]

    @property
    def end_us(self) -> int:
        """When the present phase was entered; of a request that has ended, its end."""
        return self._state[1]

    @property
    def blockers(self) -> list[str]:
        """Ids of the requests it waited for, at most 8, those seen most often first."""
        seen = sorted(self._blockers.copy().items(), key=lambda entry: -entry[1])
        return [request_id for request_id, _ in seen[:MAX_BLOCKERS]]

    def seconds(self, phase: Phase) -> float:
        """Time in a phase that is over."""
        return self.phase_us[phase] / 1e6

    def phases_until(self, now: float) -> tuple[int, ...]:
        """``phase_us`` with the present phase counted up to ``now``."""
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
        if self.blocked_us and not self._blockers:  # it was never the first: who stood in the way of that one?
            for request_id in line.blockers:
                self._note_blocker(request_id)

    def _blocked_in_lines(self, now_us: int) -> dict[BlockReason, int]:
        """By all the lines it was in, up to ``now_us``."""
        line, joined_at, total = self._line, self._joined_at, self._blocked_before
        if line is None:
            return total.copy()
        here = _difference(line.total(now_us), joined_at)
        return {reason: total.get(reason, 0) + here.get(reason, 0) for reason in {**total, **here}} if total else here

    def _note_blocker(self, request_id: str) -> None:
        """Counts in bounded memory: a newcomer takes the place of the one seen least, and its count (Space-Saving,
        Metwally et al. 2005), so one that is there most of the time stays."""
        blockers = self._blockers
        if request_id in blockers:
            blockers[request_id] += 1
        elif len(blockers) < _TRACKED_BLOCKERS:
            blockers[request_id] = 1
        else:
            least = min(blockers, key=blockers.__getitem__)
            blockers[request_id] = blockers.pop(least) + 1


def _difference(total: dict[BlockReason, int], before: dict[BlockReason, int]) -> dict[BlockReason, int]:
    """What has been added, without what has not changed."""
    more = {reason: total_us - before.get(reason, 0) for reason, total_us in total.items()}
    return {reason: us for reason, us in more.items() if us > 0}


def microseconds(seconds: float) -> int:
    """Whole microseconds, in which receipts count."""
    return round(seconds * 1e6)
