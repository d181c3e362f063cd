"""What becomes of a sequence that has to give up its blocks: computed again, or swapped to the host and back.

Swapping: blocks of preempted sequences go to host memory and come back, by steps that move blocks and nothing else.

A sequence on its way out is LEAVING: first its steps in flight are answered, then a step of moves copies its blocks,
then they are free. On its way back it is RUNNING, but neither prefilled nor decoding before its blocks are there.
So no step in flight ever touches a block that a move reads or writes.
"""

from __future__ import annotations

from llm_serving.request import RequestStatus
from llm_serving.scheduler.limits import PreemptionKind
from llm_serving.scheduler.output import BlockMove, MoveKind, ScheduledStep, StepKind, StepReason, StepResult
from llm_serving.scheduler.sequence import Sequence, SequenceState
from llm_serving.scheduler.snapshot import Sequences
from llm_serving.scheduler.state import SchedulerState

__all__ = ["PreemptionChoice", "Swapper"]

_KEEP = 1 - 1 / 32
"""What the past weighs against the next step: about the last 32 count."""


class _Rate:
    """Seconds for each unit of work, the latest steps weighing most."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.units = 0.0

    def note(self, seconds: float, units: int) -> None:
        self.seconds = self.seconds * _KEEP + seconds
        self.units = self.units * _KEEP + units

    @property
    def seconds_per_unit(self) -> float | None:
        """None before anything was measured."""
        return self.seconds / self.units if self.units else None


class PreemptionChoice:
    """Chooses by ``scheduler_config.preemption``; ``auto`` learns from the answers of steps.

    ``auto`` swaps when moving the blocks out and back takes less time than computing the tokens again. What was
    never measured is tried: before the first swap it swaps, and a rate that is old is not known to be wrong.
    """

    def __init__(self, kind: PreemptionKind, block_size: int) -> None:
        self._kind = kind
        self._block_size = block_size
        self._prefill = _Rate()
        self._move = _Rate()

    def prefers_swap(self, sequence: Sequence) -> bool:
        """Whether a running sequence is to be swapped, if the host has room."""
        if self._kind is not PreemptionKind.AUTO:
            return self._kind is PreemptionKind.SWAP
        token_s, block_s = self._prefill.seconds_per_unit, self._move.seconds_per_unit
        if token_s is None or block_s is None:
            return True
        request = sequence.request
        num_blocks = -(-request.num_computed_tokens // self._block_size)
        return 2 * num_blocks * block_s < request.num_computed_tokens * token_s

    def step_answered(self, step: ScheduledStep, result: StepResult) -> None:
        """Learn from a step that has run: what its tokens took, or its blocks."""
        seconds = result.graph_us / 1e6
        if result.aborted or result.error is not None or seconds <= 0.0:
            return
        if step.kind is StepKind.PREFILL or step.kind is StepKind.MIXED:
            self._prefill.note(seconds, step.num_tokens)
        elif step.kind is StepKind.MOVE:
            self._move.note(seconds, len(step.moves))

    def snapshot(self) -> list[float]:
        prefill, move = self._prefill, self._move
        return [prefill.seconds, prefill.units, move.seconds, move.units]

    def restore(self, state: list[float], sequences: Sequences) -> None:
        self._prefill.seconds, self._prefill.units, self._move.seconds, self._move.units = state


class Swapper:
    """Owns the host's blocks: gives them to a sequence in ``reserve_host``, takes them back in ``drop``."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._going_out: list[Sequence] = []
        self._max_moves = state.limits.max_moves

    def reserve_host(self, sequence: Sequence) -> bool:
        """Take host blocks for what a running sequence has computed. False when it has nothing, or there are none."""
        kv_cache = self._state.kv_cache
        host_table = kv_cache.host_allocate(kv_cache.blocks_for(sequence.request.num_computed_tokens))
        if not host_table:
            return False
        sequence.host_table = host_table
        return True

    def drop(self, sequence: Sequence) -> None:
        """What the host has of a sequence, or was to get, is not needed any more. No move in flight uses it."""
        if sequence.host_table:
            self._state.kv_cache.host_free(sequence.host_table)
            sequence.host_table = []
        sequence.on_host = False
        if sequence in self._going_out:
            self._going_out.remove(sequence)

    def send_out(self, sequence: Sequence) -> None:
        """Have the next step of moves copy a leaving sequence's blocks, which no step in flight touches any more."""
        if sequence not in self._going_out:
            self._going_out.append(sequence)

    def next_step(self) -> ScheduledStep | None:
        """The step of moves to send now: first those on their way out, whose blocks somebody waits for."""
        return self._move_out() or self._move_in()

    def moved(self, kind: MoveKind, sequences: list[Sequence]) -> None:
        """A step of moves was answered."""
        for sequence in sequences:
            if kind is MoveKind.SWAP_OUT:
                sequence.on_host = True
            elif sequence.state is SequenceState.RUNNING:
                self.drop(sequence)
                self._go_on(sequence)
            # One that was preempted again on its way back still has all it needs on the host.

    def _move_out(self) -> ScheduledStep | None:
        sequences: list[Sequence] = []
        moves: list[BlockMove] = []
        while self._going_out and len(moves) + len(self._going_out[0].host_table) <= self._max_moves:
            sequence = self._going_out.pop(0)
            sequences.append(sequence)
            pairs = zip(sequence.block_table, sequence.host_table, strict=False)  # blocks without tokens stay behind
            moves += [BlockMove(MoveKind.SWAP_OUT, block, host) for block, host in pairs]
        return self._send(moves, sequences, StepReason.SWAP_OUT) if moves else None

    def _move_in(self) -> ScheduledStep | None:
        """The oldest of the swapped ones come back, as many as there is room for."""
        state = self._state
        sequences: list[Sequence] = []
        moves: list[BlockMove] = []
        while state.swapped and not self._waits(state.swapped[0]):
            sequence = state.swapped[0]
            too_many = len(moves) + len(sequence.host_table) > self._max_moves
            if too_many or not state.running.return_from_host(sequence, state.limits.watermark_blocks):
                break
            del state.swapped[0]
            sequence.request.status = RequestStatus.RUNNING
            sequence.notes_tokens = True
            sequences.append(sequence)
            pairs = zip(sequence.host_table, sequence.block_table, strict=False)
            moves += [BlockMove(MoveKind.SWAP_IN, host, block) for host, block in pairs]
        return self._send(moves, sequences, StepReason.SWAP_IN) if moves else None

    def _waits(self, sequence: Sequence) -> bool:
        """Whether an older sequence is to start again first, or one that was preempted still drains."""
        waiting, running = self._state.waiting, self._state.running
        if running.num_preempted_leaving:
            return True
        return waiting.num_returned > 0 and next(waiting.preempted()).arrival_index < sequence.arrival_index

    def _send(self, moves: list[BlockMove], sequences: list[Sequence], reason: StepReason) -> ScheduledStep:
        in_flight = self._state.in_flight
        step = ScheduledStep(in_flight.next_seq, StepKind.MOVE, moves=moves, reason=reason)
        return in_flight.add(step, sequences)

    def _go_on(self, sequence: Sequence) -> None:
        """A sequence is back: it decodes, or its prompt goes on."""
        if sequence.request.output_token_ids and sequence.num_uncomputed_tokens == 1:
            self._state.running.end_prefill(sequence)
        else:
            self._state.running.start_prefill(sequence)

    def snapshot(self) -> list[int]:
        return [sequence.arrival_index for sequence in self._going_out]

    def restore(self, state: list[int], sequences: Sequences) -> None:
        self._going_out = [sequences[index] for index in state]
