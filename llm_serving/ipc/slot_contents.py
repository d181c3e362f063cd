"""The contents of a step slot as bytes, for agents on another machine.

Only the used parts of the arrays are sent: a step of three sequences sends three elements of each column. Both ends
know the sizes from the slot's header, which comes first. The receiver checks the header against the slot's limits,
and then the number of bytes, before it writes anything else.
"""

from __future__ import annotations

from dataclasses import dataclass

from llm_serving.errors import ProtocolError
from llm_serving.ipc.shm import HEADER, HEADER_WORDS, MOVE_WIDTH, STATE_MOVE_WIDTH, StepSlot
from llm_serving.ipc.tiles import TILE_WIDTH
from llm_serving.sampling_params import MAX_TOP_LOGITS, SAMPLER_PARAMETERS

_PER_TOKEN = ("token_ids", "positions", "slot_mapping", "position_shifts")
_PER_SEQUENCE = (
    *("query_lens", "context_lens", "adapters", "restarts", "rows", "do_sample", "sample_position"),
    *("num_top_logits", "top_allowed", "mask_number", "history_lens", "history_prompt_lens"),
    *(each.name for each in SAMPLER_PARAMETERS),
)
_RESULTS = ("sampled_ids", "sampled_logit", "logsumexp")
_TOPS = ("top_ids", "top_logits")


@dataclass(frozen=True, slots=True)
class _Column:
    """One array of a slot as bytes. ``item`` is the size of an element in bytes.

    ``data`` is empty if the model's steps do not use the array.
    """

    data: memoryview
    item: int

    @classmethod
    def of(cls, slot: StepSlot, name: str) -> _Column:
        array = slot.arrays[name]
        return cls(array.data.cast("B"), array.itemsize)

    def first(self, count: int) -> memoryview:
        return self.data[: count * self.item]


@dataclass(frozen=True, slots=True)
class _Parts:
    """The used parts of some arrays of a slot. Parts without bytes are left out."""

    key: object
    """The sizes of the step, which determine the used parts."""
    views: list[memoryview]
    num_bytes: int

    @classmethod
    def of(cls, key: object, views: list[memoryview]) -> _Parts:
        used = [view for view in views if len(view)]
        return cls(key, used, sum(map(len, used)))


