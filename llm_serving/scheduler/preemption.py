"""Preemption: takes blocks from running sequences, and lets these sequences continue later.

A preempted sequence waits in the queue, and all its known tokens are computed again (recompute). If a ``BlockMover``
keeps its blocks in host memory, they are copied back later instead.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from llm_serving.admission.starter import Admission
from llm_serving.block_moves.block_mover import BlockMover
from llm_serving.request import RequestStatus
from llm_serving.scheduler.output import StepResult
from llm_serving.scheduler.sequence import InFlightStep, Sequence, SequenceState
from llm_serving.scheduler.snapshot import Stateful
from llm_serving.scheduler.state import SchedulerState
from llm_serving.telemetry.receipt import Phase


class Preemption(Stateful):
    """Preempts sequences, and frees a LEAVING sequence when its last step in flight completes.

    A LEAVING sequence ended or was preempted while steps in flight used its blocks.
    """

    STATE = ("num_preemptions", "num_swaps")

    def __init__(self, state: SchedulerState, admission: Admission, movers: SequenceOf[BlockMover]) -> None:
        self.num_preemptions = 0
        self.num_swaps = 0
        self._state = state
        self._admission = admission
        self._movers = movers

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Preempts a running sequence. Its blocks become free when no step in flight uses them."""
        self.num_preemptions += 1
        sequence.request.num_preemptions += 1
        swaps = any(mover.prepare(sequence) for mover in self._movers)
        self.num_swaps += swaps
        sequence.request.receipt.enter(Phase.SWAPPED if swaps else Phase.PREEMPTED, now)
        self._admission.preempted()
        self._state.running.stop(sequence)
        self.settle(sequence)

    def settle(self, sequence: Sequence) -> None:
        """Frees the batch row and blocks of a LEAVING sequence. The sequence is then removed, waits again or is
        swapped.

        Does nothing while steps in flight use the row or the blocks, or while a ``BlockMover`` needs the blocks.
        """
        if sequence.state is not SequenceState.LEAVING or sequence.num_inflight_steps:
            return
        if any(mover.settle(sequence) for mover in self._movers):
            return
        self._state.running.release(sequence)
        if sequence.request.is_finished:
            sequence.state = SequenceState.REMOVED
            sequence.request.end_tiles()
        else:
            self._wait_again(sequence)

    def end_swapped(self, sequence: Sequence) -> None:
        """Removes a swapped sequence that has ended, and frees its blocks in host memory."""
        self._state.swapped.remove(sequence)
        self._drop(sequence)

    def lose_swapped(self, sequences: SequenceOf[Sequence], now: float) -> None:
        """Makes swapped sequences wait for a new prefill, because their blocks were lost or may have wrong values."""
        for sequence in sequences:
            self._state.swapped.remove(sequence)
            sequence.request.receipt.enter(Phase.RESTARTED, now)
            self._drop(sequence)
            self._wait_again(sequence)

    def moved(self, flight: InFlightStep, result: StepResult, now: float) -> None:
        """Updates the sequences whose blocks were copied by a MOVE step that has completed."""
        for mover in self._movers:
            mover.moved(flight, result, now)

    def _drop(self, sequence: Sequence) -> None:
        for mover in self._movers:
            mover.drop(sequence)

    def _wait_again(self, sequence: Sequence) -> None:
        for mover in self._movers:
            mover.wait_again(sequence)
        sequence.request.num_computed_tokens = 0
        sequence.request.status = RequestStatus.WAITING
        sequence.state = SequenceState.WAITING
        self._state.intake.put_back(sequence)
