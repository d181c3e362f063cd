"""Hand-overs of computed prompts between replicas (separate prefill and decode).

A prefill replica computes the prompt of a sequence and samples its first token. Then the sequence is LEAVING: it asks
the router for blocks of the hand-over pool, and a MOVE step copies its blocks there. The decode replica adds the
sequence to its swapped sequences. MOVE steps copy the blocks to its device. Each step copies only some blocks, so that
decode steps run in between. The agent checks each block. If a block is damaged, the sequence is computed again from its
tokens.

The router owns the hand-over pool. Its grants and placements are inputs of the scheduler, like the results of steps.
(DistServe, Zhong et al., OSDI 2024, and Splitwise, Patel et al., ISCA 2024, separate prefill and decode.)
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from llm_serving.block_moves.block_mover import BlockMover
from llm_serving.block_supply.base import BlockSupply
from llm_serving.ipc.shm import MoveKind
from llm_serving.request import RequestStatus
from llm_serving.scheduler.output import BlockMove, ScheduledStep, StepKind, StepReason, StepResult
from llm_serving.scheduler.sequence import HandOverState, InFlightStep, Sequence, SequenceState
from llm_serving.scheduler.state import SchedulerState
from llm_serving.step_costs.rates import Rate, learn_from_step
from llm_serving.telemetry.receipt import Phase

PIECE_S = 0.002
"""Maximum seconds that a step with copies of arriving blocks should take, because decode steps wait for it."""
FIRST_PIECE = 16
"""Maximum number of arriving blocks that one step copies while the time of a copy is unknown."""


class Change(enum.Enum):
    """A kind of report from a scheduler to the router about a hand-over."""

    WANTED = "wanted"
    """The prompt is computed, and the sequence needs ``num_blocks`` blocks of the hand-over pool."""
    READY = "ready"
    """The blocks are copied to the hand-over pool. The sequence has left this scheduler."""
    LOADED = "loaded"
    """The blocks have arrived on the device. The hand-over pool may free its copies of the blocks."""
    MISSED = "missed"
    """An arriving block was not the expected one. The sequence is computed again, and the pool may free its copies."""
    DROPPED = "dropped"
    """The sequence needs the blocks no more, because it ended, restarts or lost its agent."""


@dataclass(frozen=True, slots=True)
class HandOverChange:
    """A report of the scheduler to the router: what has happened to the hand-over of one request."""

    kind: Change
    request_id: str
    num_blocks: int
    blocks: list[int]
    """The blocks of the hand-over pool that the sequence uses. Empty for WANTED."""

    @property
    def has_left(self) -> bool:
        """True if the request is no longer a request of this scheduler."""
        return self.kind is Change.READY


class HandOvers(BlockMover):
    """Composes the MOVE steps to and from the hand-over pool, and tracks the sequences that leave or arrive."""

    STATE = ("_asking", "_to_copy", "_arriving", "_prefill", "_move")

    def __init__(self, state: SchedulerState, supply: BlockSupply) -> None:
        super().__init__(state)
        self._supply = supply
        self._asking: list[Sequence] = []
        """Leaving sequences that wait for blocks of the hand-over pool."""
        self._to_copy: list[Sequence] = []
        """Leaving sequences whose blocks a step must still copy to the hand-over pool."""
        self._arriving: Sequence | None = None
        """The sequence whose blocks MOVE steps copy to the device now. None if no sequence arrives."""
        self._prefill = Rate()
        self._move = Rate()
        self._changes: list[HandOverChange] = []

    # The router calls the following methods.

    def take_changes(self) -> list[HandOverChange]:
        """Returns what has happened to hand-overs since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def grant(self, request_id: str, blocks: list[int]) -> Sequence | None:
        """Receives the router's reply to the report ``Change.WANTED`` of a sequence: blocks of the hand-over pool.

        If ``blocks`` is empty, the router refuses the hand-over. The sequence then stays on this replica and is
        computed again. The method returns it, and the caller must pass it to ``Preemption.settle``. In all other cases,
        returns None. If the sequence no longer waits for blocks, reports them to the router with ``Change.DROPPED``.
        """
        sequence = next((one for one in self._asking if one.request.request_id == request_id), None)
        if sequence is None:
            if blocks:
                self._changes.append(HandOverChange(Change.DROPPED, request_id, len(blocks), blocks))
            return None
        self._asking.remove(sequence)
        if blocks:
            sequence.handed_blocks = blocks
            self._to_copy.append(sequence)
            return None
        sequence.drop_tokens = True
        sequence.hand_over = HandOverState.NONE
        return sequence

    def arrive(self, sequence: Sequence, blocks: list[int]) -> None:
        """Adds a new sequence whose computed tokens are in ``blocks`` of the hand-over pool."""
        request = sequence.request
        sequence.hand_over, sequence.handed_blocks = HandOverState.ARRIVING, blocks
        request.num_computed_tokens = request.num_tokens - 1
        self._state.num_started += 1
        self._swap(sequence)

    @property
    def costs(self) -> tuple[float | None, float | None]:
        """(seconds per prefilled token, seconds per moved block), as measured. Each is None before a measurement."""
        return self._prefill.seconds_per_unit, self._move.seconds_per_unit

    # The scheduler calls the following methods.

    def next_step(self) -> ScheduledStep | None:
        """Returns the next MOVE step to or from the hand-over pool, or None."""
        if self._to_copy:
            return self._copy_out()
        return self._copy_in() if self._arriving is not None or self._state.swapped else None

    def take_computed(self, sequences: list[Sequence]) -> None:
        """Makes sequences with a computed prompt and a first token leave, if another replica must decode them."""
        running = self._state.running
        for sequence in sequences:
            if sequence.hand_over is not HandOverState.WANTED or sequence.state is not SequenceState.RUNNING:
                continue
            if sequence.num_uncomputed_tokens == 1 and not running.is_prefilling(sequence):
                sequence.hand_over = HandOverState.LEAVING
                running.stop(sequence)

    def prepare(self, sequence: Sequence) -> bool:
        return sequence.hand_over is HandOverState.ARRIVING  # the hand-over pool still has the blocks of this sequence

    def settle(self, sequence: Sequence) -> bool:
        if sequence.request.is_finished or sequence.drop_tokens:
            self.drop(sequence)
            return False
        if sequence.hand_over is HandOverState.LEAVING:
            self._leave(sequence)
            return True
        if sequence.hand_over is HandOverState.ARRIVING:
            self._state.running.release(sequence)
            self._swap(sequence)
            return True
        return False

    def drop(self, sequence: Sequence) -> None:
        for waiting in (self._asking, self._to_copy):
            if sequence in waiting:
                waiting.remove(sequence)
        if sequence.handed_blocks:
            self._end(sequence, Change.DROPPED)

    def wait_again(self, sequence: Sequence) -> None:
        sequence.num_handed = 0
        if sequence.hand_over is HandOverState.LEAVING:
            sequence.hand_over = HandOverState.WANTED
        elif sequence.hand_over is HandOverState.ARRIVING:
            sequence.hand_over = HandOverState.NONE

    def moved(self, flight: InFlightStep, result: StepResult, now: float) -> None:
        kind = flight.step.moves[0].kind
        if kind is MoveKind.HAND_OUT:
            for sequence in flight.sequences:
                sequence.num_handed = len(sequence.handed_blocks)
        if kind is not MoveKind.HAND_IN:
            return
        (sequence,) = flight.sequences
        if sequence.state is not SequenceState.RUNNING:
            return  # the sequence ended or was preempted
        sequence.num_handed += len(flight.step.moves)
        if result.bad_moves:
            self._miss(sequence, now)
        elif sequence.num_handed == len(sequence.handed_blocks):
            self._end(sequence, Change.LOADED)
            sequence.hand_over, self._arriving = HandOverState.NONE, None
            self._supply.computed(sequence, sequence.request.num_computed_tokens)
            self._state.running.end_prefill(sequence)

    def step_completed(self, step: ScheduledStep, result: StepResult) -> None:
        is_foreign = step.kind is StepKind.MOVE and step.moves[0].kind not in (MoveKind.HAND_OUT, MoveKind.HAND_IN)
        if not is_foreign:
            learn_from_step(step, result, self._prefill, self._move)

    # The following methods move the blocks of leaving sequences to the hand-over pool.

    def _leave(self, sequence: Sequence) -> None:
        if not sequence.handed_blocks:
            if sequence not in self._asking:
                self._asking.append(sequence)
                needed = self._state.kv_cache.blocks_for(sequence.request.num_computed_tokens)
                self._changes.append(HandOverChange(Change.WANTED, sequence.request.request_id, needed, []))
        elif sequence.num_handed == len(sequence.handed_blocks):
            state = self._state
            state.running.release(sequence)
            sequence.state = SequenceState.REMOVED
            sequence.request.status = RequestStatus.WAITING
            del state.intake.sequences[sequence.request.request_id]
            state.num_started -= 1
            self._report(sequence, Change.READY)

    def _copy_out(self) -> ScheduledStep | None:
        sequences: list[Sequence] = []
        moves: list[BlockMove] = []
        waiting, max_moves = self._to_copy, self._state.limits.max_moves
        while waiting and len(moves) + len(waiting[0].handed_blocks) <= max_moves:
            sequence = waiting.pop(0)
            sequences.append(sequence)
            # If the last block in ``block_table`` has no computed tokens, ``handed_blocks`` is shorter. The last block
            # is then not copied.
            pairs = zip(sequence.block_table, sequence.handed_blocks, strict=False)
            moves += [BlockMove(MoveKind.HAND_OUT, block, host) for block, host in pairs]
        return self._send(moves, sequences, StepReason.HAND_OUT)

    # The following methods move the blocks of arriving sequences from the hand-over pool to the device.

    def _copy_in(self) -> ScheduledStep | None:
        """Returns a step that copies the arriving sequence's next blocks. Only one of these steps is in flight."""
        sequence = self._arriving
        if sequence is None or sequence.hand_over is not HandOverState.ARRIVING or not _has_blocks(sequence):
            sequence = self._arriving = self._next_arrival()
        if sequence is None or sequence.num_inflight_steps or sequence.state is not SequenceState.RUNNING:
            return None
        begin = sequence.num_handed
        pairs = list(zip(sequence.handed_blocks, sequence.block_table, strict=False))[begin : begin + self._piece]
        moves = [BlockMove(MoveKind.HAND_IN, host, block) for host, block in pairs]
        return self._send(moves, [sequence], StepReason.HAND_IN)

    def _next_arrival(self) -> Sequence | None:
        """Returns the oldest swapped sequence, after giving it a batch row and blocks on the device.

        Returns None if this sequence does not come from another replica, or must stay swapped for now, for example
        because too few blocks are free.
        """
        state = self._state
        if not state.swapped or state.swapped[0].hand_over is not HandOverState.ARRIVING:
            return None
        sequence = self._swap_in_first()
        if sequence is not None:
            sequence.num_handed = 0
        return sequence

    @property
    def _piece(self) -> int:
        """Maximum number of blocks that the next step copies for an arriving sequence. While other sequences run, it is
        small, because their next step waits for the copies.
        """
        max_moves, block_s = self._state.limits.max_moves, self._move.seconds_per_unit
        if len(self._state.running) == 1:
            return max_moves
        return min(max_moves, FIRST_PIECE if block_s is None else max(1, int(PIECE_S / block_s)))

    def _miss(self, sequence: Sequence, now: float) -> None:
        """Makes a sequence with a bad block wait for a new computation of all its tokens."""
        self._end(sequence, Change.MISSED)
        sequence.drop_tokens = True
        sequence.request.receipt.enter(Phase.RESTARTED, now)
        self._state.running.stop(sequence)

    def _swap(self, sequence: Sequence) -> None:
        """Takes the batch row and the blocks from a sequence that arrives from another replica. It waits again among
        the swapped sequences, and all its blocks are copied again."""
        sequence.num_handed = 0
        self._swap_out(sequence)

    def _end(self, sequence: Sequence, kind: Change) -> None:
        self._report(sequence, kind)
        sequence.handed_blocks = []
        if kind is not Change.LOADED:
            sequence.num_handed = 0

    def _report(self, sequence: Sequence, kind: Change) -> None:
        blocks = sequence.handed_blocks
        self._changes.append(HandOverChange(kind, sequence.request.request_id, len(blocks), blocks))


def _has_blocks(sequence: Sequence) -> bool:
    return sequence.state in (SequenceState.RUNNING, SequenceState.LEAVING)
