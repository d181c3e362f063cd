"""The batching modes (``model_config.batching_strategy``): which waiting requests may start while others run.

The base class, ``BatchingMode`` in ``starter``, is continuous batching. Preempted requests already belong to a batch,
so no batching mode holds them back.

To add a mode, add a subclass here, a line to ``_MODES`` and a member to ``BatchingStrategy`` in ``limits``.
"""

from __future__ import annotations

from typing import Any

from llm_serving.admission.starter import BatchingMode
from llm_serving.scheduler.limits import BatchingStrategy
from llm_serving.scheduler.sequence import Sequence
from llm_serving.scheduler.snapshot import Sequences
from llm_serving.scheduler.state import SchedulerState


class _NoBatching(BatchingMode):
    """No batching: one request runs at a time, from its prompt to its last token."""

    def may_start(self, sequence: Sequence, now: float, *, joins_step: bool) -> bool:
        return self._state.num_started == 0


class _StaticBatching(BatchingMode):
    """Static batching: when no request runs, the waiting requests form a batch. Later requests wait until it ends.

    A batch has at most ``batch_size`` requests, and fewer if too few batch rows or blocks are free. A finished request
    returns its output immediately. Its batch row then stays empty and costs no computation.
    """

    STATE = ("_num_places", "_num_arrivals")

    def __init__(self, state: SchedulerState) -> None:
        super().__init__(state)
        self._num_places = 0
        self._num_arrivals = 0

    def may_start(self, sequence: Sequence, now: float, *, joins_step: bool) -> bool:
        if self._state.num_started == 0:
            if not self._may_begin(sequence, now):
                return False
            self._num_places = self._state.limits.max_batch_size
            self._num_arrivals = self._state.intake.num_arrivals
        return self._num_places > 0 and sequence.arrival_index < self._num_arrivals

    def _may_begin(self, first: Sequence, now: float) -> bool:
        """Returns True if a batch that begins with ``first`` may start now."""
        return True

    def started(self, sequence: Sequence) -> None:
        self._num_places -= 1

    def note_no_capacity(self) -> None:
        """Lets no further request join the batch, because capacity is missing. Waiting requests form the next batch."""
        if self._state.num_started:
            self._num_places = 0


class _DynamicBatching(_StaticBatching):
    """A static batch that first collects up to ``batch_size`` requests (Clipper, Crankshaw et al. 2017).

    The batch starts at the latest ``batch_waiting_time`` seconds after its first request has arrived.
    """

    def _may_begin(self, first: Sequence, now: float) -> bool:
        limits = self._state.limits
        deadline = first.request.arrival_time + limits.batch_waiting_time
        if len(self._state.intake) >= limits.max_batch_size or deadline <= now:
            return True
        self._state.wake_at(deadline)
        return False


class _SplitAdapters(BatchingMode):
    """Keeps all running requests on one LoRA adapter (``lora_config.batching: split``). The rules of ``mode`` also
    apply.
    """

    def __init__(self, state: SchedulerState, mode: BatchingMode) -> None:
        super().__init__(state)
        self._mode = mode

    def may_start(self, sequence: Sequence, now: float, *, joins_step: bool) -> bool:
        slot = sequence.request.adapter_slot
        return self._mode.may_start(sequence, now, joins_step=joins_step) and all(
            running.request.adapter_slot == slot for running in self._state.running
        )

    def started(self, sequence: Sequence) -> None:
        self._mode.started(sequence)

    def note_no_capacity(self) -> None:
        self._mode.note_no_capacity()

    def snapshot(self) -> Any:
        return self._mode.snapshot()

    def restore(self, state: Any, sequences: Sequences) -> None:
        self._mode.restore(state, sequences)


_MODES: dict[BatchingStrategy, type[BatchingMode]] = {
    BatchingStrategy.NONE: _NoBatching,
    BatchingStrategy.STATIC: _StaticBatching,
    BatchingStrategy.DYNAMIC: _DynamicBatching,
    BatchingStrategy.CONTINUOUS: BatchingMode,
}


def make_batching_mode(state: SchedulerState) -> BatchingMode:
    """Creates the batching mode that ``state.limits.batching`` names."""
    mode = _MODES[state.limits.batching](state)
    return _SplitAdapters(state, mode) if state.limits.splits_adapters else mode
