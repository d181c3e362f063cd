"""Tests the predicted time of the steps in flight, and which other work of the agents turns the prediction off."""

from __future__ import annotations

import pytest

from llm_serving.executor import vitals
from llm_serving.executor.step_forecast import LEARN_EVERY, LEARNT_AT_FIRST, OtherWork, StepForecast
from llm_serving.ipc import messages
from llm_serving.ipc.shm import SlotLayout, SlotLimits, StepSlot

LIMITS = SlotLimits(max_tokens=4096, max_seqs=32, max_blocks_per_seq=64, max_context=8192, max_draft_ids=4)
CHUNK = 2048
BASE_US, SEQUENCE_US, CONTEXT_US, PROMPT_US = 4000, 200, 0.1, 50


def slot_of(
    decoding: list[int], prompt_tokens: int = 0, start: int = 0, num_moves: int = 0, num_wanted: int = 0
) -> StepSlot:
    """Returns a slot with a sequence for each context length in ``decoding``, and a prompt chunk from ``start``."""
    layout = SlotLayout.of(LIMITS)
    slot = StepSlot(layout, bytearray(layout.slot_bytes))
    pairs = [(1, context + 1) for context in decoding]
    if prompt_tokens:
        pairs.append((prompt_tokens, start + prompt_tokens))
    for index, (length, end) in enumerate(pairs):
        slot.query_lens[index], slot.context_lens[index] = length, end
    num_tokens = sum(length for length, _ in pairs)
    sizes = {"num_tokens": num_tokens, "num_moves": num_moves, "num_wanted": num_wanted}
    slot.write_header(0, num_seqs=len(pairs), table_width=1, history_len=0, **sizes)
    return slot


def microseconds(decoding: list[int], prompt_tokens: int = 0) -> int:
    return round(BASE_US + SEQUENCE_US * len(decoding) + CONTEXT_US * sum(decoding) + PROMPT_US * prompt_tokens)


def done(graph_us: int, *, aborted: bool = False) -> messages.StepDone:
    return messages.StepDone(seq=0, slot=0, graph_us=graph_us, aborted=aborted)


@pytest.fixture
def forecast() -> StepForecast:
    forecast = StepForecast()
    for number in range(LEARNT_AT_FIRST):
        decoding, prompt = [number * 10] * (1 + number % 8), 256 * (number % 3)
        forecast.learn(slot_of(decoding, prompt), done(microseconds(decoding, prompt)))
    return forecast


def test_a_familiar_step_is_predicted_from_its_slot(forecast: StepForecast) -> None:
    small, large = ([100] * 4, 0), ([500] * 6, 384)
    seconds = forecast.seconds([slot_of(*small), slot_of(*large)])
    assert seconds == pytest.approx(microseconds(*large) / 1e6, rel=0.1), "the longest step in flight counts"
    assert forecast.seconds([slot_of(*small)]) == pytest.approx(microseconds(*small) / 1e6, rel=0.1)


def test_nothing_is_predicted_before_the_first_results() -> None:
    assert StepForecast().seconds([slot_of([10])]) is None


@pytest.mark.parametrize(
    "slot",
    [
        slot_of([100] * 30),
        slot_of([8000] * 2),
        slot_of([100], 2048),
        slot_of([100], 256, start=8000 - 256),
        slot_of([100], num_moves=1),
        slot_of([100], num_wanted=1),
    ],
    ids=["many sequences", "long contexts", "long prompt", "late chunk of a long prompt", "block moves", "drafts"],
)
def test_an_unusual_step_is_not_predicted(forecast: StepForecast, slot: StepSlot) -> None:
    assert forecast.seconds([slot_of([100] * 4)]) is not None
    assert forecast.seconds([slot_of([100] * 4), slot]) is None


