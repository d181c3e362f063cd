"""Tests how an agent checks and copies a step slot.

The agent's check and a NumPy version of its rules must agree on valid and on nearly valid steps.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.kernels import StepArrays, StepBounds, StepBuffers, StepCopy
from agent.step_inputs import StepReader
from llm_serving.config import load_config
from llm_serving.errors import ProtocolError
from llm_serving.ipc.shm import LAST_TOKEN, NO_LOGSUMEXP, PADDING_SLOT, SlotLayout, StepSlot
from llm_serving.sampling_params import MAX_TOP_LOGITS

CONFIG = load_config("llama_tiny_cpu.yaml")
LAYOUT = SlotLayout.of(CONFIG.slot_limits())
NUM_ROWS = CONFIG.max_num_seqs
BLOCK_SIZE, NUM_BLOCKS = CONFIG.pa_config.block_size, CONFIG.pa_config.num_blocks
WIDTH = 4
FIELDS = (
    *("token_ids", "positions", "slot_mapping", "query_lens", "context_lens"),
    *("block_tables", "rows", "do_sample", "num_top_logits"),
)


def step_slot(lens: list[tuple[int, int]]) -> StepSlot:
    """Makes a step slot. Each pair is a sequence: (tokens in this step, tokens computed before)."""
    slot = StepSlot(LAYOUT, bytearray(LAYOUT.slot_bytes))
    queries = [query for query, _ in lens]
    seqs, tokens = len(lens), sum(queries)
    slot.query_lens[:seqs] = queries
    slot.context_lens[:seqs] = [query + before for query, before in lens]
    slot.positions[:tokens] = [before + i for query, before in lens for i in range(query)]
    slot.token_ids[:tokens] = np.arange(tokens) % 90
    slot.slot_mapping[:tokens] = np.arange(tokens) + BLOCK_SIZE
    slot.block_tables[: seqs * WIDTH] = 1
    slot.rows[:seqs] = range(seqs)
    slot.do_sample[:seqs] = [s % 2 for s in range(seqs)]
    slot.write_header(1, num_tokens=tokens, num_seqs=seqs, table_width=WIDTH, history_len=0)
    return slot


def allowed(slot: StepSlot, *, decode: bool, row_last_tokens: np.ndarray) -> bool:
    """Returns whether the step is valid. This NumPy version has the same rules as the agent's check."""
    tokens, seqs, width = slot.num_tokens, slot.num_seqs, slot.table_width
    queries, contexts = slot.query_lens[:seqs].astype(np.int64), slot.context_lens[:seqs].astype(np.int64)
    longest = min(CONFIG.max_model_len, width * BLOCK_SIZE)
    ranges = (
        (queries, 1, tokens),
        (contexts, 1, longest),
        (slot.token_ids[:tokens], LAST_TOKEN, CONFIG.shape.vocab_size - 1),
        (slot.positions[:tokens], 0, CONFIG.max_model_len - 1),
        (slot.slot_mapping[:tokens], PADDING_SLOT, NUM_BLOCKS * BLOCK_SIZE - 1),
        (slot.block_tables[: seqs * width], 0, NUM_BLOCKS - 1),
        (slot.rows[:seqs], 0, NUM_ROWS - 1),
        (slot.num_top_logits[:seqs], NO_LOGSUMEXP, MAX_TOP_LOGITS),
    )
    if any((values < low).any() or (values > most).any() for values, low, most in ranges):
        return False
    if queries.sum() != tokens or (contexts < queries).any() or (decode and tokens != seqs):
        return False
    if any(row_last_tokens[row] < 0 for row in asking_rows(slot)):
        return False
    return bool((slot.positions[np.cumsum(queries) - 1] + 1 == contexts).all())


def asking_rows(slot: StepSlot) -> list[int]:
    """Returns the batch rows whose input is the marker LAST_TOKEN, which stands for the row's last sampled token."""
    rows = np.repeat(slot.rows[: slot.num_seqs], slot.query_lens[: slot.num_seqs])
    return list(rows[slot.token_ids[: slot.num_tokens] == LAST_TOKEN].tolist())


_LENS = st.lists(st.tuples(st.integers(1, 5), st.sampled_from([0, 0, 1, 7, BLOCK_SIZE])), min_size=1, max_size=6)
_VALUES = st.one_of(
    st.integers(-3, 6),
    st.sampled_from([NUM_ROWS, NUM_BLOCKS, NUM_BLOCKS * BLOCK_SIZE, CONFIG.shape.vocab_size, CONFIG.max_model_len]),
    st.sampled_from([NUM_ROWS - 1, NUM_BLOCKS - 1, NUM_BLOCKS * BLOCK_SIZE - 1, CONFIG.shape.vocab_size - 1]),
    st.sampled_from([MAX_TOP_LOGITS, MAX_TOP_LOGITS + 1, WIDTH * BLOCK_SIZE, 2**31 - 1, -(2**31)]),
)


_ROW_LAST_TOKENS = st.lists(st.integers(-1, 9), min_size=NUM_ROWS, max_size=NUM_ROWS)
_CHANGES = st.lists(st.tuples(st.sampled_from(FIELDS), st.integers(0, 40), _VALUES), max_size=2)
_ASKING = st.lists(st.integers(0, 40), max_size=3)


