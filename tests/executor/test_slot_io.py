"""What the executor writes into a slot, entry by entry, and what it reads out of it."""

import numpy as np
import pytest

from llm_serving.errors import ProtocolError
from llm_serving.executor.slot_io import SlotWriter, read_result
from llm_serving.ipc.shm import LAST_TOKEN, SlotLayout, SlotLimits, StepSlot
from llm_serving.request import Request, SamplingParams
from llm_serving.scheduler.output import History, ScheduledStep, StepKind

LIMITS = SlotLimits(max_tokens=16, max_seqs=4, max_blocks_per_seq=6, max_context=24)


def new_slot():
    layout = SlotLayout.of(LIMITS)
    return StepSlot(layout, bytearray(layout.slot_bytes))


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
    )


def test_a_ragged_prefill_entry_by_entry():
    slot = new_slot()
    SlotWriter(LIMITS, 4, 4).write(prefill(), slot)
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


def test_decode_follows_a_growing_table_and_a_row_taken_over_starts_anew():
    writer, slot = SlotWriter(LIMITS, 4, 4), new_slot()
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
    SlotWriter(LIMITS, 4, 4).write(step, slot)
    assert slot.positions[:5].tolist() == [6, 7, 8, 9, 10]
    assert slot.slot_mapping[:5].tolist() == [22, 23, 32, 33, 34]
    assert slot.context_lens[:2].tolist() == [11, 2]


def test_histories_are_packed_in_order():
    slot = new_slot()
    SlotWriter(LIMITS, 4, 4).write(prefill(extra=[History(1, [4, 5, 6], 2)]), slot)
    assert slot.history_lens[:2].tolist() == [0, 3]
    assert slot.history_prompt_lens[1] == 2
    assert slot.history[:3].tolist() == [4, 5, 6]
    assert slot.history_len == 3


def test_a_slot_used_again_holds_no_older_history():
    slot, writer = new_slot(), SlotWriter(LIMITS, 4, 4)
    writer.write(prefill(extra=[History(1, [4, 5, 6], 2)]), slot)
    writer.write(prefill(seq=1), slot)
    assert slot.history_len == 0
    assert slot.history_lens[:2].tolist() == [0, 0]
    assert slot.history_prompt_lens[:2].tolist() == [0, 0]


def test_a_step_larger_than_a_slot_is_refused():
    step = prefill()
    step.token_ids = list(range(17))
    with pytest.raises(ProtocolError, match="has 2 sequences and 17 tokens; a slot holds 4 and 16"):
        SlotWriter(LIMITS, 4, 4).write(step, new_slot())


def test_a_result_is_copied_out():
    slot = new_slot()
    SlotWriter(LIMITS, 4, 4).write(prefill(), slot)
    slot.sampled_ids[:2] = [42, -1]
    slot.sampled_logit[:2] = [1.5, 0.0]
    slot.logsumexp[:2] = [2.5, 0.0]
    slot.top_ids[32:34] = [8, 9]
    slot.top_logits[32:34] = [0.5, 0.25]
    result = read_result(slot, 0, (1, 2, 3))
    slot.sampled_ids[:] = 0
    assert result.sampled_ids == [42, -1]
    assert result.logits == [1.5, 0.0]
    assert result.logsumexps == [2.5, 0.0]
    assert result.tops == [(), ((8, 0.5), (9, 0.25))]
    assert (result.queue_us, result.graph_us, result.sample_us) == (1, 2, 3)
    assert np.all(slot.sampled_ids == 0)


def decode_of(first, seq, starts, tables, rows=(2, 0)):
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
    )


def columns(slot):
    """All inputs of a slot's step."""
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


def test_a_writer_that_knows_the_batch_writes_what_a_new_one_would():
    """Slots taken in turn, tables that grow, a batch that changes and comes back, a prefill in between."""
    first = prefill(table=(3, 5), extra=[History(0, [1, 2, 3], 3)])
    tables = [[3, 5], [7]]
    writer, slots = SlotWriter(LIMITS, 4, 4), [new_slot() for _ in range(3)]
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
        fresh, expected = SlotWriter(LIMITS, 4, 4), new_slot()
        fresh.write(step, expected)
        assert columns(slots[index]) == columns(expected), number
