"""Swapping: moves the blocks of preempted sequences to the host pool and back, in MOVE steps.

While a sequence moves to the host, it is LEAVING: its steps in flight complete, then a MOVE step copies its blocks. Its
blocks on the device then become free. While a sequence moves back, it is RUNNING, but gets no other step until its
blocks are copied. So no other step in flight uses a block that a MOVE step reads or writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_serving.ipc.shm import MoveKind
from llm_serving.request import RequestStatus
from llm_serving.scheduler.limits import PreemptionKind
from llm_serving.scheduler.output import BlockMove, ScheduledStep, StepKind, StepReason, StepResult
from llm_serving.scheduler.preemption import Preemption
from llm_serving.scheduler.rates import Rate
from llm_serving.scheduler.sequence import HandOverState, InFlightStep, Sequence, SequenceState
from llm_serving.scheduler.snapshot import Stateful
from llm_serving.scheduler.starting import Admission
from llm_serving.scheduler.state import SchedulerState
from llm_serving.telemetry.receipt import Phase

if TYPE_CHECKING:
    from llm_serving.scheduler.hand_overs import HandOvers


class PreemptionChoice(Stateful):
    """Chooses between recompute and swap for preempted sequences, by ``scheduler_config.preemption``.

    ``auto`` chooses swap if moving the blocks to the host and back takes less time than computing the tokens again.
    Without measurements, it also chooses swap, to measure the time of a move.
    """

    STATE = ("_prefill", "_move")

    def __init__(self, kind: PreemptionKind, block_size: int) -> None:
        self._kind = kind
        self._block_size = block_size
        self._prefill = Rate()
        self._move = Rate()

    def prefers_swap(self, sequence: Sequence) -> bool:
        """Returns True if swap is preferred for a running sequence.

        The caller must still check that host blocks are free.
        """
        if self._kind is not PreemptionKind.AUTO:
            return self._kind is PreemptionKind.SWAP
        token_s, block_s = self._prefill.seconds_per_unit, self._move.seconds_per_unit
        if token_s is None or block_s is None:
            return True
        num_tokens = sequence.request.num_computed_tokens
        return 2 * -(-num_tokens // self._block_size) * block_s < num_tokens * token_s

    def step_completed(self, step: ScheduledStep, result: StepResult) -> None:
        """Learns the time per computed token or per moved block from a completed step."""
        seconds = result.graph_us / 1e6
        if result.aborted or result.error is not None or seconds <= 0.0:
            return
        if step.kind is StepKind.PREFILL or step.kind is StepKind.MIXED:
            self._prefill.note(seconds, step.num_tokens)
        elif step.kind is StepKind.MOVE:
            self._move.note(seconds, len(step.moves))


class Swapper(Stateful):
    """Swaps sequences. Owns the host blocks: ``prepare`` gives them to a sequence, ``drop`` takes them back."""

    STATE = ("_choice", "_leaving_for_host")

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._choice = PreemptionChoice(state.limits.preemption, state.limits.block_size)
        self._leaving_for_host: list[Sequence] = []
        """Preempted sequences whose blocks a MOVE step must still copy to the host."""

    def prepare(self, sequence: Sequence) -> bool:
        """Gives host blocks to a sequence that is being preempted, if swap is preferred. Returns True if the sequence
        has host blocks.

        A sequence that was coming back from the host still has its host blocks.
        """
        if sequence.on_host:
            return True
        kv_cache = self._state.kv_cache
        if not self._choice.prefers_swap(sequence):
            return False
        host_table = kv_cache.host_pool.allocate(kv_cache.blocks_for(sequence.request.num_computed_tokens))
        if not host_table:
            return False
        sequence.host_table = host_table
        return True

    def send_out(self, sequence: Sequence) -> None:
        """Asks for a MOVE step that copies the blocks of a LEAVING sequence to the host.

        No step in flight may use them.
        """
        if sequence not in self._leaving_for_host:
            self._leaving_for_host.append(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Frees the host blocks of a sequence. No MOVE step in flight may use them."""
        if sequence.host_table:
            self._state.kv_cache.host_pool.free(sequence.host_table)
            sequence.host_table = []
        sequence.on_host = False
        if sequence in self._leaving_for_host:
            self._leaving_for_host.remove(sequence)

    def next_step(self) -> ScheduledStep | None:
        """Returns the next MOVE step, or None.

        Moves to the host come first, because other sequences need the blocks.
        """
        if self._leaving_for_host and (step := self._move_out()) is not None:
            return step
        return self._move_in() if self._state.swapped else None

    def moved(self, kind: MoveKind, sequences: list[Sequence]) -> None:
        """Updates the sequences whose blocks were copied by a MOVE step that has completed."""
        for sequence in sequences:
            if kind is MoveKind.SWAP_OUT:
                sequence.on_host = True
            elif sequence.state is SequenceState.RUNNING:
                self.drop(sequence)
                self._resume(sequence)
            # A sequence that was preempted again while it moved back is not RUNNING. It keeps its host blocks.

    def step_completed(self, step: ScheduledStep, result: StepResult) -> None:
        """Learns the mean times per computed token and per moved block, for ``preemption: auto``."""
        self._choice.step_completed(step, result)

    def _move_out(self) -> ScheduledStep | None:
        sequences: list[Sequence] = []
        moves: list[BlockMove] = []
        max_moves, leaving = self._state.limits.max_moves, self._leaving_for_host
        while leaving and len(moves) + len(leaving[0].host_table) <= max_moves:
            sequence = leaving.pop(0)
            sequences.append(sequence)
            # the last blocks may have no tokens; the host table has no entries for them, and they are not copied
            pairs = zip(sequence.block_table, sequence.host_table, strict=False)
            moves += [BlockMove(MoveKind.SWAP_OUT, block, host) for block, host in pairs]
        return self._send(moves, sequences, StepReason.SWAP_OUT) if moves else None

    def _move_in(self) -> ScheduledStep | None:
        """Returns a MOVE step that brings swapped sequences back, the oldest first, or None.

        The step has as many sequences as there is capacity for. ``SchedulerState.add_swapped`` keeps their order.
        """
        state = self._state
        sequences: list[Sequence] = []
        moves: list[BlockMove] = []
        while state.swapped and not state.must_stay_swapped(state.swapped[0]):
            sequence = state.swapped[0]
            if sequence.hand_over is HandOverState.ARRIVING:
                break  # its blocks are in the hand-over pool
            exceeds = len(moves) + len(sequence.host_table) > state.limits.max_moves
            if exceeds or not state.take_back(sequence):
                break
            del state.swapped[0]
            sequence.request.status = RequestStatus.RUNNING
            sequence.notes_tokens = True
            sequences.append(sequence)
            pairs = zip(sequence.host_table, sequence.block_table, strict=False)
            moves += [BlockMove(MoveKind.SWAP_IN, host, block) for host, block in pairs]
        return self._send(moves, sequences, StepReason.SWAP_IN) if moves else None

    def _send(self, moves: list[BlockMove], sequences: list[Sequence], reason: StepReason) -> ScheduledStep:
        in_flight = self._state.in_flight
        step = ScheduledStep(in_flight.next_seq, StepKind.MOVE, moves=moves, reason=reason)
        return in_flight.add(step, sequences)

    def _resume(self, sequence: Sequence) -> None:
        """Lets a sequence whose blocks are back on the device decode, or continue its prefill."""
        if sequence.request.output_token_ids and sequence.num_uncomputed_tokens == 1:
            self._state.running.end_prefill(sequence)
        else:
            self._state.running.start_prefill(sequence)


