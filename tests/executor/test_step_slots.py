"""Tests the inputs that the executor writes into a step slot, and the results that it reads from the slot."""

from dataclasses import replace

import numpy as np
import pytest

from llm_serving.errors import ProtocolError
from llm_serving.executor.step_slots import StepSlots
from llm_serving.ipc import messages
from llm_serving.ipc.messages import StepDone
from llm_serving.ipc.shm import HEADER, LAST_TOKEN, SlotLayout, SlotLimits, StepSlot
from llm_serving.request import Request
from llm_serving.sampling_params import SamplingParams
from llm_serving.scheduler.output import BlockMove, History, MoveKind, ScheduledStep, StepKind

LIMITS = SlotLimits(max_tokens=16, max_seqs=4, max_blocks_per_seq=6, max_context=24)


def new_slot():
    layout = SlotLayout.of(LIMITS)
    return StepSlot(layout, bytearray(layout.slot_bytes))


class SlotWriter:
    """Writes steps into the step slots that the test chooses."""

    def __init__(self):
        self._slots = []
        self._steps = StepSlots(LIMITS, 4, range(1), self._slots)

    def write(self, step, slot):
        if slot not in self._slots:
            self._slots.append(slot)
        self._steps.free_slots[:] = [self._slots.index(slot)]
        return self._steps.write(step)

    def read(self, slot, seq, **times):
        return self._steps.take(0, StepDone(seq=seq, slot=self._slots.index(slot), **times))


def request(name, **sampling):
    return Request(name, [1, 2, 3], SamplingParams(**sampling), 0.0)


def prefill(seq=0, table=(3, 5), extra=None):
    return ScheduledStep(
        seq,
        StepKind.PREFILL,
        requests=[request("a", temperature=0.5, top_k=3, seed=2**63 + 1), request("b", top_logits=2)],
        rows=[2, 0],
        token_ids=[10, 11, 12, 13, 14, 20, 21],
        query_lens=[5, 2],
        starts=[0, 0],
        block_tables=[list(table), [7]],
        do_sample=[True, False],
        sample_positions=[4, 0],
        histories=extra or [],
        restarts=[True, True],
    )


def test_a_ragged_prefill_entry_by_entry():
    slot = new_slot()
    SlotWriter().write(prefill(), slot)
    slot.check_header(0)
    assert (slot.num_tokens, slot.num_seqs, slot.table_width, slot.history_len) == (7, 2, 2, 0)
    assert slot.token_ids[:7].tolist() == [10, 11, 12, 13, 14, 20, 21]
    assert slot.positions[:7].tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert slot.slot_mapping[:7].tolist() == [12, 13, 14, 15, 20, 28, 29]
    assert slot.query_lens[:2].tolist() == [5, 2]
    assert slot.context_lens[:2].tolist() == [5, 2]
    assert slot.block_tables[:4].tolist() == [3, 5, 7, 0]
    assert slot.rows[:2].tolist() == [2, 0]
    assert slot.do_sample[:2].tolist() == [1, 0]
    assert slot.sample_position[:2].tolist() == [4, 0]
    assert slot.temperature[:2].tolist() == [0.5, 1.0]
    assert slot.top_k[:2].tolist() == [3, 0]
    assert slot.seed[:2].tolist() == [2**63 + 1, 0]
    assert slot.num_top_logits[:2].tolist() == [-1, 2]


def test_a_decode_uses_a_grown_block_table_and_a_reused_row_restarts():
    writer, slot = SlotWriter(), new_slot()
    first = prefill()
    writer.write(first, slot)
    table = first.block_tables[0]
    table.append(9)
    decode = ScheduledStep(
        1,
        StepKind.DECODE,
        requests=first.requests[:1],
        rows=[2],
        token_ids=[LAST_TOKEN],
        query_lens=[1],
        starts=[8],
        block_tables=[table],
        do_sample=[True],
        sample_positions=[5],
    )
    writer.write(decode, slot)
    assert slot.block_tables[:3].tolist() == [3, 5, 9]
    assert (slot.positions[0], slot.slot_mapping[0], slot.context_lens[0]) == (8, 36, 9)
    writer.write(prefill(seq=2, table=(1, 2)), slot)
    assert slot.block_tables[:4].tolist() == [1, 2, 7, 0]


