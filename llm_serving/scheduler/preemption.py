"""Preemption: takes blocks from running sequences, and lets these sequences continue later.

A preempted sequence is recomputed or swapped. If it is recomputed, it waits again with its known tokens. If it is
swapped, its blocks move to the host pool and back, see ``swapping``.
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
    """Preempts sequences. Decides what happens to a LEAVING sequence, which ended or was preempted during a step.

    ``swapper`` is None without a host pool.
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
        """Frees the batch row and the blocks of a LEAVING sequence if no step in flight uses them; otherwise does
        nothing.

        The sequence is then removed, waits again or is swapped. Before it is swapped, its blocks move to the host.
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
        elif swaps:
            sequence.request.status = RequestStatus.SWAPPED
            sequence.state = SequenceState.SWAPPED
            self._state.add_swapped(sequence)
        else:
            self._wait_again(sequence)

    def drop_swapped(self, now: float) -> None:
        """Makes all swapped sequences wait again, because host memory was lost with the agent."""
        swapped, self._state.swapped = self._state.swapped, []
        for sequence in swapped:
            sequence.request.receipt.enter(Phase.RESTARTED, now)
            self.drop_host_blocks(sequence)
            self._wait_again(sequence)

    def moved(self, flight: InFlightStep) -> None:
        """Updates the sequences whose blocks a completed MOVE step has copied."""
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
