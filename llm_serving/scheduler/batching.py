"""Batching modes: which of the waiting requests may start beside those that run (``model_config.batching_strategy``).

A mode says who may start, the policy (``policies``) says in which steps they and the others then run: any mode goes
with any policy. Requests that have started before, and were preempted, belong to the batch and are not asked about.

Continuous batching (Orca, Yu et al. 2022): a request joins at any step and leaves with its last token.

Static batching: what waits when the device becomes free runs as one batch, to the end of its longest request.

Dynamic batching: a batch leaves when it is full or late, and the next one waits until it has ended.

No batching: one request at a time, from its prompt to its last token.

The batching mode of a strategy.

Who starts: the first in line, as long as nothing stands in its way.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, Protocol

from llm_serving.request import RequestStatus
from llm_serving.scheduler.admission import Admission
from llm_serving.scheduler.block_supply import BlockSupply
from llm_serving.scheduler.limits import BatchingStrategy
from llm_serving.scheduler.sequence import Sequence
from llm_serving.scheduler.snapshot import Sequences
from llm_serving.scheduler.state import SchedulerState
from llm_serving.scheduler.step_builder import ChunkPlan
from llm_serving.telemetry.receipt import MAX_BLOCKERS, BlockReason, Phase

__all__ = [
    "BatchingMode",
    "ContinuousBatching",
    "DynamicBatching",
    "NoBatching",
    "StartGate",
    "Starter",
    "StaticBatching",
    "select_batching",
]


class BatchingMode(Protocol):
    """Decides on new requests, one after the other, in the order of the queue."""

    def takes(self, sequence: Sequence, now: float, *, beside: bool) -> bool:
        """Whether the first in line may start now. ``beside``: in a step that has prompts already. A mode that wants
        to be asked again at a certain time sets ``SchedulerState.wake_at``."""

    def started(self, sequence: Sequence) -> None:
        """It has."""

    def held_up(self) -> None:
        """The first in line may start, but there is no row for it, or no room in the cache."""

    def snapshot(self) -> Any:
        """See ``Stateful``."""

    def restore(self, state: Any, sequences: Sequences) -> None:
        """See ``Stateful``."""


class ContinuousBatching:
    """Whoever is first in line may start. With ``batch_waiting_time``, prompts wait so long for company, unless they
    fill a step or every free row."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def takes(self, sequence: Sequence, now: float, *, beside: bool) -> bool:
        if beside or self._fills_a_step():
            return True
        deadline = sequence.request.arrival_time + self._state.limits.batch_waiting_time
        if deadline <= now:
            return True
        self._state.wake_at(deadline)
        return False

    def _fills_a_step(self) -> bool:
        limits, waiting = self._state.limits, self._state.waiting
        return (
            len(waiting) >= min(limits.prefill_batch_size, self._state.running.num_free_rows)
            or waiting.num_tokens >= limits.max_num_batched_tokens
        )

    def started(self, sequence: Sequence) -> None:
        pass

    def held_up(self) -> None:
        pass

    def snapshot(self) -> None:
        return None

    def restore(self, state: None, sequences: Sequences) -> None:
        """Has no state."""


class StaticBatching:
    """A batch opens when no request is under way: what waits at that moment is in it, up to ``batch_size`` requests
    and as many as rows and cache take. Nobody joins before all of it have ended.

    An answer is complete when its own last token is sampled, and the row is not computed any further, nor filled
    again: the batch shrinks until its longest request ends. (Servers with graphs of one batch size go on computing
    the dead rows, so a comparison with this mode flatters static batching rather than the others.)
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._places = 0
        self._num_arrivals = 0

    def takes(self, sequence: Sequence, now: float, *, beside: bool) -> bool:
        if self._state.num_started == 0:
            if not self._may_leave(sequence, now):
                return False
            self._places = self._state.limits.max_batch_size
            self._num_arrivals = self._state.num_arrivals
        return self._places > 0 and sequence.arrival_index < self._num_arrivals

    def _may_leave(self, first: Sequence, now: float) -> bool:
        """Whether the batch that ``first`` opens may leave now."""
        return True

    def started(self, sequence: Sequence) -> None:
        self._places -= 1

    def held_up(self) -> None:
        """The batch is as large as it gets; who comes when rows and blocks are free again is in the next."""
        if self._state.num_started:
            self._places = 0

    def snapshot(self) -> list[int]:
        return [self._places, self._num_arrivals]

    def restore(self, state: list[int], sequences: Sequences) -> None:
        self._places, self._num_arrivals = state


class DynamicBatching(StaticBatching):
    """As model servers batch calls of a model without state (Clipper, Crankshaw et al. 2017): up to ``batch_size``
    requests are collected, for ``batch_waiting_time`` seconds after the first at most. Once it has left, a batch is
    as in static batching."""

    def _may_leave(self, first: Sequence, now: float) -> bool:
        limits = self._state.limits
        deadline = first.request.arrival_time + limits.batch_waiting_time
        if len(self._state.waiting) >= limits.max_batch_size or deadline <= now:
            return True
        self._state.wake_at(deadline)
        return False


class NoBatching:
    """The next request starts when the one before it has ended."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def takes(self, sequence: Sequence, now: float, *, beside: bool) -> bool:
        return self._state.num_started == 0

    def started(self, sequence: Sequence) -> None:
        pass

    def held_up(self) -> None:
        pass

    def snapshot(self) -> None:
        return None

    def restore(self, state: None, sequences: Sequences) -> None:
        """Has no state."""


