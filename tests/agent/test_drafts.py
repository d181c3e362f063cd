"""Tests the sampler with drafts. It samples each entry as without drafts, and rejects the entries after a wrong draft.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agent.sampler import Sampler
from agent.scores import StepLogits
from llm_serving.errors import ProtocolError
from llm_serving.ipc.drafts import REJECTED, rejected_entries
from llm_serving.ipc.shm import NOT_FINITE, SlotLayout, SlotLimits, StepSlot
from llm_serving.sampling_params import SAMPLER_PARAMETERS

VOCAB = 40
LAYOUT = SlotLayout.of(SlotLimits(max_tokens=16, max_seqs=8, max_blocks_per_seq=2, max_context=30))
ROW, PROMPT = 3, [5, 6, 5, 7]


def logits_after(tokens: list[int]) -> np.ndarray:
    """Returns the logits of a model whose next token depends on its last two tokens."""
    rng = np.random.default_rng(tokens[-1] * VOCAB + tokens[-2])
    return rng.normal(0, 2, VOCAB).astype(np.float32)


def run(sampler: Sampler, output: list[int], draft: list[int], **sampling: Any) -> StepSlot:
    """Runs a step that verifies ``draft`` after the prompt and ``output``. The first step brings the history."""
    slot = StepSlot(LAYOUT, bytearray(LAYOUT.slot_bytes))
    seqs = 1 + len(draft)
    known = PROMPT + output
    slot.rows[:seqs] = ROW
    slot.token_ids[:seqs] = [known[-1], *draft]
    slot.do_sample[:seqs] = 1
    slot.sample_position[:seqs] = np.arange(len(output), len(output) + seqs)
    slot.num_top_logits[:seqs] = 2
    for each in SAMPLER_PARAMETERS:
        slot.arrays[each.name][:seqs] = sampling.get(each.name, each.default)
    history = known if not output else []
    slot.history_lens[0], slot.history_prompt_lens[0] = len(history), len(history)
    slot.history[: len(history)] = history
    slot.write_header(1, num_tokens=seqs, num_seqs=seqs, table_width=1, history_len=len(history), num_drafts=len(draft))
    sampler.rows.start_rows(slot)
    logits = np.stack([logits_after(known + draft[:count]) for count in range(seqs)])
    sampler.sample(StepLogits(logits, None), slot)
    return slot


def generate(sizes: list[int], errors: list[int], length: int, **sampling: Any) -> tuple[list[int], list[bytes]]:
    """Generates tokens. The steps have numbers of drafts from ``sizes``, repeated in order. ``errors`` are the places
    of wrong drafts.

    Returns the tokens, and the bits of their log-probabilities. The right drafts come from a run without drafts.
    """
    truth = [] if sizes == [0] else generate([0], [], length + 8, **sampling)[0]
    sampler = Sampler(num_rows=8, max_model_len=29, vocab_size=VOCAB)
    output: list[int] = []
    bits: list[bytes] = []
    step = 0
    while len(output) < length:
        draft = truth[len(output) : len(output) + sizes[step % len(sizes)]]
        place = errors[step % len(errors)] if errors else len(draft)
        if place < len(draft):
            draft[place] = (draft[place] + 1) % VOCAB
        slot = run(sampler, output, draft, **sampling)
        for index in range(1 + len(draft)):
            if slot.sampled_ids[index] != REJECTED:
                output.append(int(slot.sampled_ids[index]))
                tops = slot.top_ids[32 * index : 32 * index + 2], slot.top_logits[32 * index : 32 * index + 2]
                values = (slot.sampled_logit[index], slot.logsumexp[index], *tops)
                bits.append(b"".join(value.tobytes() for value in values))
        assert sampler.rows.last_token[ROW] == output[-1]
        step += 1
    return output[:length], bits[:length]


SAMPLINGS = [
    {},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.0, "seed": 9, "top_k": 5, "top_p": 0.8},
    {"temperature": 0.9, "seed": 3, "repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.6},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("errors", [[], [0], [1], [2, 9, 0]], ids=str)
def test_tokens_and_log_probabilities_are_those_without_drafts(sampling: dict[str, Any], errors: list[int]) -> None:
    sampling = {"temperature": 0.0, **sampling}
    plain = generate([0], [], 15, **sampling)
    assert generate([3, 1, 0, 4], errors, 15, **sampling) == plain


def test_a_sequence_whose_logits_are_not_finite_ends_its_drafts() -> None:
    assert rejected_entries([4, 4, 4, 2, 2], [9, 8, 7, 6, 5], [8, NOT_FINITE, 1, 5, 3]) == [2]


def test_entries_after_the_first_wrong_draft_are_rejected() -> None:
    assert rejected_entries([1, 1, 1, 1], [9, 8, 7, 6], [8, 5, 6, 4]) == [2, 3]
    assert rejected_entries([1, 2, 2, 1], [9, 9, 9, 9], [0, 9, 0, 0]) == []


@pytest.mark.parametrize("number", [1, 3])
def test_a_wrong_number_of_drafts_is_refused(number: int) -> None:
    sampler = Sampler(num_rows=8, max_model_len=29, vocab_size=VOCAB)
    slot = StepSlot(LAYOUT, bytearray(LAYOUT.slot_bytes))
    slot.rows[:4], slot.do_sample[:4] = [1, 1, 1, 2], 1
    slot.write_header(1, num_tokens=4, num_seqs=4, table_width=1, history_len=0, num_drafts=number)
    with pytest.raises(ProtocolError, match="2 drafts in 4 entries"):
        sampler.sample(StepLogits(np.zeros((4, VOCAB), np.float32), None), slot)