def test_a_chunk_starts_where_the_cache_ends():
    slot = new_slot()
    step = prefill(table=(3, 5, 8))
    step.starts[0] = 6
    SlotWriter().write(step, slot)
    assert slot.positions[:5].tolist() == [6, 7, 8, 9, 10]
    assert slot.slot_mapping[:5].tolist() == [22, 23, 32, 33, 34]
    assert slot.context_lens[:2].tolist() == [11, 2]


def test_histories_are_packed_in_order():
    slot = new_slot()
    SlotWriter().write(prefill(extra=[History(1, [4, 5, 6], 2)]), slot)
    assert slot.history_lens[:2].tolist() == [0, 3]
    assert slot.history_prompt_lens[1] == 2
    assert slot.history[:3].tolist() == [4, 5, 6]
    assert slot.history_len == 3


def test_a_slot_used_again_holds_no_older_history():
    slot, writer = new_slot(), SlotWriter()
    writer.write(prefill(extra=[History(1, [4, 5, 6], 2)]), slot)
    writer.write(prefill(seq=1), slot)
    assert slot.history_len == 0
    assert slot.history_lens[:2].tolist() == [0, 0]
    assert slot.history_prompt_lens[:2].tolist() == [0, 0]


def test_a_step_larger_than_a_slot_is_refused():
    step = prefill()
    step.token_ids = list(range(17))
    with pytest.raises(ProtocolError, match="has 2 sequences, 17 tokens and 0 moves; a slot holds 4, 16 and 10"):
        SlotWriter().write(step, new_slot())


def test_a_result_is_copied_out():
    writer, slot = SlotWriter(), new_slot()
    writer.write(prefill(), slot)
    slot.sampled_ids[:2] = [42, -1]
    slot.sampled_logit[:2] = [1.5, 0.0]
    slot.logsumexp[:2] = [2.5, 0.0]
    slot.top_ids[32:34] = [8, 9]
    slot.top_logits[32:34] = [0.5, 0.25]
    result = writer.read(slot, 0, queue_us=1, graph_us=2, sample_us=3)
    slot.sampled_ids[:] = 0
    assert result.sampled_ids == [42, -1]
    assert result.logits == [1.5, 0.0]
    assert result.logsumexps == [2.5, 0.0]
    assert result.tops == [(), ((8, 0.5), (9, 0.25))]
    assert (result.queue_us, result.graph_us, result.sample_us) == (1, 2, 3)
    assert np.all(slot.sampled_ids == 0)


def decode_of(first, seq, starts, tables, rows=(2, 0), **extra):
    requests = first.requests[: len(rows)]
    return ScheduledStep(
        seq,
        StepKind.DECODE,
        requests=list(requests),
        rows=list(rows),
        token_ids=[LAST_TOKEN] * len(rows),
        query_lens=[1] * len(rows),
        starts=list(starts),
        block_tables=tables,
        do_sample=[True] * len(rows),
        sample_positions=[5] * len(rows),
        **extra,
    )


def columns(slot):
    """Returns by name the inputs of the step in a step slot."""
    seqs, width = slot.num_seqs, slot.table_width
    names = ("query_lens", "context_lens", "rows", "do_sample", "temperature", "top_k", "seed", "num_top_logits")
    inputs = {name: getattr(slot, name)[:seqs].tolist() for name in names}
    inputs["history_lens"] = slot.history_lens[:seqs].tolist()
    inputs["sample_position"] = slot.sample_position[:seqs].tolist()
    inputs["tokens"] = slot.token_ids[: slot.num_tokens].tolist()
    inputs["positions"] = slot.positions[: slot.num_tokens].tolist()
    inputs["slot_mapping"] = slot.slot_mapping[: slot.num_tokens].tolist()
    inputs["tables"] = slot.block_tables[: seqs * width].tolist()
    return inputs


