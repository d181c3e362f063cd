"""Tests that the contents of a slot arrive unchanged on another machine, and that damaged contents are refused."""

from __future__ import annotations

import random

import numpy as np
import pytest

from llm_serving.errors import ProtocolError
from llm_serving.ipc.shm import HEADER_WORDS, MOVE_WIDTH, STATE_MOVE_WIDTH, SlotLayout, SlotLimits, StepSlot
from llm_serving.ipc.slot_contents import SlotContents
from llm_serving.ipc.tiles import TILE_WIDTH
from llm_serving.sampling_params import MAX_TOP_LOGITS

LIMITS = SlotLimits(
    max_tokens=40, max_seqs=6, max_blocks_per_seq=5, max_context=80, mask_words=3, pooled_width=4, max_adapters=2,
    max_draft_ids=3, tile_rows=8, shifts_positions=True, hands_over=True, num_snapshots=4,
)  # fmt: skip
_RESULTS = {"sampled_ids", "sampled_logit", "logsumexp", "top_ids", "top_logits", "pooled", "draft_ids", "move_faults"}


def new_slot(rng: random.Random) -> StepSlot:
    """Returns a slot with random numbers in every array."""
    layout = SlotLayout.of(LIMITS)
    slot = StepSlot(layout, bytearray(layout.slot_bytes))
    for name, array in slot.arrays.items():
        if name != "header":
            array[:] = [rng.randrange(1, 1000) for _ in range(len(array))]
    return slot


def sizes(rng: random.Random) -> dict[str, int]:
    if rng.random() < 0.2:
        return {"num_tokens": 0, "num_seqs": 0, "table_width": 0, "history_len": 0, "num_moves": rng.randint(1, 11)}
    num_seqs = rng.randint(1, 6)
    return {
        "num_tokens": rng.randint(num_seqs, 40), "num_seqs": num_seqs, "table_width": rng.randint(1, 5),
        "history_len": rng.randint(0, 80), "num_moves": rng.randint(0, 11), "checked_row": rng.randint(0, num_seqs),
        "num_masks": rng.randint(0, num_seqs), "num_drafts": rng.randint(0, num_seqs - 1),
        "num_wanted": rng.randint(0, 3), "num_tiles": rng.randint(0, 17), "num_state_moves": rng.randint(0, 18),
    }  # fmt: skip


def used(slot: StepSlot) -> dict[str, int]:
    """Returns the number of used elements of each array, computed without the code under test."""
    tokens, seqs = slot.num_tokens, slot.num_seqs
    counts = dict.fromkeys(slot.arrays, seqs)
    counts |= {"header": 16, "token_ids": tokens, "positions": tokens, "slot_mapping": tokens,
               "position_shifts": tokens}
    counts |= {"block_tables": seqs * slot.table_width, "history": slot.history_len}
    counts |= {"tiles": slot.num_tiles * TILE_WIDTH, "state_moves": slot.num_state_moves * STATE_MOVE_WIDTH}
    counts |= {"move_headers": slot.num_moves * HEADER_WORDS, "move_faults": slot.num_moves}
    counts |= {"moves": slot.num_moves * MOVE_WIDTH, "masks": slot.num_masks * LIMITS.mask_words}
    tops = seqs * MAX_TOP_LOGITS if seqs and slot.num_top_logits[:seqs].max() > 0 else 0
    counts |= {"top_ids": tops, "top_logits": tops, "pooled": seqs * LIMITS.pooled_width}
    return counts | {"draft_ids": seqs * LIMITS.max_draft_ids if slot.num_wanted else 0}


@pytest.mark.parametrize("seed", range(40))
def test_what_is_used_arrives_and_nothing_else_changes(seed: int) -> None:
    rng = random.Random(seed)
    here, there = new_slot(rng), new_slot(rng)
    here.write_header(seed, **sizes(rng))
    if rng.random() < 0.5:
        here.num_top_logits[:] = -1
    check_step(seed, here, there, SlotContents(here), SlotContents(there))


@pytest.mark.parametrize("seed", range(4))
def test_the_next_step_in_a_slot_may_have_other_sizes(seed: int) -> None:
    """Often it has the same sizes. Whether log-probabilities are wanted can change although the sizes stay."""
    rng = random.Random(seed)
    here, there = new_slot(rng), new_slot(rng)
    near, far = SlotContents(here), SlotContents(there)
    chosen = sizes(rng)
    for number in range(20):
        for slot in (here, there):
            for name, array in slot.arrays.items():
                if name != "header":
                    array[:] = rng.randrange(1, 1000)
        if rng.random() < 0.5:
            chosen = sizes(rng)
        here.write_header(number, **chosen)
        here.num_top_logits[:] = rng.choice([-1, 0, 1])
        check_step(number, here, there, near, far)


def check_step(seq: int, here: StepSlot, there: StepSlot, near: SlotContents, far: SlotContents) -> None:
    """Sends a step from ``here`` to ``there`` and its results back, and checks all arrays of both slots."""
    before = {name: array.copy() for name, array in there.arrays.items()}
    far.write_inputs(seq, memoryview(near.inputs()))
    far.write_masks(memoryview(near.masks()))
    counts = used(here)
    for name, array in there.arrays.items():
        count = 0 if name in _RESULTS else counts[name]
        assert np.array_equal(array[:count], here.arrays[name][:count]), name
        assert np.array_equal(array[count:], before[name][count:]), name
    num_bytes = sum(count * here.arrays[name].itemsize for name, count in counts.items() if name not in _RESULTS)
    assert len(near.inputs()) + len(near.masks()) == num_bytes
    after = {name: array.copy() for name, array in here.arrays.items()}
    near.write_results(memoryview(far.results()))
    for name, array in here.arrays.items():
        count = counts[name] if name in _RESULTS else 0
        assert np.array_equal(array[:count], there.arrays[name][:count]), name
        assert np.array_equal(array[count:], after[name][count:]), name


def test_damaged_contents_are_refused() -> None:
    rng = random.Random(1)
    here, there = new_slot(rng), new_slot(rng)
    here.write_header(7, num_tokens=3, num_seqs=2, table_width=1, history_len=0, num_masks=1)
    contents, far = SlotContents(here).inputs(), SlotContents(there)
    far.write_inputs(7, memoryview(contents))
    for damaged in (b"", contents[:63], contents[:-1], contents + b"\x00"):
        with pytest.raises(ProtocolError, match="bytes"):
            far.write_inputs(7, memoryview(damaged))
    with pytest.raises(ProtocolError, match="holds step 7"):
        far.write_inputs(8, memoryview(contents))
    large = bytearray(contents)
    large[12:16] = (1 << 30).to_bytes(4, "little")
    with pytest.raises(ProtocolError, match="num_tokens is 1073741824; it must be between 1 and 40"):
        far.write_inputs(7, memoryview(large))
    far.write_inputs(7, memoryview(contents))
    with pytest.raises(ProtocolError, match="the masks of step 7 have 8 bytes; the header says 12"):
        far.write_masks(memoryview(bytes(8)))
    with pytest.raises(ProtocolError, match="the results of step 7"):
        far.write_results(memoryview(bytes(8)))


def test_every_array_of_a_slot_is_sent() -> None:
    slot = new_slot(random.Random(1))
    assert set(SlotContents(slot)._columns) | {"header"} == set(slot.arrays)
