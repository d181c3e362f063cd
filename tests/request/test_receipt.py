"""Tests the receipt of a request, which states where its time went.

The parts of a receipt add up exactly to the total time. A receipt keeps the reasons for waiting in bounded memory.
"""

from __future__ import annotations

import random

import pytest

from llm_serving.request import Request, RequestStatus
from llm_serving.sampling_params import SamplingParams
from llm_serving.telemetry.receipt import MAX_BLOCKERS, BlockReason, Phase, Receipt, WaitingLine


def test_each_phase_has_the_time_between_its_start_and_end() -> None:
    receipt = Receipt(100.0)
    receipt.enter(Phase.PREFILL, 100.25)
    receipt.enter(Phase.DECODE, 100.5)
    receipt.enter(Phase.PREEMPTED, 101.0)
    receipt.enter(Phase.DECODE, 103.0)
    receipt.enter(Phase.SWAPPED, 103.125)
    receipt.enter(Phase.DECODE, 103.25)
    receipt.enter(Phase.RESTARTED, 103.5)
    receipt.enter(Phase.DECODE, 103.5625)
    receipt.enter(Phase.DONE, 104.0)
    assert receipt.phase_us == (250_000, 250_000, 1_312_500, 2_000_000, 125_000, 62_500, 0)
    assert receipt.phase_us[Phase.DECODE] == 1_312_500
    assert (receipt.preemptions, receipt.swaps) == (1, 1)
    assert receipt.end_us - receipt.start_us == sum(receipt.phase_us)


def test_the_phases_add_up_exactly_for_any_clock() -> None:
    generator = random.Random(4)
    for _ in range(200):
        now = start = generator.uniform(0.0, 1e6)
        receipt = Receipt(start)
        for _ in range(generator.randrange(40)):
            now += generator.expovariate(100.0)
            receipt.enter(Phase(generator.randrange(Phase.DONE)), now)
        receipt.enter(Phase.DONE, now)
        assert sum(receipt.phase_us) == round(now * 1e6) - round(start * 1e6)


def test_a_time_before_the_previous_one_counts_as_the_previous_one() -> None:
    receipt = Receipt(5.0)
    receipt.enter(Phase.PREFILL, 4.999)
    receipt.enter(Phase.DONE, 6.0)
    assert receipt.phase_us == (0, 1_000_000, 0, 0, 0, 0, 0)


def test_the_current_phase_counts_up_to_now() -> None:
    receipt = Receipt(1.0)
    receipt.enter(Phase.PREFILL, 2.0)
    assert receipt.phases_until(2.5) == (1_000_000, 500_000, 0, 0, 0, 0, 0)
    assert receipt.phase_us == (1_000_000, 0, 0, 0, 0, 0, 0)
    receipt.enter(Phase.DONE, 3.0)
    assert receipt.phases_until(9.0) == (1_000_000, 1_000_000, 0, 0, 0, 0, 0)


def test_a_completed_receipt_does_not_change() -> None:
    receipt = Receipt(0.0)
    receipt.enter(Phase.DONE, 1.0)
    with pytest.raises(AssertionError, match="has ended enters DECODE"):
        receipt.enter(Phase.DECODE, 2.0)


def test_blocked_time_goes_to_the_reason_seen_last() -> None:
    receipt = Receipt(0.0)
    receipt.blocked(BlockReason.ROWS, ["a"], 1.0)
    receipt.blocked(BlockReason.ROWS, ["a"], 1.5)
    receipt.blocked(BlockReason.BLOCKS, ["b", "a"], 2.0)
    receipt.enter(Phase.PREFILL, 2.25)
    receipt.enter(Phase.DONE, 9.0)
    assert receipt.num_blocked == {BlockReason.ROWS: 2, BlockReason.BLOCKS: 1}
    assert receipt.blocked_us == {BlockReason.ROWS: 1_000_000, BlockReason.BLOCKS: 250_000}
    assert receipt.blockers == ["a", "b"]


def test_a_preempted_request_is_blocked_until_it_starts_and_not_until_its_token() -> None:
    receipt = Receipt(0.0)
    receipt.enter(Phase.PREFILL, 1.0)
    receipt.enter(Phase.PREEMPTED, 2.0)
    receipt.blocked(BlockReason.BLOCKS, ["a"], 2.5)
    receipt.unblocked(3.0)
    receipt.enter(Phase.DECODE, 5.0)
    assert receipt.blocked_us == {BlockReason.BLOCKS: 500_000}
    assert receipt.phase_us[Phase.PREEMPTED] == 3_000_000


