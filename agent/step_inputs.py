"""Copies a step's inputs out of its slot and checks every value that a graph or the sampler uses as an index."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from agent.kernels import ADAPTERS, StepArrays, StepBounds, StepBuffers, StepCopy
from llm_serving.config import Config
from llm_serving.errors import ProtocolError
from llm_serving.ipc.shm import (
    LAST_TOKEN,
    MOVE_WIDTH,
    NO_ADAPTER,
    NO_LOGSUMEXP,
    PADDING_SLOT,
    STATE_MOVE_WIDTH,
    MoveKind,
    StepSlot,
)
from llm_serving.sampling_params import MAX_TOP_LOGITS

Int32Array = npt.NDArray[np.int32]


NUM_ROTARY_DIMENSIONS = 3
"""Dimensions of a rotary position: time, row and column."""


def no_rotary_positions() -> Int32Array:
    """Returns an empty array of rotary positions, for steps whose positions have only one dimension."""
    return np.zeros((0, NUM_ROTARY_DIMENSIONS), np.int32)


def no_state_moves() -> Int32Array:
    """Returns an empty array of state moves, for steps without state moves."""
    return np.zeros((0, STATE_MOVE_WIDTH), np.int32)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of one step. The arrays are views of the step reader's memory, valid until the next step is read."""

    token_ids: Int32Array
    """[tokens]. LAST_TOKEN stands for the token that was sampled last in a batch row. The step reader replaces it,
    unless only the device knows this token.
    """
    positions: Int32Array
    """[tokens]: the position of each token in its sequence."""
    slot_mapping: Int32Array
    """[tokens]: the slot of the KV cache to which each token's key and value are written."""
    block_tables: Int32Array
    """[sequences, blocks]: the block table of each sequence."""
    context_lens: Int32Array
    """[sequences]: the number of tokens of each sequence in the KV cache after the step."""
    query_lens: Int32Array
    """[sequences]: the number of tokens that the step computes for each sequence."""
    rows: Int32Array
    """[sequences]: the batch row of each sequence."""
    last_tokens: Int32Array
    """[sequences]: the index of each sequence's last token in ``token_ids``."""
    sampled_tokens: Int32Array
    """[sequences]: the index of each sequence's last token in ``token_ids`` if the sequence samples, else -1."""
    adapters: Int32Array
    """[tokens]: the adapter slot of each token, or NO_ADAPTER. Empty if the server has no adapters."""
    whole_prompts: bool
    """Whether every sequence starts at position 0."""
    state_moves: Int32Array = field(default_factory=no_state_moves)
    """[state moves, 3]: the snapshots of linear attention that the step reads or saves. Empty for most steps.

    The three numbers of a row are: the index of a sequence in the step, a number of tokens, and the snapshot. If the
    number of tokens is 0, the sequence resumes from the snapshot. Otherwise the state after this number of tokens is
    saved in the snapshot (``llm_serving.ipc.shm``).
    """
    rotary_positions: Int32Array = field(default_factory=no_rotary_positions)
    """[tokens, 3]: time, row and column of each token. Empty unless the graph reads rotary positions
    (``OpTable.reads_rotary_positions``). ``agent.vision.rotary_rows`` fills them.
    """

    @property
    def graph_positions(self) -> Int32Array:
        """The graph's input ``positions``: the array ``positions`` [tokens], or [4, tokens] with the rotary positions
        as rows 1 to 3."""
        if not self.rotary_positions.size:
            return self.positions
        return np.concatenate([self.positions[None], self.rotary_positions.T])

    def copy(self) -> StepInputs:
        """Returns a copy of the inputs in new memory, which no later step overwrites."""
        names = [each.name for each in fields(self) if each.name != "whole_prompts"]
        arrays = {name: getattr(self, name).copy() for name in names}
        return StepInputs(**arrays, whole_prompts=self.whole_prompts)