def test_a_writer_with_history_writes_the_same_as_a_new_writer():
    """A writer that has written other steps writes the same slot as a new writer.

    The steps alternate between slots. Their block tables grow, the batch changes and returns, and one step is a
    prefill.
    """
    first = prefill(table=(3, 5), extra=[History(0, [1, 2, 3], 3)])
    tables = [[3, 5], [7]]
    writer, slots = SlotWriter(), [new_slot() for _ in range(3)]
    writer.write(first, slots[0])
    steps = []
    for number in range(1, 12):
        position = number + 4
        if position // 4 + 1 > len(tables[0]):
            tables[0].append(10 + number)
        if (number + 1) // 4 + 1 > len(tables[1]):
            tables[1].append(30 + number)
        starts = (position, number + 1)
        rows = (2,) if number == 6 else (2, 0)
        steps.append((decode_of(first, number, starts[: len(rows)], tables[: len(rows)], rows), number % 3))
        step, index = steps[-1]
        if number == 8:
            writer.write(prefill(100, table=(3, 5)), slots[2])
        writer.write(step, slots[index])
        fresh, expected = SlotWriter(), new_slot()
        fresh.write(step, expected)
        assert columns(slots[index]) == columns(expected), number


def moves_of(slot):
    return slot.moves[: 3 * slot.num_moves].reshape(-1, 3).tolist()


MOVES = [BlockMove(MoveKind.SWAP_OUT, 5, 0), BlockMove(MoveKind.COPY, 3, 9), BlockMove(MoveKind.SWAP_IN, 7, 5)]


def test_a_step_of_moves_writes_header_and_moves_alone():
    writer, slot = SlotWriter(), new_slot()
    fields = [field.name for field in slot.layout.fields]
    before = {name: getattr(slot, name).copy() for name in fields}
    writer.write(ScheduledStep(6, StepKind.MOVE, moves=MOVES), slot)
    slot.check_header(6)
    assert (slot.num_tokens, slot.num_seqs, slot.table_width, slot.history_len, slot.num_moves) == (0, 0, 0, 0, 3)
    assert moves_of(slot) == [[1, 5, 0], [0, 3, 9], [2, 7, 5]]
    assert [name for name in fields if not np.array_equal(getattr(slot, name), before[name])] == ["header", "moves"]
    assert writer.read(slot, 6).sampled_ids == []


@pytest.mark.parametrize("kind", [StepKind.PREFILL, StepKind.MIXED, StepKind.DECODE])
def test_any_step_carries_moves_and_the_next_in_its_slot_none_of_them(kind):
    slot, writer, first = new_slot(), SlotWriter(), prefill()
    make = {StepKind.DECODE: lambda seq: decode_of(first, seq, (5, 2), first.block_tables)}.get(kind, prefill)
    step = make(1)
    step.kind, step.moves = kind, MOVES[1:2]
    writer.write(step, slot)
    assert moves_of(slot) == [[0, 3, 9]]
    assert slot.num_seqs == 2
    writer.write(make(2), slot)
    assert moves_of(slot) == []


def test_more_moves_than_a_slot_holds_are_refused():
    step = ScheduledStep(0, StepKind.MOVE, moves=MOVES[:1] * 11)
    with pytest.raises(ProtocolError, match="has 0 sequences, 0 tokens and 11 moves; a slot holds 4, 16 and 10"):
        SlotWriter().write(step, new_slot())


def test_a_prompt_and_a_decoding_row_in_one_step():
    writer, slot, first = SlotWriter(), new_slot(), prefill(table=(3, 5))
    writer.write(first, slot)
    step = prefill(1, table=(3, 5))
    step.kind, step.restarts, step.requests = StepKind.MIXED, [False, True], first.requests
    step.token_ids, step.query_lens, step.starts = [LAST_TOKEN, 20, 21], [1, 2], [5, 0]
    writer.write(step, slot)
    assert slot.token_ids[:3].tolist() == [LAST_TOKEN, 20, 21]
    assert slot.positions[:3].tolist() == [5, 0, 1]
    assert slot.slot_mapping[:3].tolist() == [21, 28, 29]
    assert slot.context_lens[:2].tolist() == [6, 2]
    assert slot.block_tables[:4].tolist() == [3, 5, 7, 0]


