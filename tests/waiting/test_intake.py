"""Tests the intake of requests.

This is the order of the queue, admission limits, deadlines, and the delay before a client may retry.
"""

from __future__ import annotations

import pytest

from llm_serving.errors import ContextLengthError, QueueFullError, RequestError
from llm_serving.request import FinishReason, RequestStatus
from llm_serving.scheduler.sequence import Sequence
from llm_serving.waiting.drain_rate import MAX_RETRY_AFTER_S
from llm_serving.waiting.intake import Intake
from support.fakes import make_request
from support.recorded import RecordProperty
from support.waiting_sequences import Arrivals, drain, make_intake, pop, put


def make_sequences(count: int) -> list[Sequence]:
    return [Sequence(make_request(str(index), index + 1), index, 8) for index in range(count)]


def test_requests_start_in_order_of_arrival() -> None:
    intake = make_intake()
    put(intake, *make_sequences(4))
    assert (len(intake), intake.num_tokens) == (4, 10)
    assert drain(intake) == [0, 1, 2, 3]
    assert intake.num_tokens == 0


def test_preempted_sequences_start_in_order_of_arrival_whatever_the_order_of_their_return() -> None:
    intake, sequences = make_intake(), make_sequences(5)
    put(intake, *sequences[3:])
    for index in (1, 2, 0):
        intake.put_back(sequences[index])
    assert drain(intake) == [0, 1, 2, 3, 4]


def test_any_waiting_sequence_can_be_removed() -> None:
    intake, sequences = make_intake(), make_sequences(5)
    put(intake, *sequences[2:])
    for index in (0, 1):
        intake.put_back(sequences[index])
    for index in (3, 0):
        intake.remove(sequences[index])
    assert intake.num_tokens == 2 + 3 + 5
    assert drain(intake) == [1, 2, 4]


def test_preempted_sequences_start_before_the_most_urgent_new_one() -> None:
    intake, new = make_intake(), Arrivals()
    preempted, urgent = new.next(priority=5), new.next(priority=-5)
    put(intake, urgent)
    intake.put_back(preempted)
    assert intake.num_preempted == 1
    assert drain(intake) == [0, 1]


def test_a_prompt_is_charged_once() -> None:
    intake, new = make_intake(), Arrivals()
    first, *others = [new.next(10, tenant=tenant) for tenant in "aab"]
    put(intake, first, *others)
    intake.start(first, 0.0)  # now the counter of tenant a is 10
    intake.put_back(first)
    assert pop(intake) is first
    intake.order.charge_outputs([others[1].request] * 4)  # now the counter of tenant b is 8
    assert drain(intake) == [2, 1]


def test_a_sequence_that_is_not_the_first_can_start() -> None:
    intake, new = make_intake(), Arrivals()
    sequences = [new.next(2) for _ in range(3)]
    put(intake, *sequences)
    intake.start(sequences[1], 0.0)
    assert (drain(intake), intake.num_tokens) == ([0, 2], 0)


def test_a_refused_request_changes_nothing(record_property: RecordProperty) -> None:
    intake = make_intake(1)
    first = intake.add(make_request("a"), 0)
    with pytest.raises(RequestError, match="'a' is being served"):
        intake.add(make_request("a"), 8)
    with pytest.raises(ContextLengthError):
        intake.add(make_request("endless", 100), 8)
    with pytest.raises(QueueFullError):
        intake.add(make_request("b"), 0)
    record_property("admitted_parts", f"{len(intake) - 1} of 3")
    assert (list(intake.sequences.values()), intake.num_arrivals, len(intake)) == ([first], 1, 1)


def test_expired_requests_end_in_order_of_their_deadlines() -> None:
    intake, new = make_intake(), Arrivals()
    sequences = [new.next(2, deadline=deadline) for deadline in (3.0, None, 1.0, 2.0, 2.0)]
    put(intake, *sequences)
    assert intake.next_deadline == 1.0
    assert intake.expire(0.999) == []
    assert [sequence.arrival_index for sequence in intake.expire(2.0)] == [2, 3, 4]
    assert (intake.next_deadline, len(intake), intake.num_tokens) == (3.0, 2, 4)
    ended = intake.take_ended()
    assert [update.request.finish_reason for update in ended] == [FinishReason.ABORT] * 3
    assert ended[0].error == "the request's deadline passed before its first token: it waited for 2.000 s"
    assert (intake.take_ended(), list(intake.sequences)) == ([], ["0", "1"])
    intake.remove(sequences[0])
    assert intake.next_deadline is None
    assert intake.expire(100.0) == []


def test_a_preempted_request_expires_only_without_a_first_token() -> None:
    intake, new = make_intake(), Arrivals()
    begun, cut_off = new.next(deadline=1.0), new.next(deadline=1.0)
    begun.request.first_token_time = 0.5
    for sequence in (begun, cut_off):
        intake.sequences[sequence.request.request_id] = sequence
        intake.put_back(sequence)
    assert intake.expire(1.0) == [cut_off]
    assert cut_off.request.status is RequestStatus.FINISHED
    assert drain(intake) == [0]


def refused(intake: Intake, num_tokens: int) -> float:
    with pytest.raises(QueueFullError) as refusal:
        intake.check_limits(num_tokens, 0)
    return refusal.value.retry_after_s