def prompt_s(tokens: int, end: int) -> float:
    """Returns the time of a chunk with 28 layers of a measured model: 6.3 s for the first 2048 tokens, 37.5 s at 26k.

    The measured times for 2 layers were 0.45 s and 2.68 s.
    """
    pairs_s = (2.68 - 0.45) / 24_576
    return 14 * tokens / CHUNK * (0.45 + (end - tokens / 2 - CHUNK / 2) * pairs_s)


@pytest.mark.parametrize("late_every", [30, 2], ids=["few late chunks", "many late chunks"])
@pytest.mark.parametrize("end", range(CHUNK, 16 * CHUNK + 1, CHUNK))
def test_the_patience_is_long_enough_for_each_chunk_of_a_long_prompt(end: int, late_every: int) -> None:
    """Few of the learnt steps are chunks late in a prompt, so short prompts determine the coefficients of the cost
    model.
    """
    forecast = StepForecast()
    for number in range(LEARNT_AT_FIRST):
        decoding = [100] * (number % 4)
        tokens, start = (CHUNK, 13 * CHUNK) if number % late_every == 1 else (64 + 32 * (number % 8), 0)
        seconds = microseconds(decoding) / 1e6 + prompt_s(tokens, start + tokens)
        forecast.learn(slot_of(decoding, tokens, start), done(round(seconds * 1e6)))
    predicted_s = forecast.seconds([slot_of([], CHUNK, end - CHUNK)])
    assert predicted_s is not None
    assert vitals.GRACE_S + vitals.GRACE_STEPS * predicted_s > prompt_s(CHUNK, end)
    assert prompt_s(CHUNK, end) < predicted_s < 40 * prompt_s(CHUNK, end), "an upper bound, but not an endless time"


def test_a_size_is_familiar_when_the_coefficients_count_it(forecast: StepForecast) -> None:
    large = slot_of([100] * 4, CHUNK)
    for number in range(8 * LEARN_EVERY):
        assert forecast.seconds([large]) is None, f"after {number} results, the coefficients do not count the step"
        forecast.learn(large, done(microseconds([100] * 4, CHUNK)))
    assert forecast.seconds([large]) is not None


def test_the_longest_step_counts_every_result(forecast: StepForecast) -> None:
    forecast.learn(slot_of([100], num_moves=1), done(5_000_000))
    assert forecast.longest_s == 5.0


def test_a_slower_machine_changes_the_prediction(forecast: StepForecast) -> None:
    before = forecast.seconds([slot_of([100] * 4)])
    for _ in range(40 * LEARN_EVERY):
        forecast.learn(slot_of([100] * 4), done(3 * microseconds([100] * 4)))
    after = forecast.seconds([slot_of([100] * 4)])
    assert before is not None
    assert after is not None
    assert after > 2 * before


def test_aborted_steps_teach_nothing() -> None:
    forecast = StepForecast()
    for _ in range(LEARNT_AT_FIRST):
        forecast.learn(slot_of([10]), done(1000, aborted=True))
    assert forecast.seconds([slot_of([10])]) is None


def test_other_work_is_possible_until_every_agent_has_replied() -> None:
    work = OtherWork(2)
    work.sent(messages.AdapterLoad(seq=1, adapter_slot=1, shm_name="a", num_bytes=1))
    work.received(messages.AdapterLoaded(seq=1, adapter_slot=1))
    assert work.is_possible
    work.received(messages.AdapterLoaded(seq=1, adapter_slot=1))
    assert not work.is_possible


def test_other_work_is_possible_during_a_profile() -> None:
    work = OtherWork(1)
    work.sent(messages.ProfileStart(seq=1, folder="a"))
    work.received(messages.ProfileReply(seq=1))
    assert work.is_possible, "steps are slower during a profile"
    work.sent(messages.ProfileStop(seq=2))
    work.received(messages.ProfileReply(seq=2))
    assert not work.is_possible


def test_a_result_ends_a_compilation() -> None:
    work = OtherWork(1)
    work.received(messages.Progress(stage="compile", done=0, total=1))
    assert work.is_possible
    work.received(messages.StepFailed(seq=1, slot=0, error="the graph failed"))
    assert not work.is_possible
