"""Step slots: the layout of the inputs and results of a step, and the shared memory that holds the slots.

A slot belongs to one step at a time. The server fills the inputs, sends ``Prefill``, ``Decode`` or ``Move``, and must
not touch the slot until ``StepDone``. Between these two messages, the agent reads the inputs and writes the results.
Two steps in flight therefore never share memory, and the agent may run them in any order.

The masks of allowed tokens are an exception. A mask depends on the token of the previous step, which the server may not
know when it sends this step. So the server writes the masks later and then sends ``Masks``. The agent computes the
logits meanwhile, and waits for ``Masks`` before it samples.
"""

from __future__ import annotations

import enum
import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llm_serving.errors import ProtocolError
from llm_serving.ipc.alignment import aligned
from llm_serving.ipc.segment import NamedSegment, map_segment, new_segment
from llm_serving.ipc.tiles import TILE_WIDTH
from llm_serving.sampling_params import MAX_TOP_LOGITS, SAMPLER_PARAMETERS

SLOT_MAGIC = 0x51075107

NUM_SLOTS = 8
"""Number of slots of a segment, and so the maximum number of steps in flight."""

LAST_TOKEN = -1
"""Value in ``token_ids`` for the token that the sequence's previous step sampled. Only the agent knows it."""

NOT_FINITE = -2
"""Value in ``sampled_ids`` of a sequence whose logits cannot be used: one is NaN or +infinity, or none is finite."""

NO_LOGSUMEXP = -1
"""Value in ``num_top_logits`` of a request without log-probabilities. The agent need not set its ``logsumexp``."""

MOVE_WIDTH = 3
"""Number of integers that describe one block move in a slot: kind, source, destination."""

STATE_MOVE_WIDTH = 3
"""Number of integers that describe one state move in a slot. They are the index of a sequence in the step, a number of
tokens n, and the number of a snapshot.

A state move loads or saves a state of linear attention. If n is 0, the sequence resumes from the snapshot. Otherwise,
the state after the sequence's first n tokens in the step is saved in the snapshot (``agent/sequence_states.py``).
"""

HEADER_WORDS = 8
"""Number of 32-bit words in a step slot for the header of a KV block that one replica hands over to another. See
``llm_serving.handover.header``.
"""

NO_ADAPTER = -1
"""Value in ``adapters`` of a sequence that uses no LoRA adapter."""

NO_DRAFT = -1
"""Value in ``draft_ids`` after the last draft of a sequence."""

PADDING_SLOT = -1
"""Value in ``slot_mapping`` for a token whose keys and values are not written."""