@pytest.mark.parametrize("kind", [StepKind.PREFILL, StepKind.DECODE])
def test_a_row_restarts_after_position_0_with_a_table_of_its_own(kind):
    """The request keeps its batch row, but gets new blocks.

    Only the restart flag shows that its block table is different.
    """
    writer, slot, first = SlotWriter(), new_slot(), prefill(table=(3, 5))
    writer.write(first, slot)
    writer.write(decode_of(first, 1, (5, 2), [[3, 5], [7]]), slot)
    tables = [[8, 9, 4], [7]]
    restart = decode_of(first, 2, (9, 3), tables, restarts=[True, False], histories=[History(0, [4, 6], 1)])
    restart.kind, restart.token_ids = kind, [44, LAST_TOKEN]
    writer.write(restart, slot)
    assert slot.block_tables[:6].tolist() == [8, 9, 4, 7, 0, 0]
    assert slot.slot_mapping[:2].tolist() == [17, 31]
    assert (slot.history_lens[:2].tolist(), slot.history[:2].tolist()) == ([2, 0], [4, 6])
    tables[0].append(2)
    writer.write(decode_of(first, 3, (12, 4), [tables[0], [7, 1]]), slot)
    assert slot.block_tables[:8].tolist() == [8, 9, 4, 2, 7, 1, 0, 0]
    assert (slot.history_len, slot.history_lens[:2].tolist()) == (0, [0, 0])


def test_without_a_restart_a_start_at_0_is_no_new_table():
    """A prefill from position 0 without the restart flag keeps the old block table.

    The scheduler never sends this step.
    """
    writer, slot, first = SlotWriter(), new_slot(), prefill(table=(3, 5))
    writer.write(first, slot)
    again = prefill(1, table=(1, 2))
    again.requests, again.restarts = first.requests, []
    writer.write(again, slot)
    assert slot.block_tables[:2].tolist() == [3, 5]


def test_each_kind_of_step_has_its_message():
    first, slot = prefill(), new_slot()
    steps = {kind: prefill(4) for kind in (StepKind.PREFILL, StepKind.MIXED)}
    steps[StepKind.DECODE] = decode_of(first, 4, (5, 2), first.block_tables)
    steps[StepKind.MOVE] = ScheduledStep(4, StepKind.MOVE, moves=MOVES)
    for kind, step in steps.items():
        step.kind = kind
    assert {kind: SlotWriter().write(step, slot) for kind, step in steps.items()} == {
        StepKind.PREFILL: messages.Prefill(seq=4, slot=0),
        StepKind.MIXED: messages.Prefill(seq=4, slot=0),
        StepKind.DECODE: messages.Decode(seq=4, slot=0),
        StepKind.MOVE: messages.Move(seq=4, slot=0),
    }


def test_the_message_of_a_step_that_overtakes_says_so():
    step = prefill(4)
    step.overtakes = True
    assert SlotWriter().write(step, new_slot()) == messages.Prefill(seq=4, slot=0, overtakes=True)


def test_every_third_decode_step_checks_the_next_sequence():
    slot = new_slot()
    steps = StepSlots(LIMITS, 4, range(1), [slot], check_interval=3)
    first = prefill()
    checked = []
    for seq in range(13):
        step = first if seq == 0 else decode_of(first, seq, [5, 2], [[3, 5], [7]])
        steps.write(step)
        checked.append(slot.checked_row)
        slot.check_header(seq)
        assert steps.take(0, StepDone(seq=seq, slot=0)).checked_row is (checked[-1] > 0)
    assert checked == [0, 0, 0, 2, 0, 0, 1, 0, 0, 2, 0, 0, 1]
    slot.header[HEADER["checked_row"]] = 3
    with pytest.raises(ProtocolError, match="checked_row is 3; it must be between 0 and 2"):
        slot.check_header(12)


@pytest.mark.parametrize("has_states", [False, True])
def test_a_model_with_states_checks_no_step_with_drafts(has_states):
    slot = new_slot()
    steps = StepSlots(replace(LIMITS, has_states=has_states), 4, range(1), [slot], check_interval=2)
    first, checked = prefill(), []
    for seq in range(7):
        step = first if seq == 0 else decode_of(first, seq, [5, 2], [[3, 5], [7]])
        step.num_drafts = seq % 2
        steps.write(step)
        checked.append(slot.checked_row)
        steps.take(0, StepDone(seq=seq, slot=0))
    assert checked == ([0, 0, 0, 0, 2, 0, 0] if has_states else [0, 0, 2, 0, 1, 0, 2])