def test_the_time_to_retry_follows_from_the_requests_that_leave_the_queue() -> None:
    intake, new = make_intake(3), Arrivals()
    put(intake, *(new.next(5, arrival=0.0) for _ in range(6)))
    assert refused(intake, 5) == 1.0, "no request has left yet"
    pop(intake, 10.0)
    assert refused(intake, 5) == pytest.approx(30.0)  # three requests must leave the queue, one in 10 seconds
    pop(intake, 20.0)
    assert refused(intake, 5) == pytest.approx(20.0, rel=0.01)


def test_the_time_to_retry_follows_from_the_tokens_that_leave_the_queue() -> None:
    intake, new = make_intake(100, 100), Arrivals()
    put(intake, *(new.next(10, arrival=5.0) for _ in range(11)))
    pop(intake, 9.0)
    # 30 tokens must leave the queue, and 10 tokens leave in 4 seconds.
    assert refused(intake, 30) == pytest.approx(12.0)


def test_the_time_for_which_the_queue_is_empty_does_not_count() -> None:
    intake, new = make_intake(1), Arrivals()
    for start in (0.0, 1000.0):
        put(intake, new.next(5, arrival=start))
        pop(intake, start + 3.0)
    put(intake, new.next(5, arrival=2000.0))
    assert refused(intake, 5) == pytest.approx(3.0)


def test_the_time_to_retry_has_bounds() -> None:
    intake, new = make_intake(1), Arrivals()
    put(intake, *(new.next(5, arrival=0.0) for _ in range(5)))
    pop(intake, 0.001)
    assert refused(intake, 5) == 1.0
    pop(intake, 10_000.0)
    assert refused(intake, 5) == MAX_RETRY_AFTER_S


def test_free_batch_rows_that_requests_cannot_use_do_not_count() -> None:
    intake, new = make_intake(2), Arrivals()
    put(intake, *(new.next() for _ in range(3)))
    assert intake.queue_full(8) is None
    intake.limit_starts(2)
    assert intake.queue_full(8) is None
    assert intake.queue_full(1) is not None
    put(intake, new.next())
    assert intake.queue_full(8) is not None


def test_starts_stay_limited_until_the_queue_is_empty() -> None:
    intake, new = make_intake(2), Arrivals()
    put(intake, *(new.next() for _ in range(3)))
    intake.limit_starts(0)
    intake.limit_starts(8)
    assert intake.queue_full(8) is not None, "free capacity goes to the waiting requests first"
    drain(intake)
    put(intake, *(new.next() for _ in range(3)))
    assert intake.queue_full(8) is None


def test_requests_that_wait_at_a_replica_without_capacity_count() -> None:
    intake = make_intake(2)
    assert intake.queue_full(-1) is None
    with pytest.raises(QueueFullError, match="2 requests are waiting and 0 can start; the queue takes 2"):
        intake.check_limits(1, -2)


def test_requests_that_will_be_added_before_count() -> None:
    intake, new = make_intake(2), Arrivals()
    put(intake, new.next())
    assert intake.queue_full(1, "", 1) is None
    full = intake.queue_full(1, "", 2)
    assert str(full).startswith("3 requests are waiting and 1 can start; the queue takes 2")
    intake.limit_starts(0)
    assert intake.queue_full(1, "", 1) is not None
    assert intake.queue_full(1) is None


def test_a_light_tenant_enters_a_queue_that_others_have_filled() -> None:
    intake, new = make_intake(6), Arrivals()
    put(intake, *(new.next(tenant="heavy") for _ in range(6)))
    assert intake.queue_full(0, "heavy") is not None
    for _ in range(3):  # with two tenants, each may have half of the queue's limit
        assert intake.queue_full(0, "light") is None
        put(intake, new.next(tenant="light"))
    assert intake.queue_full(0, "light") is not None
    for name in ("third", "fourth"):
        assert intake.queue_full(0, name) is None
        put(intake, new.next(tenant=name))
    assert intake.queue_full(0, "light") is not None
    drain(intake)
    put(intake, *(new.next(tenant="heavy") for _ in range(6)))
    assert intake.queue_full(0, "light") is None, "requests that have started do not count"


def test_many_tenants_can_only_double_the_queue() -> None:
    intake, new = make_intake(6), Arrivals()
    put(intake, *(new.next(tenant="heavy") for _ in range(6)))
    entered = 0
    for index in range(100):
        if intake.queue_full(0, f"tenant {index}") is None:
            put(intake, new.next(tenant=f"tenant {index}"))
            entered += 1
    assert entered == 6


def test_a_single_tenant_or_a_queue_without_fairness_may_fill_the_whole_queue() -> None:
    new = Arrivals()
    alone, unfair = make_intake(2), make_intake(2, fairness=False)
    put(alone, *(new.next(tenant="a") for _ in range(2)))
    put(unfair, *(new.next(tenant="a") for _ in range(2)))
    assert alone.queue_full(0, "a") is not None
    assert unfair.queue_full(0, "b") is not None


def test_shares_are_known_after_a_restore() -> None:
    intake, new = make_intake(2), Arrivals()
    sequences = [new.next(tenant=tenant) for tenant in ("heavy", "heavy", "light")]
    put(intake, *sequences[1:])
    intake.put_back(sequences[0])
    restored = make_intake(2)
    restored.restore(intake.snapshot(), dict(enumerate(sequences)))
    for tenant, is_full in (("heavy", True), ("light", True), ("third", False)):
        assert (restored.queue_full(0, tenant) is not None) == is_full
        assert (intake.queue_full(0, tenant) is not None) == is_full
    assert drain(restored) == drain(intake)
