"""Tests step slots: server and agent use one layout, and no segment of shared memory remains after the end."""

from pathlib import Path

import numpy as np
import pytest

from llm_serving.errors import ProtocolError
from llm_serving.ipc.segment import SHM_DIRECTORY
from llm_serving.ipc.shm import HEADER, SlotLayout, SlotLimits, SlotMemory, StepSlot
from llm_serving.sampling_params import SAMPLER_PARAMETERS
from support.executor_steps import shm_entries

LIMITS = SlotLimits(max_tokens=64, max_seqs=4, max_blocks_per_seq=8)


def test_fields_do_not_overlap_and_are_aligned():
    layout = SlotLayout.of(LIMITS)
    end = 0
    for field in layout.fields:
        assert layout.offsets[field.name] >= end
        assert layout.offsets[field.name] % 64 == 0
        end = layout.offsets[field.name] + field.capacity * np.dtype(field.dtype).itemsize
    assert end <= layout.slot_bytes


def test_every_field_has_an_attribute_in_the_slot_class():
    layout = SlotLayout.of(LIMITS)
    names = {field.name for field in layout.fields}
    assert names - {each.name for each in SAMPLER_PARAMETERS} == set(StepSlot.__annotations__)
    assert set(StepSlot(layout, bytearray(layout.slot_bytes)).arrays) == names


def test_both_ends_share_the_slots_and_no_segment_remains():
    before = shm_entries()
    created = SlotMemory.create(LIMITS, 3)
    attached = SlotMemory.attach(created.name, LIMITS, 3)
    created.unlink()
    assert shm_entries() == before
    for index, slot in enumerate(created.slots):
        slot.token_ids[:] = index + 1
        slot.write_header(seq=2**40 + index, num_tokens=3, num_seqs=2, table_width=1, history_len=0)
    for index, slot in enumerate(attached.slots):
        slot.check_header(2**40 + index)
        assert (slot.num_tokens, slot.num_seqs, slot.table_width, slot.history_len) == (3, 2, 1, 0)
        assert np.all(slot.token_ids == index + 1)
        slot.sampled_ids[:] = -index
    assert [int(slot.sampled_ids[0]) for slot in created.slots] == [0, -1, -2]
    created.close()


def test_a_slot_with_another_step_is_refused():
    memory = SlotMemory.create(LIMITS, 1)
    memory.slots[0].write_header(7, num_tokens=1, num_seqs=1, table_width=1, history_len=0)
    with pytest.raises(ProtocolError, match="announced as step 8 holds step 7"):
        memory.slots[0].check_header(8)
    memory.close()


@pytest.mark.parametrize(
    ("sizes", "phrase"),
    [
        ({"num_tokens": 65}, "num_tokens is 65; it must be between 1 and 64"),
        ({"num_tokens": 0}, "num_tokens is 0"),
        ({"num_seqs": 5}, "num_seqs is 5; it must be between 1 and 4"),
        ({"table_width": 9}, "table_width is 9; it must be between 1 and 8"),
        ({"history_len": 65}, "history_len is 65; it must be between 0 and 64"),
        ({"num_moves": 13}, "num_moves is 13; it must be between 0 and 12"),
        ({"num_moves": -1}, "num_moves is -1; it must be between 0 and 12"),
        ({"num_moves": 1, "num_tokens": 0}, "num_tokens is 0; it must be between 1 and 64"),
        ({"num_moves": 1, "num_seqs": 0}, "num_seqs is 0; it must be between 1 and 4"),
        ({"num_moves": 1, "num_tokens": 0, "num_seqs": 0}, "table_width is 1; it must be between 0 and 0"),
        (
            {"num_moves": 1, "num_tokens": 0, "num_seqs": 0, "table_width": 0, "history_len": 1},
            "history_len is 1; it must be between 0 and 0",
        ),
    ],
)
def test_sizes_are_checked_on_both_ends(sizes, phrase):
    good = {"num_tokens": 1, "num_seqs": 1, "table_width": 1, "history_len": 0}
    memory = SlotMemory.create(LIMITS, 1)
    slot = memory.slots[0]
    with pytest.raises(ProtocolError, match=phrase):
        slot.write_header(1, **{**good, **sizes})
    slot.write_header(1, **good)
    for name, value in sizes.items():
        slot.header[HEADER[name]] = value
    with pytest.raises(ProtocolError, match=phrase):
        slot.check_header(1)
    memory.close()


@pytest.mark.parametrize("num_moves", [1, 12])
def test_a_move_step_has_no_tokens(num_moves):
    memory = SlotMemory.create(LIMITS, 1)
    slot = memory.slots[0]
    slot.write_header(3, num_tokens=0, num_seqs=0, table_width=0, history_len=0, num_moves=num_moves)
    slot.check_header(3)
    assert (slot.num_tokens, slot.num_seqs, slot.num_moves) == (0, 0, num_moves)
    memory.close()


@pytest.mark.parametrize("name", ["../etc/passwd", "other-00", "llm-serving-../x", "llm-serving-"])
def test_attach_refuses_names_of_other_programs(name):
    with pytest.raises(ProtocolError, match="not a name of a step-slot segment"):
        SlotMemory.attach(name, LIMITS, 1)


def test_attach_refuses_another_size():
    memory = SlotMemory.create(LIMITS, 2)
    with pytest.raises(ProtocolError, match="bytes, the layout needs"):
        SlotMemory.attach(memory.name, LIMITS, 3)
    memory.close()
    assert not Path(SHM_DIRECTORY, memory.name).exists()