class SlotContents:
    """Reads and writes the contents of one slot.

    The next step in a slot often has the same sizes. So the parts of the arrays are kept until the sizes change.
    """

    def __init__(self, slot: StepSlot) -> None:
        self._slot = slot
        limits = slot.layout.limits
        self._mask_words = limits.mask_words
        self._pooled_width = limits.pooled_width
        self._max_draft_ids = limits.max_draft_ids
        names = (*_PER_TOKEN, *_PER_SEQUENCE, *_RESULTS, *_TOPS)
        names += ("block_tables", "history", "moves", "move_headers", "move_faults", "tiles", "masks", "pooled")
        names += ("draft_ids", "state_moves")
        self._columns = {name: _Column.of(slot, name) for name in names}
        self._header = slot.header.data.cast("B")
        item = slot.header.itemsize
        self._sizes = self._header[HEADER["num_tokens"] * item : (HEADER["num_state_moves"] + 1) * item]
        self._num_top_logits = slot.num_top_logits.data
        self._inputs = self._results = _Parts(None, [], 0)
        self._tokens = [column for name in _PER_TOKEN if len((column := self._columns[name]).data)]
        self._seqs = [column for name in _PER_SEQUENCE if len((column := self._columns[name]).data)]

    def inputs(self) -> bytes:
        """Returns the header and the inputs of the step that the server has written, without the masks."""
        return b"".join((self._header, *self._input_parts().views))

    def write_inputs(self, seq: int, contents: memoryview) -> None:
        """Writes the bytes that ``inputs`` returned on the other machine.

        Raises ProtocolError if the header is not of step ``seq``, if a size exceeds the limits, or if the number of
        bytes is wrong.
        """
        num_bytes = len(self._header)
        if len(contents) < num_bytes:
            raise ProtocolError(f"the contents of a slot have {len(contents)} bytes; the header alone has {num_bytes}")
        self._header[:] = contents[:num_bytes]
        self._slot.check_header(seq)
        _fill(self._input_parts(), contents[num_bytes:], f"the inputs of step {seq}")

    def masks(self) -> bytes:
        """Returns the masks of the step."""
        return bytes(self._mask_part())

    def write_masks(self, contents: memoryview) -> None:
        """Writes the bytes that ``masks`` returned on the other machine. Raises ProtocolError if bytes are missing or
        extra."""
        part = self._mask_part()
        _fill(_Parts(None, [part], len(part)), contents, f"the masks of step {self._slot.seq}")

    def results(self) -> bytes:
        """Returns the results of the completed step as bytes, which another machine passes to ``write_results``."""
        return b"".join(self._result_parts().views)

    def write_results(self, contents: memoryview) -> None:
        """Writes the bytes that ``results`` returned on the other machine.

        Raises ProtocolError if the number of bytes does not match the sizes in this slot's header and inputs. The
        server has written the header and the inputs itself, so the sizes can be trusted.
        """
        _fill(self._result_parts(), contents, f"the results of step {self._slot.seq}")

    def _input_parts(self) -> _Parts:
        key = self._sizes.tobytes()
        if self._inputs.key != key:
            self._inputs = _Parts.of(key, self._new_input_parts())
        return self._inputs

    def _result_parts(self) -> _Parts:
        has_tops = max(self._num_top_logits[: self._slot.num_seqs], default=0) > 0
        key = (self._sizes.tobytes(), has_tops)
        if self._results.key != key:
            self._results = _Parts.of(key, self._new_result_parts(has_tops=has_tops))
        return self._results

    def _new_input_parts(self) -> list[memoryview]:
        slot, columns = self._slot, self._columns
        num_tokens, num_seqs = slot.num_tokens, slot.num_seqs
        parts = [column.first(num_tokens) for column in self._tokens]
        parts += [column.first(num_seqs) for column in self._seqs]
        parts.append(columns["block_tables"].first(num_seqs * slot.table_width))
        parts.append(columns["history"].first(slot.history_len))
        parts.append(columns["moves"].first(slot.num_moves * MOVE_WIDTH))
        parts.append(columns["move_headers"].first(slot.num_moves * HEADER_WORDS))
        parts.append(columns["tiles"].first(slot.num_tiles * TILE_WIDTH))
        parts.append(columns["state_moves"].first(slot.num_state_moves * STATE_MOVE_WIDTH))
        return parts

    def _mask_part(self) -> memoryview:
        return self._columns["masks"].first(self._slot.num_masks * self._mask_words)

    def _new_result_parts(self, *, has_tops: bool) -> list[memoryview]:
        slot, columns = self._slot, self._columns
        num_seqs = slot.num_seqs
        parts = [columns[name].first(num_seqs) for name in _RESULTS]
        if has_tops:
            parts += [columns[name].first(num_seqs * MAX_TOP_LOGITS) for name in _TOPS]
        parts.append(columns["move_faults"].first(slot.num_moves))
        parts.append(columns["pooled"].first(num_seqs * self._pooled_width))
        if slot.num_wanted:
            parts.append(columns["draft_ids"].first(num_seqs * self._max_draft_ids))
        return parts


def _fill(parts: _Parts, contents: memoryview, what: str) -> None:
    """Copies ``contents`` into ``parts``, one after the other.

    Raises ProtocolError if the numbers of bytes differ. ``what`` describes the contents in the message.
    """
    if parts.num_bytes != len(contents):
        raise ProtocolError(f"{what} have {len(contents)} bytes; the header says {parts.num_bytes}")
    offset = 0
    for part in parts.views:
        end = offset + len(part)
        part[:] = contents[offset:end]
        offset = end
