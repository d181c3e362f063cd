"""Who starts: the first in line, as long as nothing stands in its way."""

from __future__ import annotations

from itertools import islice

from llm_serving.receipt import MAX_BLOCKERS, BlockReason, Phase
from llm_serving.request import RequestStatus
from llm_serving.scheduler.batching.base import BatchingMode
from llm_serving.scheduler.chunk_plan import ChunkPlan
from llm_serving.scheduler.sequence import Sequence
from llm_serving.scheduler.state import SchedulerState

__all__ = ["Starter"]


class Starter:
    """Gives waiting sequences a row and blocks. Nobody overtakes the first in line."""

    def __init__(self, state: SchedulerState, batching: BatchingMode) -> None:
        self._state = state
        self._batching = batching

    def fill(self, plan: ChunkPlan, now: float, *, whole: bool) -> None:
        """Start sequences and add them to the step, while both go on.

        ``whole``: a prompt that the rest of the step does not hold waits for the next one, unless it is the first.
        """
        waiting = self._state.waiting
        while waiting and not plan.is_full:
            sequence = waiting.peek()
            obstacle = self._obstacle(sequence, plan, now, whole)
            if obstacle is not None:
                self._note(sequence, obstacle, now)
                return
            waiting.pop()
            self._start(sequence, now)
            plan.add(sequence)

    def _obstacle(self, sequence: Sequence, plan: ChunkPlan, now: float, whole: bool) -> BlockReason | None:
        """What keeps the first in line from being started in this step."""
        state, limits = self._state, self._state.limits
        if state.running.num_preempted_leaving:
            return BlockReason.PREEMPTED_FIRST
        is_new = sequence.request.first_scheduled_time is None
        if is_new and not self._batching.takes(sequence, now, beside=bool(plan)):
            return BlockReason.BATCH
        num_tokens = sequence.request.num_tokens
        if (whole and plan and num_tokens > plan.room) or not plan.takes(sequence, num_tokens):
            return BlockReason.BATCH
        if not state.running.num_free_rows:
            self._batching.held_up()
            return BlockReason.ROWS
        if not state.running.fits(num_tokens, limits.watermark_blocks):
            self._batching.held_up()
            return BlockReason.BLOCKS
        return None

    def _start(self, sequence: Sequence, now: float) -> None:
        request = sequence.request
        self._state.running.start(sequence)
        request.status = RequestStatus.RUNNING
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
            request.receipt.enter(Phase.PREFILL, now)
            self._state.num_started += 1
            self._batching.started(sequence)

    def _note(self, sequence: Sequence, obstacle: BlockReason, now: float) -> None:
        by = [running.request.request_id for running in islice(self._state.running, MAX_BLOCKERS)]
        sequence.request.receipt.blocked(obstacle, by, now)
