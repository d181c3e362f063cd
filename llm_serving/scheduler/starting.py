"""Who starts: the first in line, as long as nothing stands in its way."""

from __future__ import annotations

from itertools import islice
from typing import Protocol

from llm_serving.request import RequestStatus
from llm_serving.scheduler.admission import Admission
from llm_serving.scheduler.batching.base import BatchingMode
from llm_serving.scheduler.block_supply import BlockSupply
from llm_serving.scheduler.chunk_plan import ChunkPlan
from llm_serving.scheduler.sequence import Sequence
from llm_serving.scheduler.state import SchedulerState
from llm_serving.telemetry.receipt import MAX_BLOCKERS, BlockReason, Phase

__all__ = ["StartGate", "Starter"]


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