def test_a_clock_that_goes_back_subtracts_no_time() -> None:
    receipt = Receipt(0.0)
    receipt.blocked(BlockReason.ROWS, [], 2.0)
    receipt.enter(Phase.PREFILL, 1.0)
    assert receipt.blocked_us == {BlockReason.ROWS: 0}


def test_without_a_clock_only_the_number_of_blocks_is_counted() -> None:
    receipt = Receipt(0.0)
    receipt.blocked(BlockReason.PREFIX, [])
    receipt.enter(Phase.PREFILL, 1.0)
    assert (receipt.num_blocked, receipt.blocked_us, receipt.blockers) == ({BlockReason.PREFIX: 1}, {}, [])


def test_the_most_frequent_blockers_are_kept() -> None:
    receipt = Receipt(0.0)
    for i in range(1000):
        receipt.blocked(BlockReason.BLOCKS, ["stays", f"passes-{i}"])
    assert receipt.blockers[0] == "stays"
    assert len(receipt.blockers) == MAX_BLOCKERS
    assert len(receipt._blockers) == 4 * MAX_BLOCKERS


def test_all_waiting_requests_have_the_block_reason_of_the_first() -> None:
    """The second request waits behind the first, which is blocked. So both receipts show the reasons of the first.

    Both requests start at second 6.
    """
    line = WaitingLine()
    first, second, third = Receipt(0.0), Receipt(2.0), Receipt(7.0)
    first.join(line)
    first.blocked(BlockReason.ROWS, ["a"], 1.0)
    line.blocked(BlockReason.ROWS, ["a"], 1.0)
    second.join(line)
    first.blocked(BlockReason.BLOCKS, ["b", "c"], 4.0)
    line.blocked(BlockReason.BLOCKS, ["b", "c"], 4.0)
    assert second.blocked_until(5.0) == {BlockReason.ROWS: 2_000_000, BlockReason.BLOCKS: 1_000_000}
    first.unblocked(6.0)
    line.moved(6.0)
    third.join(line)
    for receipt, start in ((first, 6.0), (second, 6.0), (third, 8.0)):
        receipt.enter(Phase.PREFILL, start)
    assert first.blocked_us == {BlockReason.ROWS: 3_000_000, BlockReason.BLOCKS: 2_000_000}
    assert second.blocked_us == {BlockReason.ROWS: 2_000_000, BlockReason.BLOCKS: 2_000_000}
    assert (first.blockers, second.blockers) == (["a", "b", "c"], ["b", "c"])
    assert (second.num_blocked, third.blocked_us, third.blockers) == ({}, {}, [])


def test_a_request_outside_the_queue_order_has_its_own_block_reason() -> None:
    line = WaitingLine()
    receipt = Receipt(0.0)
    receipt.join(line)
    line.blocked(BlockReason.ROWS, ["a"], 0.0)
    receipt.enter(Phase.PREFILL, 1.0)
    receipt.enter(Phase.PREEMPTED, 2.0)
    receipt.blocked(BlockReason.BLOCKS, ["b"], 2.0)
    receipt.unblocked(2.5)
    line.blocked(BlockReason.POLICY, [], 5.0)
    receipt.enter(Phase.DONE, 9.0)
    assert (
        receipt.blocked_us == receipt.blocked_until(9.0) == {BlockReason.ROWS: 1_000_000, BlockReason.BLOCKS: 500_000}
    )


def test_a_receipt_starts_at_the_arrival_of_the_request() -> None:
    request = Request("a", [1], SamplingParams(), 12.5)
    assert request.receipt.start_us == 12_500_000
    assert request.receipt.phase is Phase.QUEUED
    assert (request.priority, request.tenant, request.cache_salt, request.deadline) == (0, "", b"", None)
    assert (request.ttft_objective, request.tbt_objective, request.num_cached_tokens) == (None, None, 0)
    queued_later = Request("b", [1], SamplingParams(), 12.5, receipt=Receipt(12.75))
    assert queued_later.receipt.start_us == 12_750_000
    assert RequestStatus("swapped") is RequestStatus.SWAPPED
