"""Swapping: moves the blocks of preempted sequences to the host pool and back, in MOVE steps.

While a sequence moves to the host, it is LEAVING: its steps in flight complete, then a MOVE step copies its blocks. Its
blocks on the device then become free. While a sequence moves back, it is RUNNING, but gets no other step until its
blocks are copied. So no other step in flight uses a block that a MOVE step reads or writes.
"""

from __future__ import annotations

from llm_serving.block_moves.block_mover import BlockMover
from llm_serving.ipc.shm import MoveKind
from llm_serving.scheduler.limits import PreemptionKind
from llm_serving.scheduler.output import BlockMove, ScheduledStep, StepReason, StepResult
from llm_serving.scheduler.sequence import HandOverState, InFlightStep, Sequence, SequenceState
from llm_serving.scheduler.snapshot import Stateful
from llm_serving.scheduler.state import SchedulerState
from llm_serving.step_costs.rates import Rate, learn_from_step


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
        learn_from_step(step, result, self._prefill, self._move)


class Swapper(BlockMover):
    """Swaps sequences. Owns the host blocks: ``prepare`` gives them to a sequence, ``drop`` takes them back."""

    STATE = ("_choice", "_leaving_for_host")

    def __init__(self, state: SchedulerState) -> None:
        super().__init__(state)
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

    def settle(self, sequence: Sequence) -> bool:
        if not sequence.host_table or sequence.request.is_finished or sequence.drop_tokens:
            self.drop(sequence)
            return False
        if sequence.on_host:
            self._state.running.release(sequence)
            self._swap_out(sequence)
        elif sequence not in self._leaving_for_host:
            self._leaving_for_host.append(sequence)
        return True

    def drop(self, sequence: Sequence) -> None:
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

    def moved(self, flight: InFlightStep, result: StepResult, now: float) -> None:
        kind = flight.step.moves[0].kind
        for sequence in flight.sequences:
            if kind is MoveKind.SWAP_OUT:
                sequence.on_host = True
            elif kind is MoveKind.SWAP_IN and sequence.state is SequenceState.RUNNING:
                self.drop(sequence)
                self._resume(sequence)
            # A sequence that was preempted again while it moved back is not RUNNING. It keeps its host blocks.

    def step_completed(self, step: ScheduledStep, result: StepResult) -> None:
        """Learns the mean time per computed token and the mean time per moved block, for ``preemption: auto``."""
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

        The step has as many sequences as there is capacity for.
        """
        state = self._state
        sequences: list[Sequence] = []
        moves: list[BlockMove] = []
        while state.swapped:
            first = state.swapped[0]
            if first.hand_over is HandOverState.ARRIVING:
                break  # the blocks of this sequence are in the hand-over pool
            if len(moves) + len(first.host_table) > state.limits.max_moves or self._swap_in_first() is None:
                break
            sequences.append(first)
            pairs = zip(first.host_table, first.block_table, strict=False)
            moves += [BlockMove(MoveKind.SWAP_IN, host, block) for host, block in pairs]
        return self._send(moves, sequences, StepReason.SWAP_IN) if moves else None

    def _resume(self, sequence: Sequence) -> None:
        """Continues a sequence whose blocks are back on the device: it decodes, or continues its prefill."""
        if sequence.request.output_token_ids and sequence.num_uncomputed_tokens == 1:
            self._state.running.end_prefill(sequence)
        else:
            self._state.running.start_prefill(sequence)
