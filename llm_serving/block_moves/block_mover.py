"""The base class for swapping and hand-overs, which move the blocks of sequences to host memory and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Iterable

from llm_serving.request import RequestStatus
from llm_serving.scheduler.output import BlockMove, ScheduledStep, StepKind, StepReason, StepResult
from llm_serving.scheduler.sequence import InFlightStep, Sequence, SequenceState
from llm_serving.scheduler.snapshot import Stateful
from llm_serving.scheduler.state import SchedulerState


class BlockMover(Stateful, ABC):
    """Keeps the computed tokens of sequences in host memory while they have no blocks on the device.

    ``Swapper`` moves preempted sequences to the host pool and back. ``HandOvers`` moves computed prompts to other
    replicas. To add a mover, add a subclass, create it in ``Scheduler.__init__``, and name it in ``whole_state.PARTS``.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    # The scheduler calls the following methods.

    @abstractmethod
    def next_step(self) -> ScheduledStep | None:
        """Returns the next MOVE step (a step that only copies blocks), or None if nothing must be copied."""

    @abstractmethod
    def step_completed(self, step: ScheduledStep, result: StepResult) -> None:
        """Learns the time per computed token or per moved block from a completed step of any kind."""

    @abstractmethod
    def prepare(self, sequence: Sequence) -> bool:
        """Prepares the preemption of a running sequence. Returns True if this mover keeps its computed tokens."""

    @abstractmethod
    def settle(self, sequence: Sequence) -> bool:
        """Continues the move of a LEAVING sequence to host memory. No step in flight may use the sequence.

        Returns False if this mover does not keep the sequence's computed tokens. The caller then frees the sequence's
        blocks on the device.
        """

    @abstractmethod
    def moved(self, flight: InFlightStep, result: StepResult, now: float) -> None:
        """Updates the sequences of a MOVE step that has completed. Ignores the steps of other movers."""

    @abstractmethod
    def drop(self, sequence: Sequence) -> None:
        """Frees the host memory of a sequence that no longer needs it. No MOVE step in flight may use this memory."""

    def wait_again(self, sequence: Sequence) -> None:
        """Prepares a sequence for recompute: all of its known tokens will be computed again."""

    # The following methods are for the subclasses.

    def _send(self, moves: list[BlockMove], sequences: list[Sequence], reason: StepReason) -> ScheduledStep:
        in_flight = self._state.in_flight
        step = ScheduledStep(in_flight.next_seq, StepKind.MOVE, moves=moves, reason=reason)
        return in_flight.add(step, sequences)

    def _swap_out(self, sequence: Sequence) -> None:
        """Adds a sequence without blocks on the device to the swapped sequences, in order of arrival."""
        sequence.request.status = RequestStatus.SWAPPED
        sequence.state = SequenceState.SWAPPED
        insort(self._state.swapped, sequence, key=_arrival_index)

    def _swap_in_first(self) -> Sequence | None:
        """Gives the first swapped sequence a batch row and blocks for its known tokens, and returns it.

        Returns None if the sequence must stay swapped. The returned sequence gets no other step before MOVE steps have
        copied its blocks back.
        """
        sequence = self._state.swapped[0]
        if self._must_stay(sequence) or not self._take_back(sequence):
            return None
        del self._state.swapped[0]
        sequence.request.status = RequestStatus.RUNNING
        sequence.notes_tokens = True
        return sequence

    def _must_stay(self, sequence: Sequence) -> bool:
        """Returns True if a swapped sequence may not come back yet, because a preempted sequence has precedence.

        A waiting preempted sequence has precedence if it arrived earlier. A preempted sequence whose blocks are still
        used by steps in flight always has precedence.
        """
        if self._state.running.has_preempted_leaving:
            return True
        first = self._state.intake.first_preempted
        return first is not None and first.arrival_index < sequence.arrival_index

    def _take_back(self, sequence: Sequence) -> bool:
        """Gives a swapped sequence a batch row and blocks. Returns False if no batch row or too few blocks are free."""
        state, running, kv_cache = self._state, self._state.running, self._state.kv_cache
        num_tokens = sequence.request.num_tokens
        needed = kv_cache.blocks_for(num_tokens) + running.reserve(state.limits.watermark_blocks)
        if not running.num_free_rows or needed > kv_cache.num_free_blocks:
            return False
        if not kv_cache.grow(sequence.block_table, num_tokens):
            raise AssertionError(f"no blocks for {sequence.request.request_id} to come back")
        running.enter(sequence)
        return True


def next_move(movers: Iterable[BlockMover]) -> ScheduledStep | None:
    """Returns the next MOVE step of the first mover that has one, or None."""
    return next(filter(None, (mover.next_step() for mover in movers)), None)


def _arrival_index(sequence: Sequence) -> int:
    return sequence.arrival_index
