"""Decides whether the first waiting request starts, and starts it.

The batching mode and the admission control can hold a request back. This module has the default classes for both:
continuous batching, and no admission control. Other batching modes are in ``batching``, other admission controls in
``controls``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from llm_serving.admission.light_keys import LightKeys
from llm_serving.admission.slo_starts import SloStarts
from llm_serving.block_supply.base import BlockSupply
from llm_serving.request import RequestStatus
from llm_serving.scheduler.sequence import Sequence
from llm_serving.scheduler.snapshot import Stateful
from llm_serving.scheduler.state import SchedulerState
from llm_serving.scheduler.step_builder import ChunkPlan
from llm_serving.telemetry.receipt import MAX_BLOCKERS, BlockReason, Phase

_NOT_CAPACITY = (BlockReason.BATCH, BlockReason.PREFIX, BlockReason.LOAD)
"""Reasons for which a request waits although batch rows and blocks are free. They often end with the next step. Any
other reason shows a lack of capacity. The intake then accepts fewer waiting requests."""


class BatchingMode(Stateful):
    """Decides which waiting requests may start while others run. Every batching mode works with every policy.

    This base class is continuous batching (Orca, Yu et al. 2022): a request can join at any step and leaves after its
    last token. With ``batch_waiting_time``, a prompt waits up to this time for other prompts. It starts earlier if the
    waiting prompts fill a step or all free batch rows.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def may_start(self, sequence: Sequence, now: float, *, joins_step: bool) -> bool:
        """Returns True if ``sequence``, the first waiting sequence, may start. The sequence has not run before.

        If it must wait until a known time, returns False and makes the engine call the scheduler again at that time.
        ``joins_step`` is True if the step already has other prompts.
        """
        if joins_step or self._fills_a_step():
            return True
        deadline = sequence.request.arrival_time + self._state.limits.batch_waiting_time
        if deadline <= now:
            return True
        self._state.wake_at(deadline)
        return False

    def _fills_a_step(self) -> bool:
        limits, waiting = self._state.limits, self._state.intake
        return (
            len(waiting) >= min(limits.prefill_batch_size, self._state.running.num_free_rows)
            or waiting.num_tokens >= limits.max_num_batched_tokens
        )

    def started(self, sequence: Sequence) -> None:
        """Records that a request starts."""

    def note_no_capacity(self) -> None:
        """Records that capacity is missing to start a request that the batching mode permits."""


class Admission(Stateful):
    """Decides whether a sequence may start if a batch row and blocks are free for it.

    This base class admits every sequence.
    """

    def may_start(self, candidate: Sequence, running: Iterable[Sequence], page_use: float, version: int = -1) -> bool:
        """Returns True if ``candidate`` may join ``running``. ``page_use`` is the fraction of blocks in use, 0 to 1.

        ``version`` is a number that changes whenever a sequence starts or stops. While the number stays the same, an
        implementation may repeat a refusal without a new computation. -1 always demands a new decision.
        """
        return True

    def step_completed(self) -> None:
        """The scheduler calls this method when a step has completed."""

    def preempted(self) -> None:
        """The scheduler calls this method when a running sequence has been preempted."""

    def finished(self, sequence: Sequence) -> None:
        """The scheduler calls this method when a sequence has ended without an error and without an abort."""