class MoveKind(enum.IntEnum):
    """Kind of a block move: the memory of source and destination. It is the first of a move's three numbers."""

    COPY = 0
    """A copy within the device, for copy-on-write of the tail: the partly matching last block of a cached prefix."""
    SWAP_OUT = 1
    """A copy from the device to the host."""
    SWAP_IN = 2
    """A copy from the host to the device."""
    HAND_OUT = 3
    """A copy from the device to the hand-over pool, with a header for each block. All moves of its step are of this
    kind."""
    HAND_IN = 4
    """A copy from the hand-over pool to the device. The agent checks the headers. The step has only moves of this kind.
    """


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """The largest step that a slot can hold. Server and agent compute the same layout from the same limits."""

    max_tokens: int
    """Maximum number of tokens of a step, over all sequences."""
    max_seqs: int
    """Maximum number of sequences of a step."""
    max_blocks_per_seq: int
    """Maximum number of blocks of a sequence, the width of its block table: ceil(longest context / block size)."""
    max_context: int = 0
    """Maximum number of tokens of a sequence. The last chunk of a sequence with penalties may have a history of this
    length.
    """

    mask_words: int = 0
    """Length of a mask of allowed tokens, in words of 32 tokens. 0: the steps have no masks."""
    pooled_width: int = 0
    """Number of values of a pooled result (embedding or score). 0: the steps sample tokens."""
    max_adapters: int = 0
    """Number of adapter slots, which hold LoRA adapters. 0: the steps have no adapters."""
    max_draft_ids: int = 0
    """Maximum number of drafts that the agent returns for a sequence. 0: the agent has no draft model."""
    hands_over: bool = False
    """Whether steps may have moves to and from a hand-over pool."""
    tile_rows: int = 0
    """Number of rows of the smallest tile of an image. 0: the model reads no images."""
    shifts_positions: bool = False
    """If True, the rotary positions of tokens after an image differ from their positions in the sequence."""

    has_states: bool = False
    """Whether the model has linear attention, whose layers have a state for each sequence."""
    num_snapshots: int = 0
    """Number of snapshots of the states of linear attention. 0: the steps have no state moves."""
    max_logged: int = 0
    """Maximum number of drafts of a sequence that may be wrong in one step, for a model with linear attention.

    A state keeps the inputs of this number of drafts, so that the agent can undo wrong ones. A step may have more
    drafts of a sequence only if all but the last ``max_logged`` are known tokens. This is so when a prompt is scored.
    """

    @property
    def max_state_moves(self) -> int:
        """Maximum number of state moves in a step. A sequence resumes once and saves up to two states."""
        return 3 * self.max_seqs if self.num_snapshots else 0

    @property
    def max_tiles(self) -> int:
        """Maximum number of tiles in a step. In each sequence, only the first and the last tile may be incomplete."""
        return self.max_tokens // self.tile_rows + 2 * self.max_seqs if self.tile_rows else 0

    @property
    def max_history(self) -> int:
        """Maximum total number of tokens of the histories in a step. A history lists the tokens of a sequence that
        penalties count. A single history may be as long as the context.
        """
        return max(self.max_tokens, self.max_context)

    @property
    def max_moves(self) -> int:
        """Maximum number of block moves in a step: all blocks of one sequence, and one block of each sequence."""
        return self.max_blocks_per_seq + self.max_seqs


@dataclass(frozen=True, slots=True)
class Field:
    """One array of a slot. ``capacity`` is in elements."""

    name: str
    dtype: str
    capacity: int
    comment: str