class StepReader:
    """Copies steps into its own memory, and checks them against the limits of the model, the KV cache and the batch
    rows.
    """

    def __init__(self, config: Config, num_rows: int, row_last_tokens: Int32Array | None = None) -> None:
        """``row_last_tokens`` [num_rows] has the token that each batch row has sampled last, or a negative number if it
        has sampled none.

        The reader replaces LAST_TOKEN by the token of its batch row. If ``row_last_tokens`` is None, LAST_TOKEN stays
        in the inputs.
        """
        self._vocab_size = config.shape.vocab_size
        self._max_model_len = config.max_model_len
        self._block_size = config.pa_config.block_size
        self._num_blocks = config.pa_config.num_blocks
        self._num_host_blocks = config.num_pool_blocks
        self._num_rows = num_rows
        self._row_last_tokens = row_last_tokens
        limits = config.slot_limits()
        table_size = limits.max_seqs * limits.max_blocks_per_seq
        self._max_adapters = limits.max_adapters
        self.buffers = StepBuffers(limits.max_tokens, limits.max_seqs, table_size, limits.max_adapters)
        """The memory into which every step is copied. Its addresses do not change, so that a graph can read it
        directly.
        """
        self._state_moves = np.zeros(limits.max_state_moves * STATE_MOVE_WIDTH, np.int32)
        rotary_rows = limits.max_tokens if config.reads_rotary_positions else 0
        self._rotary_positions = np.zeros((rotary_rows, NUM_ROTARY_DIMENSIONS), np.int32)
        self._sizes = (0, 0, 0, False, 0)
        self._inputs = self._views(*self._sizes)

    def read(self, slot: StepSlot, *, is_decode: bool) -> StepInputs:
        """Reads and checks a step.

        If the agent cannot run the step, raises ProtocolError with the field, its value and its limit.
        """
        tokens, seqs, width = slot.num_tokens, slot.num_seqs, slot.table_width
        if tokens == 0:
            raise ProtocolError("a prefill or decode step has no tokens; only a step of moves may have none")
        copy = self._copy_of(slot)
        if not copy.run(tokens, seqs, width, decode=is_decode):
            self._refuse(slot, is_decode=is_decode)
        num_moves = slot.num_state_moves
        if num_moves:
            used = num_moves * STATE_MOVE_WIDTH
            self._state_moves[:used] = slot.state_moves[:used]
        sizes = (tokens, seqs, width, copy.whole_prompts, num_moves)
        if sizes != self._sizes:
            self._sizes, self._inputs = sizes, self._views(*sizes)
        return self._inputs

    def keep_only(self, index: int) -> StepInputs:
        """Removes all sequences except number ``index`` from the decode step that was read last. Returns the new
        inputs.

        The ``StepInputs`` of the whole step become invalid. Each LAST_TOKEN must have been replaced before this call.
        """
        buffers, width = self.buffers, self._sizes[2]
        for array in (
            *(buffers.token_ids, buffers.positions, buffers.slot_mapping),
            *(buffers.query_lens, buffers.context_lens, buffers.rows),
        ):
            array[0] = array[index]
        self._rotary_positions[:1] = self._rotary_positions[index : index + 1]
        buffers.block_tables[:width] = buffers.block_tables[index * width : (index + 1) * width].copy()
        buffers.last_tokens[0] = buffers.sampled_tokens[0] = 0
        buffers.counts[:3] = 1, 1, width
        if self._max_adapters:
            adapter = buffers.counts[ADAPTERS + index]
            buffers.counts[ADAPTERS - 1 : ADAPTERS + 1] = adapter != NO_ADAPTER, adapter
        self._sizes = (1, 1, width, False, 0)
        self._inputs = self._views(*self._sizes)
        return self._inputs

    def _views(self, tokens: int, seqs: int, width: int, whole_prompts: bool, num_state_moves: int) -> StepInputs:
        buffers = self.buffers
        return StepInputs(
            token_ids=buffers.token_ids[:tokens],
            positions=buffers.positions[:tokens],
            slot_mapping=buffers.slot_mapping[:tokens],
            block_tables=buffers.block_tables[: seqs * width].reshape(seqs, width),
            context_lens=buffers.context_lens[:seqs],
            query_lens=buffers.query_lens[:seqs],
            rows=buffers.rows[:seqs],
            last_tokens=buffers.last_tokens[:seqs],
            sampled_tokens=buffers.sampled_tokens[:seqs],
            adapters=buffers.counts[ADAPTERS : ADAPTERS + tokens if self._max_adapters else 0],
            whole_prompts=whole_prompts,
            state_moves=self._state_moves[: num_state_moves * STATE_MOVE_WIDTH].reshape(-1, STATE_MOVE_WIDTH),
            rotary_positions=self._rotary_positions[:tokens],
        )

    def _copy_of(self, slot: StepSlot) -> StepCopy:
        copy: StepCopy | None = slot.prepared.get(self)
        if copy is None:
            bounds = StepBounds(
                lowest_token=LAST_TOKEN,
                lowest_slot=PADDING_SLOT,
                lowest_top_logits=NO_LOGSUMEXP,
                vocab_size=self._vocab_size,
                max_model_len=self._max_model_len,
                block_size=self._block_size,
                num_blocks=self._num_blocks,
                num_rows=self._num_rows,
                max_top_logits=MAX_TOP_LOGITS,
                max_adapters=self._max_adapters,
            )
            used = {field.name: getattr(slot, field.name) for field in fields(StepArrays)}
            arrays = StepArrays(**used | ({} if self._max_adapters else {"adapters": None}))
            copy = slot.prepared[self] = StepCopy(arrays, self.buffers, bounds, self._row_last_tokens)
        return copy

    def read_moves(self, slot: StepSlot) -> Int32Array:
        """Returns the block moves of a step, int32 [moves, 3]: ``MoveKind``, source block, destination block.

        Any step may copy blocks within the cache, or between the cache and host memory. Raises ProtocolError if a block
        does not exist, or if a move is a hand-over. ``HandedBlocks`` runs hand-overs, which only a step without tokens
        may have.
        """
        moves = moves_of(slot)
        if slot.num_moves:
            kinds = moves[:, 0]
            check_range("move kinds", kinds, 0, MoveKind.HAND_OUT)
            self._check_blocks("move sources", moves[:, 1], kinds == MoveKind.SWAP_IN)
            self._check_blocks("move destinations", moves[:, 2], kinds == MoveKind.SWAP_OUT)
        return moves

    def _check_blocks(self, name: str, blocks: Int32Array, on_host: npt.NDArray[np.bool_]) -> None:
        """Raises ProtocolError if a block does not exist, or if it is the null block of the cache.

        ``on_host`` is True for blocks of the host pool, which has no null block.
        """
        check_range(f"{name} in the cache", blocks[~on_host], 1, self._num_blocks)
        check_range(f"{name} on the host", blocks[on_host], 0, self._num_host_blocks)

    def _refuse(self, slot: StepSlot, *, is_decode: bool) -> NoReturn:
        """Raises the ProtocolError with the reason why ``StepCopy`` refused a step.

        ``StepCopy`` gives no reason, so this method checks the same rules again, one by one.
        """
        tokens, seqs, width = slot.num_tokens, slot.num_seqs, slot.table_width
        query_lens, context_lens, positions = slot.query_lens[:seqs], slot.context_lens[:seqs], slot.positions[:tokens]
        check_range("query_lens", query_lens, 1, tokens + 1)
        check_range("context_lens", context_lens, 1, min(self._max_model_len, width * self._block_size) + 1)
        if int(query_lens.sum()) != tokens:
            raise ProtocolError(f"query_lens sum to {int(query_lens.sum())}, the step has {tokens} tokens")
        if (context_lens < query_lens).any():
            raise ProtocolError("a sequence's context is shorter than its tokens in this step")
        if is_decode and tokens != seqs:
            raise ProtocolError(f"a decode step has {tokens} tokens for {seqs} sequences; it must have one each")
        check_range("token_ids", slot.token_ids[:tokens], LAST_TOKEN, self._vocab_size)
        check_range("positions", positions, 0, self._max_model_len)
        check_range("slot_mapping", slot.slot_mapping[:tokens], PADDING_SLOT, self._num_blocks * self._block_size)
        check_range("block_tables", slot.block_tables[: seqs * width], 0, self._num_blocks)
        check_range("rows", slot.rows[:seqs], 0, self._num_rows)
        if (positions[np.cumsum(query_lens) - 1] + 1 != context_lens).any():
            raise ProtocolError("a sequence's last position is not the last position of its context")
        check_range("num_top_logits", slot.num_top_logits[:seqs], NO_LOGSUMEXP, MAX_TOP_LOGITS + 1)
        if self._max_adapters:
            adapters = slot.adapters[:seqs]
            check_range("adapters", adapters, NO_ADAPTER, self._max_adapters)
            missing = [slot for slot in adapters.tolist() if slot != NO_ADAPTER and not self.buffers.loaded[slot]]
            if missing:
                raise ProtocolError(f"a step names adapter slot {missing[0]}, which has no adapter")
        if self._row_last_tokens is not None:
            asking = np.repeat(slot.rows[:seqs], query_lens)[slot.token_ids[:tokens] == LAST_TOKEN]
            for row in asking[self._row_last_tokens[asking] < 0].tolist():
                raise no_last_token(row)
        raise ProtocolError(
            f"a step has {tokens} tokens, {seqs} sequences and block tables of {width} columns; these sizes are "
            "invalid or exceed the limits of a slot"
        )