_MODES: dict[BatchingStrategy, Callable[[SchedulerState], BatchingMode]] = {
    BatchingStrategy.NONE: NoBatching,
    BatchingStrategy.STATIC: StaticBatching,
    BatchingStrategy.DYNAMIC: DynamicBatching,
    BatchingStrategy.CONTINUOUS: ContinuousBatching,
}


def select_batching(state: SchedulerState) -> BatchingMode:
    """The mode that ``state.limits.batching`` names."""
    return _MODES[state.limits.batching](state)


_NEXT_STEP_MAY_DO = (BlockReason.BATCH, BlockReason.PREFIX)
"""Reasons not to start that are no lack of room."""


class StartGate(Protocol):
    """What a policy has to say about requests that never ran and could start in a step."""

    def may_start(self, sequence: Sequence) -> bool:
        """Whether the first in line may; if not, nobody does."""

    def started(self, sequence: Sequence) -> None:
        """It starts now, and leaves the queue."""


class Starter:
    """Gives waiting sequences a row and blocks. Nobody overtakes the first in line, and nobody new those who were
    preempted."""

    def __init__(
        self, state: SchedulerState, batching: BatchingMode, supply: BlockSupply, admission: Admission
    ) -> None:
        self._state = state
        self._batching = batching
        self._supply = supply
        self._admission = admission

    def fill(self, plan: ChunkPlan, now: float, *, whole: bool, gate: StartGate | None = None) -> None:
        """Start sequences and add them to the step, while both go on.

        ``whole``: a prompt that the rest of the step does not hold waits for the next one, unless it is the first.
        ``gate``: asked for each that never ran, and told of it; those who were preempted start nevertheless.
        """
        waiting = self._state.waiting
        while waiting and not plan.is_full:
            sequence = waiting.peek(now)
            obstacle = self._obstacle(sequence, plan, now, whole)
            is_new = sequence.request.first_scheduled_time is None
            if obstacle is None and is_new and gate is not None and not gate.may_start(sequence):
                obstacle = BlockReason.POLICY
            if obstacle is not None:
                self._note(sequence, obstacle, now)
                return
            if is_new and gate is not None:
                gate.started(sequence)
            waiting.start(sequence, now)
            self._start(sequence, now)
            plan.add(sequence)

    def _obstacle(self, sequence: Sequence, plan: ChunkPlan, now: float, whole: bool) -> BlockReason | None:
        """What keeps the first in line from being started in this step."""
        if self._state.goes_after_preempted(sequence):
            return BlockReason.PREEMPTED_FIRST
        is_new = sequence.request.first_scheduled_time is None
        if is_new and not self._batching.takes(sequence, now, beside=bool(plan)):
            return BlockReason.BATCH
        obstacle = self._lack_of_room(sequence)
        if obstacle is not None:
            self._batching.held_up()
            self._state.note_held_up()
            return obstacle
        cached = self._supply.look_up(sequence)
        if cached.is_pending:
            return BlockReason.PREFIX
        num_uncomputed = sequence.request.num_tokens - cached.num_tokens
        if (whole and plan and num_uncomputed > plan.room) or not plan.takes(sequence, num_uncomputed):
            return BlockReason.BATCH
        return None

    def _lack_of_room(self, sequence: Sequence) -> BlockReason | None:
        """Whether rows, blocks or the admission keep a sequence from running now."""
        state, running = self._state, self._state.running
        if not running.num_free_rows:
            return BlockReason.ROWS
        if not self._supply.fits(sequence, running.reserve(state.limits.watermark_blocks)):
            return BlockReason.BLOCKS
        if not self._admission.may_start(sequence, running, state.page_use, running.num_changes):
            return BlockReason.ADMISSION
        return None

    def _start(self, sequence: Sequence, now: float) -> None:
        request = sequence.request
        self._state.running.start(sequence)
        request.receipt.unblocked(now)
        self._state.line.moved(now)
        sequence.notes_tokens = True
        request.status = RequestStatus.RUNNING
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
            request.num_cached_tokens = request.receipt.cached_tokens = request.num_computed_tokens
            request.receipt.enter(Phase.PREFILL, now)
            self._state.num_started += 1
            self._batching.started(sequence)

    def _note(self, sequence: Sequence, obstacle: BlockReason, now: float) -> None:
        by = [running.request.request_id for running in islice(self._state.running, MAX_BLOCKERS)]
        sequence.request.receipt.blocked(obstacle, by, now)
        self._state.line.blocked(obstacle, by, now)
        if obstacle not in _NEXT_STEP_MAY_DO:
            self._state.waiting.limit_starts(0)
