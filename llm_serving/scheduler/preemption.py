"""Preemption: takes blocks from running sequences, and lets these sequences continue later.

A preempted sequence is recomputed or swapped. For recompute, it waits in the queue, and all its known tokens are
computed again. For swap, its blocks are copied to the host pool and later back, see ``swapping``.
"""

from __future__ import annotations

from llm_serving.request import RequestStatus
from llm_serving.scheduler.sequence import InFlightStep, Sequence, SequenceState
from llm_serving.scheduler.snapshot import Stateful
from llm_serving.scheduler.starting import Admission
from llm_serving.scheduler.state import SchedulerState
from llm_serving.scheduler.swapping import Swapper
from llm_serving.telemetry.receipt import Phase


class Preemption(Stateful):
    """Preempts sequences, and frees a LEAVING sequence when its last step in flight completes.

    A LEAVING sequence ended or was preempted while steps in flight used its blocks. ``swapper`` is None if there is no
    host pool.
    """

    STATE = ("num_preemptions", "num_swaps")

    def __init__(self, state: SchedulerState, swapper: Swapper | None, admission: Admission) -> None:
        self.num_preemptions = 0
        self.num_swaps = 0
        self._state = state
        self._swapper = swapper
        self._admission = admission

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Preempts a running sequence. Its blocks become free when no step in flight uses them."""
        self.num_preemptions += 1
        sequence.request.num_preemptions += 1
        swaps = self._swapper is not None and self._swapper.prepare(sequence)
        self.num_swaps += swaps
        sequence.request.receipt.enter(Phase.SWAPPED if swaps else Phase.PREEMPTED, now)
        self._admission.preempted()
        self._state.running.stop(sequence)
        self.settle(sequence)

    def settle(self, sequence: Sequence) -> None:
        """Frees the batch row and the blocks of a LEAVING sequence. Does nothing while steps in flight use them.

        Afterwards the sequence is removed, waits again or is swapped. To swap it, this method first asks for a MOVE
        step that copies its blocks to the host. The blocks become free when the MOVE step has completed.
        """
        if sequence.state is not SequenceState.LEAVING or sequence.num_inflight_steps:
            return
        finished = sequence.request.is_finished
        swaps = bool(sequence.host_table) and not finished and not sequence.drop_tokens
        if self._swapper is not None:
            if swaps and not sequence.on_host:
                self._swapper.send_out(sequence)
                return
            if not swaps:
                self._swapper.drop(sequence)
        self._state.running.release(sequence)
        if finished:
            sequence.state = SequenceState.REMOVED
            sequence.request.end_tiles()
        elif swaps:
            sequence.request.status = RequestStatus.SWAPPED
            sequence.state = SequenceState.SWAPPED
            self._state.add_swapped(sequence)
        else:
            self._wait_again(sequence)

    def drop_swapped(self, now: float) -> None:
        """Makes all swapped sequences wait for a new prefill, because host memory was lost with the agent."""
        swapped, self._state.swapped = self._state.swapped, []
        for sequence in swapped:
            sequence.request.receipt.enter(Phase.RESTARTED, now)
            self.drop_host_blocks(sequence)
            self._wait_again(sequence)

    def moved(self, flight: InFlightStep) -> None:
        """Updates the sequences whose blocks were copied by a MOVE step that has completed."""
        if self._swapper is not None:
            self._swapper.moved(flight.step.moves[0].kind, flight.sequences)

    def drop_host_blocks(self, sequence: Sequence) -> None:
        """Returns the host blocks of a sequence to the host pool."""
        if self._swapper is not None:
            self._swapper.drop(sequence)

    def _wait_again(self, sequence: Sequence) -> None:
        sequence.request.num_computed_tokens = 0
        sequence.request.status = RequestStatus.WAITING
        sequence.state = SequenceState.WAITING
        self._state.intake.put_back(sequence)