class SwapPreemption(Preemption):
    """Preempts sequences as ``Preemption`` does, and swaps those that the ``Swapper`` gives host blocks."""

    def __init__(
        self, state: SchedulerState, admission: Admission, swapper: Swapper, hand_overs: HandOvers | None = None
    ) -> None:
        super().__init__(state, admission, hand_overs)
        self._swapper = swapper

    def settle(self, sequence: Sequence) -> None:
        """Frees or swaps a LEAVING sequence. Does nothing while steps in flight use its batch row and blocks.

        To swap a sequence, this method first asks for a MOVE step that copies its blocks to the host. The blocks become
        free when the MOVE step has completed.
        """
        if sequence.state is not SequenceState.LEAVING or sequence.num_inflight_steps:
            return
        if self._hand_overs is not None and self._hand_overs.settle(sequence):
            return
        swaps = bool(sequence.host_table) and not sequence.request.is_finished and not sequence.drop_tokens
        if not swaps:
            self._swapper.drop(sequence)
            super().settle(sequence)
        elif not sequence.on_host:
            self._swapper.send_out(sequence)
        else:
            self._state.running.release(sequence)
            sequence.request.status = RequestStatus.SWAPPED
            sequence.state = SequenceState.SWAPPED
            self._state.add_swapped(sequence)

    def moved(self, flight: InFlightStep, result: StepResult, now: float) -> None:
        kind = flight.step.moves[0].kind
        if kind is MoveKind.SWAP_OUT or kind is MoveKind.SWAP_IN:
            self._swapper.moved(kind, flight.sequences)
        else:
            super().moved(flight, result, now)

    def _drop(self, sequence: Sequence) -> None:
        self._swapper.drop(sequence)
        super()._drop(sequence)

    def _prepare(self, sequence: Sequence) -> Phase:
        swaps = self._swapper.prepare(sequence)
        self.num_swaps += swaps
        return Phase.SWAPPED if swaps else Phase.PREEMPTED


def limit_history(ready: list[Sequence], capacity: int) -> list[Sequence]:
    """Limits the token histories of a decode step to ``capacity`` tokens. Sequences that exceed it are left for later
    steps.

    Only a sequence with penalties that comes back from the host sends its history in a decode step.
    """
    chosen = []
    for sequence in ready:
        if sequence.restarts and sequence.request.sampling.has_penalties:
            if sequence.request.num_tokens > capacity:
                continue
            capacity -= sequence.request.num_tokens
        chosen.append(sequence)
    return chosen