def moves_of(slot: StepSlot) -> Int32Array:
    """Returns the block moves of a step, int32 [moves, 3]. Does not check their values."""
    return slot.moves[: slot.num_moves * MOVE_WIDTH].reshape(slot.num_moves, MOVE_WIDTH)


def rows_of_last_tokens(token_ids: Int32Array, rows: Int32Array, query_lens: Int32Array) -> Int32Array:
    """Returns the batch row of each LAST_TOKEN in ``token_ids``."""
    unknown = token_ids == LAST_TOKEN
    if not unknown.any():
        return np.empty(0, np.int32)
    row_of_token: Int32Array = rows if rows.size == token_ids.size else np.repeat(rows, query_lens)
    needed: Int32Array = row_of_token[unknown]
    return needed


def no_last_token(row: int) -> ProtocolError:
    """Makes the error for a step that needs the last token of batch row ``row``, although this row has not sampled a
    token.
    """
    return ProtocolError(f"a step asks for the last token of row {row}, which has not sampled one")


def check_range(name: str, values: npt.NDArray[np.int32], low: int, high: int) -> None:
    """Raises ProtocolError unless low <= value < high for all values. ``name`` is their name in the error."""
    if values.size == 0:
        return
    smallest, largest = int(values.min()), int(values.max())
    if smallest < low or largest >= high:
        wrong = smallest if smallest < low else largest
        raise ProtocolError(f"a step's {name} holds {wrong}; it must be at least {low} and below {high}")