@given(_LENS, st.booleans(), _ROW_LAST_TOKENS, _ASKING, _CHANGES)
def test_a_step_is_accepted_exactly_if_the_rules_allow_it(lens, decode, last_tokens, asking, changes):
    slot = step_slot([(1, before) for _, before in lens] if decode else lens)
    tokens, seqs = slot.num_tokens, slot.num_seqs
    for index in asking:
        slot.token_ids[index % tokens] = LAST_TOKEN
    for field, index, value in changes:
        values = getattr(slot, field)
        sizes = {"block_tables": seqs * WIDTH}
        per_token = field in ("token_ids", "positions", "slot_mapping")
        values[index % sizes.get(field, tokens if per_token else seqs)] = value
    row_last_tokens = np.array(last_tokens, np.int32)
    reader = StepReader(CONFIG, NUM_ROWS, row_last_tokens)
    if not allowed(slot, decode=decode, row_last_tokens=row_last_tokens):
        with pytest.raises(ProtocolError) as raised:
            reader.read(slot, is_decode=decode)
        # The error must name the value that was refused, not only the slot.
        assert "do not fit a slot" not in str(raised.value)
        return
    inputs = reader.read(slot, is_decode=decode)
    token_ids = slot.token_ids[:tokens].copy()
    token_ids[token_ids == LAST_TOKEN] = row_last_tokens[asking_rows(slot)]
    last = np.cumsum(slot.query_lens[:seqs]) - 1
    expected = {
        "token_ids": token_ids,
        "positions": slot.positions[:tokens].copy(),
        "slot_mapping": slot.slot_mapping[:tokens].copy(),
        "query_lens": slot.query_lens[:seqs].copy(),
        "context_lens": slot.context_lens[:seqs].copy(),
        "rows": slot.rows[:seqs].copy(),
        "block_tables": slot.block_tables[: seqs * WIDTH].reshape(seqs, WIDTH).copy(),
        "last_tokens": last,
        "sampled_tokens": np.where(slot.do_sample[:seqs] != 0, last, -1),
    }
    whole = not decode and bool((slot.query_lens == slot.context_lens)[:seqs].all())
    for field in FIELDS:
        getattr(slot, field)[:] = -9  # later changes of the slot do not change the copies
    assert {name: getattr(inputs, name).tolist() for name in expected} == {k: v.tolist() for k, v in expected.items()}
    assert reader.buffers.counts.tolist() == [tokens, seqs, WIDTH, 0]
    assert inputs.whole_prompts == whole


def test_without_a_row_table_last_tokens_stay_in_place():
    slot = step_slot([(2, 0)])
    slot.token_ids[1] = LAST_TOKEN
    assert StepReader(CONFIG, NUM_ROWS).read(slot, is_decode=False).token_ids.tolist() == [0, LAST_TOKEN]


def test_a_row_without_a_last_token_is_refused_by_name():
    slot, row_last_tokens = step_slot([(2, 0), (1, 4)]), np.full(NUM_ROWS, 7, np.int32)
    row_last_tokens[1] = -1
    slot.token_ids[1:3] = LAST_TOKEN
    with pytest.raises(ProtocolError, match="last token of row 1, which has not sampled one"):
        StepReader(CONFIG, NUM_ROWS, row_last_tokens).read(slot, is_decode=False)


def test_steps_of_equal_size_share_the_views():
    reader = StepReader(CONFIG, NUM_ROWS)
    first = reader.read(step_slot([(1, 0)]), is_decode=False)
    assert reader.read(step_slot([(1, 0)]), is_decode=False) is first
    second = reader.read(step_slot([(1, 3)]), is_decode=False)
    assert second.positions.tolist() == [3]
    assert not second.whole_prompts


def test_a_checked_sequence_keeps_its_rotary_position():
    """A row check computes one sequence of a decode step again."""
    model, shape = replace(CONFIG.model_config, op_table="native"), replace(CONFIG.shape, rotary_sections=(4, 6, 6))
    reader = StepReader(replace(CONFIG, model_config=model, shape=shape), NUM_ROWS)
    inputs = reader.read(step_slot([(1, 3), (1, 5)]), is_decode=True)
    inputs.rotary_positions[:] = [[3, 3, 3], [4, 1, 2]]
    assert reader.keep_only(1).graph_positions.tolist() == [[5], [4], [1], [2]]


def test_a_prefill_with_one_token_for_each_sequence_is_not_a_decode():
    slot = step_slot([(1, 0), (1, 0)])
    reader = StepReader(CONFIG, NUM_ROWS)
    assert reader.read(slot, is_decode=False).whole_prompts
    assert not reader.read(slot, is_decode=True).whole_prompts


def stepped(slot: StepSlot, size: int, buffers: StepBuffers, **changed: np.ndarray) -> StepCopy:
    arrays = {name: getattr(slot, name)[:size] for name in FIELDS} | changed
    return StepCopy(StepArrays(**arrays), buffers, StepBounds(-1, -1, -1, *[1000] * 4, num_rows=4, max_top_logits=32))


@pytest.mark.parametrize(("size", "buffers"), [(4, (9, 9, 9)), (9, (4, 4, 4))])
def test_sizes_beyond_the_arrays_are_refused_before_anything_is_read(size, buffers):
    copy = stepped(step_slot([(1, 0)]), size, StepBuffers(*buffers))
    assert copy.run(1, 1, 1, decode=True)
    for tokens, seqs, width in ((5, 1, 1), (1, 5, 1), (1, 1, 5), (-1, 1, 1), (1, -1, 1), (1, 1, -1)):
        assert not copy.run(tokens, seqs, width, decode=False)


def test_arrays_of_a_wrong_type_or_length_are_refused():
    slot = step_slot([(1, 0)])
    with pytest.raises(ValueError, match="rows is int64"):
        stepped(slot, 4, StepBuffers(4, 4, 4), rows=slot.rows.astype(np.int64))
    arrays = StepArrays(**{name: getattr(slot, name) for name in FIELDS})
    with pytest.raises(ValueError, match="row_last_tokens has 3 rows; it must have 4"):
        StepCopy(arrays, StepBuffers(4, 4, 4), StepBounds(-1, -1, -1, *[1000] * 4, 4, 32), np.zeros(3, np.int32))
