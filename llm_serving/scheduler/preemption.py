"""Preemption: takes blocks from running sequences, and lets these sequences continue later.

A preempted sequence waits in the queue, and all its known tokens are computed again (recompute). With a host pool, its
blocks may instead be copied to the host and later back, see ``swapping``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_serving.request import RequestStatus
from llm_serving.scheduler.output import StepResult
from llm_serving.scheduler.sequence import HandOverState, InFlightStep, Sequence, SequenceState
from llm_serving.scheduler.snapshot import Stateful
from llm_serving.scheduler.starting import Admission
from llm_serving.scheduler.state import SchedulerState
from llm_serving.telemetry.receipt import Phase

if TYPE_CHECKING:
    from llm_serving.scheduler.hand_overs import HandOvers


class Preemption(Stateful):
    """Preempts sequences, and frees a LEAVING sequence when its last step in flight completes.

    A LEAVING sequence ended or was preempted while steps in flight used its blocks.
    """

    STATE = ("num_preemptions", "num_swaps")

    def __init__(self, state: SchedulerState, admission: Admission, hand_overs: HandOvers | None = None) -> None:
        """``hand_overs`` is None unless replicas have roles."""
        self.num_preemptions = 0
        self.num_swaps = 0
        self._state = state
        self._admission = admission
        self._hand_overs = hand_overs

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Preempts a running sequence. Its blocks become free when no step in flight uses them."""
        self.num_preemptions += 1
        sequence.request.num_preemptions += 1
        if sequence.hand_over is HandOverState.ARRIVING:
            self.num_swaps += 1  # the hand-over pool still has its blocks
            sequence.request.receipt.enter(Phase.SWAPPED, now)
        else:
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
        if self._hand_overs is not None and self._hand_overs.settle(sequence):
            return
        self._state.running.release(sequence)
        if sequence.request.is_finished:
            sequence.state = SequenceState.REMOVED
            sequence.request.end_tiles()
        else:
            self._wait_again(sequence)

    def end_swapped(self, sequence: Sequence) -> None:
        """Frees the blocks in host memory of a swapped sequence that has ended."""
        self._state.swapped.remove(sequence)
        self._drop(sequence)

    def lose_swapped(self, now: float) -> None:
        """Makes all swapped sequences wait for a new prefill, because the agent was lost."""
        swapped, self._state.swapped = self._state.swapped, []
        for sequence in swapped:
            sequence.request.receipt.enter(Phase.RESTARTED, now)
            self._drop(sequence)
            self._wait_again(sequence)

    def moved(self, flight: InFlightStep, result: StepResult, now: float) -> None:
        """Updates the sequences whose blocks were copied by a MOVE step that has completed."""
        if self._hand_overs is not None:
            self._hand_overs.moved(flight, result, now)

    def _drop(self, sequence: Sequence) -> None:
        """Frees the blocks in host memory of a sequence that needs them no more."""
        if self._hand_overs is not None:
            self._hand_overs.drop(sequence)

    def _prepare(self, sequence: Sequence) -> Phase:
        """Prepares the preemption of a running sequence. Returns the phase that its receipt enters."""
        return Phase.PREEMPTED

    def _wait_again(self, sequence: Sequence) -> None:
        if self._hand_overs is not None:
            self._hand_overs.wait_again(sequence)
        sequence.request.num_computed_tokens = 0
        sequence.request.status = RequestStatus.WAITING
        sequence.state = SequenceState.WAITING
        self._state.intake.put_back(sequence)