def slot_fields(limits: SlotLimits) -> tuple[Field, ...]:
    """Returns the fields of a slot, in their order in memory.

    The descriptions of the fields use three sizes from the slot's header: T tokens, S sequences, and W block ids in
    each block table.
    """
    tokens, seqs = limits.max_tokens, limits.max_seqs
    return (
        Field("header", "int32", 16, "see HEADER"),
        # Inputs of the graph.
        Field("token_ids", "int32", tokens, "[T] token id, or LAST_TOKEN"),
        Field("positions", "int32", tokens, "[T] position in its sequence, from 0"),
        Field("slot_mapping", "int32", tokens, "[T] block * block_size + offset to write K and V to, or PADDING_SLOT"),
        Field("query_lens", "int32", seqs, "[S] tokens of each sequence in this step; they sum to T"),
        Field("context_lens", "int32", seqs, "[S] tokens of each sequence in the cache once this step has written"),
        Field("block_tables", "int32", seqs * limits.max_blocks_per_seq, "[S, W] block ids, padded with 0"),
        Field("position_shifts", "int32", tokens if limits.shifts_positions else 0, "[T] position minus rotary"
              " position; a token of an image has the number of the token before the image"),
        Field("adapters", "int32", seqs if limits.max_adapters else 0, "[S] adapter slot, or NO_ADAPTER"),
        Field("restarts", "int32", seqs if limits.max_draft_ids else 0, "[S] 1: first step of the sequence on its row"),
        # Inputs of the sampler, one entry for each sequence.
        Field("rows", "int32", seqs, "[S] row of the agent's state table that belongs to the sequence; a draft has the"
              " row of the entry before it"),
        Field("do_sample", "int32", seqs, "[S] 1: sample after the sequence's last token; 0: a chunk, no output"),
        *(Field(each.name, each.column, seqs, f"[S] {each.meaning}") for each in SAMPLER_PARAMETERS),
        Field("sample_position", "int32", seqs, "[S] index of the token to sample in the output, from 0"),
        Field("num_top_logits", "int32", seqs, "[S] best pairs wanted, 0 to MAX_TOP_LOGITS, or NO_LOGSUMEXP"),
        Field("top_allowed", "int32", seqs, "[S] 1: the best pairs are those of the mask's tokens; 0: of all tokens"),
        Field("mask_number", "int32", seqs, "[S] number of the sequence's mask, from 1; 0: every token is allowed"),
        Field("masks", "uint32", seqs * limits.mask_words, "[num_masks, mask_words] a bit for each token, 1: allowed"),
        # The history of sequences with penalties. Only the first step of a sequence in its batch row contains it.
        Field("history_lens", "int32", seqs, "[S] known tokens in `history`; 0 keeps what the row has"),
        Field("history_prompt_lens", "int32", seqs, "[S] how many of them are the prompt"),
        Field("history", "int32", limits.max_history, "[sum of history_lens] token ids"),
        # Blocks to copy before the computation, in this order.
        Field("moves", "int32", limits.max_moves * MOVE_WIDTH, "[num_moves, 3] MoveKind, source and destination block"),
        Field("move_headers", "uint32", limits.max_moves * HEADER_WORDS * limits.hands_over, "[num_moves, HEADER_WORDS]"
              " expected header of the block in the hand-over pool"),
        # States of linear attention that sequences resume from, and that the step saves.
        Field("state_moves", "int32", limits.max_state_moves * STATE_MOVE_WIDTH, "[num_state_moves, 3] entry of the"
              " step, 0 to resume or the number of tokens to save after, snapshot"),
        # Tiles of images whose rows replace the embeddings of some tokens.
        Field("tiles", "int32", limits.max_tiles * TILE_WIDTH, "[num_tiles, TILE_WIDTH] see llm_serving.ipc.tiles"),
        # Results of the step.
        Field("sampled_ids", "int32", seqs, "[S] the token, or NOT_FINITE, or REJECTED; -1 if do_sample is 0"),
        Field("sampled_logit", "float32", seqs, "[S] its raw logit, before penalties and temperature"),
        Field("logsumexp", "float32", seqs, "[S] log of the sum of exp of the raw logits"),
        Field("top_ids", "int32", seqs * MAX_TOP_LOGITS, "[S, MAX_TOP_LOGITS] best first, -1 past num_top_logits"),
        Field("top_logits", "float32", seqs * MAX_TOP_LOGITS, "[S, MAX_TOP_LOGITS] raw logits"),
        Field("pooled", "float32", seqs * limits.pooled_width, "[S, pooled_width] pooled results where do_sample is 1"),
        Field("move_faults", "int32", limits.max_moves * limits.hands_over, "[num_moves] 1: the block of the hand-over"
              " pool had another header or other bytes. The agents only set ones"),
        Field("draft_ids", "int32", seqs * limits.max_draft_ids, "[S, max_draft_ids] drafts of the next tokens, then"
              " NO_DRAFT; a sequence with drafts in the step has them at its last entry that counts"),
    )


_SIZES = ("num_tokens", "num_seqs", "table_width", "history_len", "num_moves")
_HEADER_ENTRIES = ("magic", "seq_low", "seq_high", *_SIZES, "checked_row", "num_masks", "num_drafts", "num_wanted",
                   "num_tiles", "num_state_moves")  # fmt: skip
