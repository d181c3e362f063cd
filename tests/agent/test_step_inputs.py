"""What a step slot may say: one call tells, held against the same rules in NumPy over steps that are nearly right."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.kernels import StepArrays, StepBounds, StepCheck
from agent.step_inputs import StepReader
from llm_serving.config import load_config
from llm_serving.errors import ProtocolError
from llm_serving.ipc.shm import LAST_TOKEN, NO_LOGSUMEXP, PADDING_SLOT, SlotLayout, StepSlot
from llm_serving.request import MAX_TOP_LOGITS

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
    """A step of sequences of (tokens in this step, tokens before it)."""
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


def allowed(slot: StepSlot, *, decode: bool) -> bool:
    """The rules, written down once more."""
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
    return bool((slot.positions[np.cumsum(queries) - 1] + 1 == contexts).all())


_LENS = st.lists(st.tuples(st.integers(1, 5), st.sampled_from([0, 0, 1, 7, BLOCK_SIZE])), min_size=1, max_size=6)
_VALUES = st.one_of(
    st.integers(-3, 6),
    st.sampled_from([NUM_ROWS, NUM_BLOCKS, NUM_BLOCKS * BLOCK_SIZE, CONFIG.shape.vocab_size, CONFIG.max_model_len]),
    st.sampled_from([NUM_ROWS - 1, NUM_BLOCKS - 1, NUM_BLOCKS * BLOCK_SIZE - 1, CONFIG.shape.vocab_size - 1]),
    st.sampled_from([MAX_TOP_LOGITS, MAX_TOP_LOGITS + 1, WIDTH * BLOCK_SIZE, 2**31 - 1, -(2**31)]),
)


@given(_LENS, st.booleans(), st.lists(st.tuples(st.sampled_from(FIELDS), st.integers(0, 40), _VALUES), max_size=2))
def test_a_step_is_read_where_the_rules_allow_it(lens, decode, changes):
    slot = step_slot([(1, before) for _, before in lens] if decode else lens)
    for field, index, value in changes:
        values = getattr(slot, field)
        sizes = {"block_tables": slot.num_seqs * WIDTH}
        per_token = field in ("token_ids", "positions", "slot_mapping")
        values[index % sizes.get(field, slot.num_tokens if per_token else slot.num_seqs)] = value
    reader = StepReader(CONFIG, NUM_ROWS)
    if not allowed(slot, decode=decode):
        with pytest.raises(ProtocolError) as raised:
            reader.read(slot, decode=decode)
        assert "exceed its slot" not in str(raised.value)  # what was refused can be named
        return
    inputs, seqs = reader.read(slot, decode=decode), slot.num_seqs
    last = np.cumsum(slot.query_lens[:seqs]) - 1
    assert inputs.last_tokens.tolist() == last.tolist()
    assert inputs.sampled_tokens.tolist() == np.where(slot.do_sample[:seqs] != 0, last, -1).tolist()
    assert inputs.whole_prompts == (not decode and bool((slot.query_lens == slot.context_lens)[:seqs].all()))


def test_a_prefill_of_one_token_each_is_no_decode():
    slot = step_slot([(1, 0), (1, 0)])
    reader = StepReader(CONFIG, NUM_ROWS)
    assert reader.read(slot, decode=False).whole_prompts
    assert not reader.read(slot, decode=True).whole_prompts


def test_what_was_read_of_one_slot_outlives_another():
    reader = StepReader(CONFIG, NUM_ROWS)
    first, second = step_slot([(3, 0), (2, 0)]), step_slot([(5, 0), (1, 0)])
    inputs = reader.read(first, decode=False)
    reader.read(second, decode=False)
    assert inputs.last_tokens.tolist() == [2, 4]


def test_sizes_past_the_arrays_are_refused_before_anything_is_read():
    slot = step_slot([(1, 0)])
    arrays = StepArrays(**{name: getattr(slot, name)[:4] for name in FIELDS})
    check = StepCheck(arrays, StepBounds(-1, -1, -1, *[1000] * 5, 32))
    assert check.is_fine(1, 1, 1, decode=True)
    for tokens, seqs, width in ((5, 1, 1), (1, 5, 1), (1, 1, 5), (-1, 1, 1), (1, -1, 1), (1, 1, -1)):
        assert not check.is_fine(tokens, seqs, width, decode=False)


def test_arrays_of_another_type_are_refused():
    slot = step_slot([(1, 0)])
    wrong = {name: getattr(slot, name) for name in FIELDS} | {"rows": slot.rows.astype(np.int64)}
    with pytest.raises(ValueError, match="rows is int64"):
        StepCheck(StepArrays(**wrong), StepBounds(-1, -1, -1, *[1000] * 5, 32))
