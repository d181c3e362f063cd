"""Preemption: takes blocks from running sequences, and lets these sequences continue later.

A preempted sequence waits in the queue, and all its known tokens are computed again (recompute). With a host pool, its
blocks may instead be copied to the host and later back, see ``swapping``.
"""

from __future__ import annotations

from llm_serving.request import RequestStatus
from llm_serving.scheduler.sequence import InFlightStep, Sequence, SequenceState
from llm_serving.scheduler.snapshot import Stateful
from llm_serving.scheduler.starting import Admission
from llm_serving.scheduler.state import SchedulerState
from llm_serving.telemetry.receipt import Phase


class Preemption(Stateful):
    """Preempts sequences, and frees a LEAVING sequence when its last step in flight completes.

    A LEAVING sequence ended or was preempted while steps in flight used its blocks.
    """

    STATE = ("num_preemptions", "num_swaps")

    def __init__(self, state: SchedulerState, admission: Admission) -> None:
        self.num_preemptions = 0
        self.num_swaps = 0
        self._state = state
        self._admission = admission

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Preempts a running sequence. Its blocks become free when no step in flight uses them."""
        self.num_preemptions += 1
        sequence.request.num_preemptions += 1
        sequence.request.receipt.enter(self._prepare(sequence), now)
        self._admission.preempted()
        self._state.running.stop(sequence)
        self.settle(sequence)

    def settle(self, sequence: Sequence) -> None:
        """Frees the batch row and the blocks of a LEAVING sequence, which is then removed or waits again.

        Does nothing while steps in flight use them.
        """
        if sequence.state is not SequenceState.LEAVING or sequence.num_inflight_steps:
            return
        self._state.running.release(sequence)
        if sequence.request.is_finished:
            sequence.state = SequenceState.REMOVED
            sequence.request.end_tiles()
        else:
            self._wait_again(sequence)

    def end_swapped(self, sequence: Sequence) -> None:
        """Frees the host blocks of a swapped sequence that has ended."""

    def lose_swapped(self, now: float) -> None:
        """Makes all swapped sequences wait for a new prefill, because host memory was lost with the agent."""

    def moved(self, flight: InFlightStep) -> None:
        """Updates the sequences whose blocks were copied by a MOVE step that has completed."""

    def _prepare(self, sequence: Sequence) -> Phase:
        """Prepares the preemption of a running sequence. Returns the phase that its receipt enters."""
        return Phase.PREEMPTED

    def _wait_again(self, sequence: Sequence) -> None:
        sequence.request.num_computed_tokens = 0
        sequence.request.status = RequestStatus.WAITING
        sequence.state = SequenceState.WAITING
        self._state.intake.put_back(sequence)