HEADER = {name: index for index, name in enumerate(_HEADER_ENTRIES)}
"""Index of each number in the header of a slot. With ``seq``, the number of the step, the agent detects that another
step has overwritten the slot.
"""


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Byte offsets of the fields of a slot. Each field begins on its own cache line."""

    limits: SlotLimits
    fields: tuple[Field, ...]
    offsets: dict[str, int]
    slot_bytes: int

    @classmethod
    def of(cls, limits: SlotLimits) -> SlotLayout:
        fields, offsets, end = slot_fields(limits), {}, 0
        for field in fields:
            offsets[field.name] = end
            size = field.capacity * np.dtype(field.dtype).itemsize
            end += aligned(size)
        return cls(limits, fields, offsets, end)


class StepSlot:
    """NumPy views of one slot: one attribute for each field of ``slot_fields``, with its full capacity."""

    header: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    slot_mapping: npt.NDArray[np.int32]
    query_lens: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    position_shifts: npt.NDArray[np.int32]
    adapters: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int32]
    do_sample: npt.NDArray[np.int32]
    sample_position: npt.NDArray[np.int32]
    num_top_logits: npt.NDArray[np.int32]
    top_allowed: npt.NDArray[np.int32]
    mask_number: npt.NDArray[np.int32]
    masks: npt.NDArray[np.uint32]
    history_lens: npt.NDArray[np.int32]
    history_prompt_lens: npt.NDArray[np.int32]
    history: npt.NDArray[np.int32]
    moves: npt.NDArray[np.int32]
    move_headers: npt.NDArray[np.uint32]
    move_faults: npt.NDArray[np.int32]
    sampled_ids: npt.NDArray[np.int32]
    sampled_logit: npt.NDArray[np.float32]
    logsumexp: npt.NDArray[np.float32]
    top_ids: npt.NDArray[np.int32]
    top_logits: npt.NDArray[np.float32]
    pooled: npt.NDArray[np.float32]
    restarts: npt.NDArray[np.int32]
    draft_ids: npt.NDArray[np.int32]
    tiles: npt.NDArray[np.int32]
    state_moves: npt.NDArray[np.int32]

    def __init__(self, layout: SlotLayout, buffer: memoryview | mmap.mmap | bytearray, offset: int = 0) -> None:
        self.layout = layout
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        """All fields by name, including the columns of sampling parameters, for which there are no attributes."""
        for field in layout.fields:
            array: npt.NDArray[Any] = np.frombuffer(
                buffer, dtype=field.dtype, count=field.capacity, offset=offset + layout.offsets[field.name]
            )
            setattr(self, field.name, array)
            self.arrays[field.name] = array
        self.prepared: dict[object, Any] = {}
        """Data that parts of the agent have computed from the arrays. Each part stores its data under its own key."""
        # A memoryview, because it is several times faster than NumPy at reading a single integer.
        self._numbers = self.header.data

    @property
    def num_tokens(self) -> int:
        return self._numbers[HEADER["num_tokens"]]

    @property
    def num_seqs(self) -> int:
        return self._numbers[HEADER["num_seqs"]]

    @property
    def table_width(self) -> int:
        return self._numbers[HEADER["table_width"]]

    @property
    def history_len(self) -> int:
        return self._numbers[HEADER["history_len"]]

    @property
    def num_moves(self) -> int:
        return self._numbers[HEADER["num_moves"]]

    @property
    def checked_row(self) -> int:
        """Number, from 1, of the sequence that the agents compute a second time without the other sequences.

        This self-check compares the bits of the two results. 0 means that the step has no self-check.
        """
        return self._numbers[HEADER["checked_row"]]

    @property
    def num_masks(self) -> int:
        """Number of masks of allowed tokens that the server writes before it sends ``Masks``. Usually 0."""
        return self._numbers[HEADER["num_masks"]]

    @property
    def num_drafts(self) -> int:
        """Number of entries of a decode step whose input is a draft, see ``llm_serving.ipc.drafts``. Usually 0."""
        return self._numbers[HEADER["num_drafts"]]

    @property
    def num_wanted(self) -> int:
        """Number of drafts for each sequence that the draft model makes after this step. Usually 0."""
        return self._numbers[HEADER["num_wanted"]]

    @property
    def num_tiles(self) -> int:
        """Number of tiles of images in this step. Usually 0."""
        return self._numbers[HEADER["num_tiles"]]

    @property
    def num_state_moves(self) -> int:
        """Number of states that sequences of this step resume from or save. Usually 0."""
        return self._numbers[HEADER["num_state_moves"]]

    @property
    def seq(self) -> int:
        return self._numbers[HEADER["seq_low"]] | self._numbers[HEADER["seq_high"]] << 31

    def write_header(
        self,
        seq: int,
        *,
        num_tokens: int,
        num_seqs: int,
        table_width: int,
        history_len: int,
        num_moves: int = 0,
        checked_row: int = 0,
        num_masks: int = 0,
        num_drafts: int = 0,
        num_wanted: int = 0,
        num_tiles: int = 0,
        num_state_moves: int = 0,
    ) -> None:
        """Writes the header, after all other fields. Raises ProtocolError if a size exceeds the slot's limits.

        A step that only moves blocks has no tokens, sequences, table or history.
        """
        sizes = (num_tokens, num_seqs, table_width, history_len, num_moves)
        _check_sizes(self.layout.limits, *sizes)
        numbers = (checked_row, num_masks, num_drafts, num_wanted, num_tiles, num_state_moves)
        if any(numbers):  # most steps have none of these
            self._check_numbers(num_seqs, *numbers)
        self.header[:14] = (SLOT_MAGIC, seq & 0x7FFFFFFF, seq >> 31, *sizes, *numbers)

    def _check_numbers(
        self,
        num_seqs: int,
        checked_row: int,
        num_masks: int,
        num_drafts: int,
        num_wanted: int,
        num_tiles: int,
        num_state_moves: int,
    ) -> None:
        limits = self.layout.limits
        _check_size("checked_row", checked_row, 0, num_seqs)
        _check_size("num_masks", num_masks, 0, num_seqs if limits.mask_words else 0)
        _check_size("num_drafts", num_drafts, 0, max(num_seqs - 1, 0))
        _check_size("num_wanted", num_wanted, 0, limits.max_draft_ids)
        _check_size("num_tiles", num_tiles, 0, limits.max_tiles)
        _check_size("num_state_moves", num_state_moves, 0, limits.max_state_moves)

    def check_header(self, seq: int) -> None:
        """Checks the header of a slot, before the agent reads other fields.

        Raises ProtocolError if the slot has another step than ``seq``, or if a size exceeds the limits.
        """
        if self._numbers[HEADER["magic"]] != SLOT_MAGIC or self.seq != seq:
            raise ProtocolError(f"a slot announced as step {seq} holds step {self.seq}: it was torn or reused")
        _check_sizes(self.layout.limits, *self._numbers[HEADER["num_tokens"] : HEADER["num_moves"] + 1])
        numbers = self._numbers[HEADER["checked_row"] : HEADER["num_state_moves"] + 1].tolist()
        if any(numbers):
            self._check_numbers(self.num_seqs, *numbers)


def _check_sizes(
    limits: SlotLimits, num_tokens: int, num_seqs: int, table_width: int, history_len: int, num_moves: int
) -> None:
    _check_size("num_moves", num_moves, 0, limits.max_moves)
    computes = num_moves == 0 or num_tokens != 0 or num_seqs != 0
    least = 1 if computes else 0
    _check_size("num_tokens", num_tokens, least, limits.max_tokens)
    _check_size("num_seqs", num_seqs, least, limits.max_seqs)
    _check_size("table_width", table_width, least, limits.max_blocks_per_seq if computes else 0)
    _check_size("history_len", history_len, 0, limits.max_history if computes else 0)


def _check_size(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ProtocolError(f"a step slot's {name} is {value}; it must be between {low} and {high}")


class SlotMemory(NamedSegment):
    """A shared-memory segment of step slots. The server creates and unlinks it; an agent attaches to it."""

    def __init__(self, name: str, layout: SlotLayout, num_slots: int, mapping: mmap.mmap) -> None:
        super().__init__(name)
        self.layout = layout
        self.num_slots = num_slots
        self._mapping = mapping
        self.slots = [StepSlot(layout, mapping, index * layout.slot_bytes) for index in range(num_slots)]

    @classmethod
    def create(cls, limits: SlotLimits, num_slots: int) -> SlotMemory:
        """Creates a segment with reserved pages. Raises OSError if /dev/shm is too small."""
        layout = SlotLayout.of(limits)
        with new_segment(layout.slot_bytes * num_slots) as (name, mapping):
            memory = cls(name, layout, num_slots, mapping)
        memory.has_name = True
        return memory

    @classmethod
    def attach(cls, name: str, limits: SlotLimits, num_slots: int) -> SlotMemory:
        """Maps a segment that the server created. Raises ProtocolError if its name or size is wrong."""
        layout = SlotLayout.of(limits)
        return cls(name, layout, num_slots, map_segment(name, layout.slot_bytes * num_slots, "step-slot"))

    def close(self) -> None:
        """Removes the segment's name and the slots. The mapping ends when no NumPy view of it is left."""
        self.unlink()
        self.slots = []
