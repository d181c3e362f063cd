"""Runs the MOVE steps that copy blocks between the KV cache and the hand-over pool. These steps exist only if prefill
and decode run on separate replicas.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent.kernels import BlockHandOvers
from agent.step_inputs import Int32Array, moves_of
from agent.weights.storage import Array
from llm_serving.errors import AgentStartError, ProtocolError
from llm_serving.ipc.hand_over_memory import HandOverMemory
from llm_serving.ipc.shm import HEADER_WORDS, MoveKind, StepSlot

_KINDS = (MoveKind.HAND_OUT, MoveKind.HAND_IN)


class HandedBlocks:
    """The hand-over pool of an agent, and the copies to and from it."""

    def __init__(self, memory: HandOverMemory, arrays: Sequence[Array]) -> None:
        """``arrays`` are the arrays of the KV cache. Raises AgentStartError if blocks of the pool have another size."""
        try:
            self._copies = BlockHandOvers(arrays, memory.blocks, memory.headers)
        except ValueError as error:
            problem = f"{error}; blocks of this cache cannot be handed over: remove parallel_config.roles"
            raise AgentStartError(problem) from error

    def run(self, slot: StepSlot) -> Int32Array:
        """Runs the moves of a step. Returns the numbers [blocks] of the cache's blocks that it has written.

        Marks a move as faulty in the slot if the pool's block is not the block that the step expects.

        Raises ProtocolError if a move is neither HAND_OUT nor HAND_IN, or if it writes the null block of the cache.
        Raises KernelError if a block does not exist.
        """
        moves = moves_of(slot)
        kinds = set(moves[:, 0].tolist())
        if not kinds <= set(_KINDS):
            raise ProtocolError(
                f"a step of hand-overs has moves of the kinds {sorted(kinds)}; only {sorted(_KINDS)} are hand-overs"
            )
        device_blocks = moves[:, 1] if MoveKind.HAND_OUT in kinds else moves[:, 2]
        if len(kinds) != 1 or (device_blocks == 0).any():
            raise ProtocolError(
                "all moves of a step of hand-overs must have the same kind, and none may name the cache's null block 0"
            )
        count = moves.shape[0]
        self._copies.run(moves, slot.move_headers[: count * HEADER_WORDS], slot.move_faults[:count])
        return device_blocks if MoveKind.HAND_IN in kinds else device_blocks[:0]


def is_hand_over(slot: StepSlot) -> bool:
    """Returns True if a step has moves to or from the hand-over pool."""
    return slot.num_moves > 0 and int(moves_of(slot)[0, 0]) in _KINDS