class Starter:
    """Starts waiting sequences in order. Preempted sequences always start before new ones."""

    def __init__(
        self,
        state: SchedulerState,
        batching: BatchingMode,
        supply: BlockSupply,
        admission: Admission,
        light_keys: LightKeys,
        must_load: Callable[[Sequence], bool] | None = None,
    ) -> None:
        """``must_load`` returns True while a sequence must wait for blocks from the KV tiers. None: no KV tiers."""
        self._state = state
        self._must_load = must_load
        self._light_keys = light_keys
        self._batching = batching
        self._supply = supply
        self._admission = admission

    def fill(
        self,
        plan: ChunkPlan,
        now: float,
        *,
        whole: bool,
        starts: SloStarts | None = None,
        only_light: bool = False,
    ) -> None:
        """Starts waiting sequences and adds them to ``plan``. Stops when the step is full or the first sequence cannot
        start.

        With ``whole``, prompts are not divided to fill the step. A prompt that exceeds the free tokens of the step
        waits, unless the step is empty. ``starts`` limits how many requests that never ran may start. None: no limit.
        With ``only_light``, only requests of light keys start.
        """
        intake = self._state.intake
        light_keys = self._light_keys if intake.has_tenants and self._light_keys.look(now) else None
        while intake and not plan.is_full:
            sequence = None if light_keys is None else light_keys.first(now)
            if sequence is None:
                if only_light:
                    return
                sequence = intake.peek(now)
            is_new = sequence.request.first_scheduled_time is None
            reserve = (0, 0) if light_keys is None or not is_new else light_keys.reserve(sequence, now)
            reason = self._reason_to_wait(sequence, plan, now, reserve, whole=whole)
            if reason is None and is_new and starts is not None and not starts.may_start(sequence):
                reason = BlockReason.POLICY
            if reason is not None:
                self._note_blocked(sequence, reason, now)
                return
            if is_new and starts is not None:
                starts.started(sequence)
            self.start(sequence, now)
            plan.add(sequence)

    def _reason_to_wait(
        self, sequence: Sequence, plan: ChunkPlan, now: float, reserve: tuple[int, int], *, whole: bool
    ) -> BlockReason | None:
        """Returns the reason why ``sequence``, the first waiting one, cannot start in this step, or None if it can.

        ``reserve``: the batch rows and the blocks that must stay free for light keys.
        """
        if sequence.request.is_suspect:
            # A suspect may have killed an agent. Only the class ``Quarantine`` starts suspects, without other requests.
            return BlockReason.BATCH
        if self._state.goes_after_preempted(sequence):
            return BlockReason.PREEMPTED_FIRST
        is_new = sequence.request.first_scheduled_time is None
        if is_new and not self._batching.may_start(sequence, now, joins_step=bool(plan)):
            return BlockReason.BATCH
        if sequence.waits_for_load:  # its own load may occupy the last free blocks, which is no lack of capacity
            return BlockReason.LOAD
        reason = self.missing_capacity(sequence, reserve)
        if reason is not None:
            self._batching.note_no_capacity()
            self._state.note_no_capacity()
            return reason
        self._state.no_capacity = None  # a request that only waits for blocks from the KV tiers does not lack capacity
        cached = self._supply.look_up(sequence)
        if cached.is_pending:
            return BlockReason.PREFIX
        if self._must_load is not None and self._must_load(sequence):
            return BlockReason.LOAD
        num_uncomputed = sequence.request.num_tokens - cached.num_tokens
        exceeds = whole and plan and num_uncomputed > plan.num_free_tokens
        return BlockReason.BATCH if exceeds or not plan.fits(sequence, num_uncomputed) else None

    def missing_capacity(self, sequence: Sequence, reserve: tuple[int, int] = (0, 0)) -> BlockReason | None:
        """Returns why ``sequence`` cannot start now, or None if it can. The reason is too few batch rows, too few
        blocks, or the admission control.

        ``reserve``: the batch rows and the blocks that must stay free for light keys.
        """
        state, running, (num_rows, num_blocks) = self._state, self._state.running, reserve
        if running.num_free_rows <= num_rows:
            return BlockReason.ROWS
        if not self._supply.fits(sequence, running.reserve(state.limits.watermark_blocks) + num_blocks):
            return BlockReason.BLOCKS
        if not self._admission.may_start(sequence, running, state.page_use, running.num_changes):
            return BlockReason.ADMISSION
        return None

    def start(self, sequence: Sequence, now: float) -> None:
        """Starts a waiting sequence for which ``missing_capacity`` is None."""
        request = sequence.request
        self._state.intake.start(sequence, now)
        self._state.running.start(sequence)
        request.receipt.unblocked(now)
        self._state.intake.line.moved(now)
        sequence.notes_tokens = True
        request.status = RequestStatus.RUNNING
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
            request.num_cached_tokens = request.receipt.cached_tokens = request.num_computed_tokens
            request.receipt.enter(Phase.PREFILL, now)
            self._state.num_started += 1
            self._batching.started(sequence)

    def _note_blocked(self, sequence: Sequence, reason: BlockReason, now: float) -> None:
        by = [running.request.request_id for running in islice(self._state.running, MAX_BLOCKERS)]
        sequence.request.receipt.blocked(reason, by, now)
        self._state.intake.line.blocked(reason, by, now)
        if reason not in _NOT_CAPACITY:
            self._state.intake.limit_starts(0)