class AnyToken:
    """A constraint that allows every token."""

    num_words = 2

    def advance(self, token_id):
        pass

    def mask(self):
        return np.full(2, 0xFFFFFFFF, np.uint32)


def test_masks_are_written_after_the_step():
    limits = SlotLimits(max_tokens=16, max_seqs=4, max_blocks_per_seq=6, max_context=24, mask_words=2)
    layout = SlotLayout.of(limits)
    slot = StepSlot(layout, bytearray(layout.slot_bytes))
    slots = StepSlots(limits, 4, range(1), [slot])
    requests = [request("a"), request("b"), request("c")]
    requests[0].constraint = requests[2].constraint = AnyToken()
    step = ScheduledStep(
        7, StepKind.DECODE, requests=requests, rows=[2, 0, 1], token_ids=[LAST_TOKEN] * 3, query_lens=[1] * 3,
        starts=[3] * 3, block_tables=[[1], [2], [3]], do_sample=[True] * 3, sample_positions=[1] * 3,
    )  # fmt: skip
    slots.write(step)
    assert (slot.num_masks, slot.mask_number[:3].tolist()) == (2, [1, 0, 2])
    with pytest.raises(ProtocolError, match="2 sequences with masks, and 1 masks"):
        slots.write_masks(7, [np.zeros(2, np.uint32)])
    assert slots.write_masks(7, [np.array([1, 2], np.uint32), np.array([3, 4], np.uint32)]) == [
        messages.Masks(7, 0)
    ]
    assert slot.masks[:4].tolist() == [1, 2, 3, 4]
    slots.take(0, StepDone(seq=7, slot=0))
    assert slots.write_masks(7, []) == []
    step.seq, step.requests = 8, [request("d"), request("e"), request("f")]
    slots.write(step)
    assert (slot.num_masks, slot.mask_number[:3].tolist()) == (0, [0, 0, 0])


def test_a_bias_is_sent_once_for_each_start_of_its_sequence_on_a_row():
    limits = SlotLimits(max_tokens=16, max_seqs=4, max_blocks_per_seq=6, max_context=24, mask_words=2)
    layout = SlotLayout.of(limits)
    slot = StepSlot(layout, bytearray(layout.slot_bytes))
    slots = StepSlots(limits, 4, range(1), [slot])
    mask = np.full(2, 0xFFFFFFFF, np.uint32)

    def sent(seq, one, *, restart):
        one.constraint = AnyToken()
        step = ScheduledStep(
            seq, StepKind.PREFILL if restart else StepKind.DECODE, requests=[one], rows=[2], token_ids=[LAST_TOKEN],
            query_lens=[1], starts=[3], block_tables=[[1]], do_sample=[True], sample_positions=[1], restarts=[restart],
        )  # fmt: skip
        slots.write(step)
        announced = slots.write_masks(seq, [mask])
        slots.take(0, StepDone(seq=seq, slot=0))
        return announced

    biased, plain = request("a", logit_bias=((3, -1.5), (9, 100.0))), request("b")
    ids, values = np.array([3, 9], np.int32).tobytes(), np.array([-1.5, 100], np.float32).tobytes()
    assert sent(1, biased, restart=True) == [
        messages.Bias(1, 2, ids, values), messages.Masks(1, 0, (2,)),
    ]  # fmt: skip
    assert sent(2, biased, restart=False) == [messages.Masks(2, 0, (2,))]
    assert sent(3, biased, restart=True) == [messages.Bias(3, 2, ids, values), messages.Masks(3, 0, (2,))]
    assert sent(4, plain, restart=True) == [messages.Masks(4, 0)]


def test_a_chunk_without_a_sampled_token_has_no_mask():
    step = prefill()
    for each in step.requests:
        each.constraint = AnyToken()
    step.do_sample = [False, True]
    assert step.constrained == [1]
