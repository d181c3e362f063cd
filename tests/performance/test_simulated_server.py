"""The virtual server: times that can be worked out by hand, and the same twice."""

from dataclasses import replace
from itertools import pairwise

import pytest

from llm_serving.scheduler.limits import Policy
from llm_serving.scheduler.output import ScheduledStep
from performance.simulation.server import Outcome, VirtualServer
from performance.simulation.spread import Spread
from performance.simulation.workload import ClosedLoop, OpenLoop, Source
from support.performance_simulated import DECODE_S, NO_TIME, PREFILL_S, FlatDevice, ask, limits


def run(source: Source, **changes: object) -> Outcome:
    return VirtualServer(limits(**changes), FlatDevice(), source, NO_TIME).run()


def test_one_request_takes_a_prefill_and_its_decode_steps() -> None:
    outcome = run(OpenLoop([ask(5, 4)], [10.0]))
    [record] = outcome.records
    assert list(record.piece_times) == [12.0, 13.0, 14.0, 15.0]
    assert (record.end, record.output_tokens, record.prompt_tokens, record.finish_reason) == (15.0, 4, 5, "length")
    assert outcome.steps == {"prefill": 1, "decode": 3}
    assert outcome.device_busy_s == PREFILL_S + 3 * DECODE_S


def test_an_answer_ends_where_the_workload_says() -> None:
    outcome = run(OpenLoop([ask(5, 30, ends=3)], [0.0]))
    [record] = outcome.records
    assert (record.output_tokens, record.finish_reason, record.end) == (3, "stop", 4.0)


def test_the_host_is_felt_only_where_the_device_waits_for_it() -> None:
    host = replace(NO_TIME, accept_s=0.25, to_agent_s=0.125, from_agent_s=0.125, deliver_s=0.5)
    outcome = VirtualServer(limits(), FlatDevice(), OpenLoop([ask(5, 4)], [0.0]), host).run()
    # accepted, sent, prefilled, answered, delivered; the next step was in the queue already
    assert list(outcome.records[0].piece_times) == [3.0, 4.0, 5.0, 6.0]
    alone = VirtualServer(limits(decode_steps_ahead=0), FlatDevice(), OpenLoop([ask(5, 4)], [0.0]), host).run()
    assert list(alone.records[0].piece_times) == [3.0, 4.25, 5.5, 6.75]


def test_a_request_that_comes_takes_time_of_the_step_that_runs() -> None:
    """0.25 s each, of a device that runs a decode step from 2 to 3 and another, sent long before, from 3 on."""
    host = replace(NO_TIME, interrupt_s=0.25)
    requests, first = [ask(5, 4), ask(5, 1)], {}
    for due in (-1.0, 2.5, 3.5, 20.0):
        source = OpenLoop(requests, [0.0, due]) if due > 0.0 else OpenLoop(requests[:1], [0.0])
        outcome = VirtualServer(limits(policy=Policy.FCFS), FlatDevice(), source, host).run()
        first[due] = list(outcome.records[0].piece_times)
        busy = PREFILL_S + 3 * DECODE_S + (PREFILL_S if due > 0.0 else 0.0)
        assert outcome.device_busy_s == busy + (0.25 if 0.0 < due < 20.0 else 0.0)
    assert first[-1.0] == first[20.0] == [2.0, 3.0, 4.0, 5.0]
    assert first[2.5] == [2.0, 3.25, 4.25, 7.25]  # its prefill was sent before the last decode step
    assert first[3.5] == [2.0, 3.0, 4.25, 5.25]


def test_a_request_interrupts_the_step_that_began_before_the_last_answer_was_taken() -> None:
    """At 3.05 the answer of the first decode step is on its way and the next, which was queued, has begun: it is what
    takes longer."""
    host = replace(NO_TIME, interrupt_s=0.25, from_agent_s=0.125)
    outcome = VirtualServer(
        limits(policy=Policy.FCFS), FlatDevice(), OpenLoop([ask(5, 4), ask(5, 1)], [0.0, 3.05]), host
    ).run()
    alone = VirtualServer(limits(policy=Policy.FCFS), FlatDevice(), OpenLoop([ask(5, 4)], [0.0]), host).run()
    assert list(alone.records[0].piece_times) == [2.125, 3.125, 4.125, 5.125]
    assert list(outcome.records[0].piece_times)[:3] == [2.125, 3.125, 4.375]


def test_several_requests_at_once_interrupt_as_often() -> None:
    host = replace(NO_TIME, interrupt_s=0.25)
    source = OpenLoop([ask(5, 3), *[ask(5, 1)] * 3], [0.0, 2.5, 2.5, 2.5])
    outcome = VirtualServer(limits(), FlatDevice(), source, host).run()
    assert list(outcome.records[0].piece_times)[:2] == [2.0, 3.75]


def test_pieces_of_a_step_reach_their_clients_one_after_the_other() -> None:
    host = replace(NO_TIME, deliver_piece_s=0.125)
    outcome = VirtualServer(limits(), FlatDevice(), OpenLoop([ask(3, 1)] * 3, [0.0] * 3), host).run()
    assert [record.end for record in outcome.records] == [2.0, 2.125, 2.25]


def test_a_prompt_overtakes_a_queued_decode_under_prefill_first_only() -> None:
    requests, arrivals = [ask(4, 6), ask(4, 2)], [0.0, 3.5]
    first = run(OpenLoop(requests, arrivals), policy=Policy.PREFILL_FIRST)
    queued = run(OpenLoop(requests, arrivals), policy=Policy.FCFS)
    # the decode step that ends at 4 is running, the next one is queued
    assert first.records[1].piece_times[0] == 6.0
    assert queued.records[1].piece_times[0] == 7.0


def test_clients_in_a_closed_loop_send_when_they_have_their_answer() -> None:
    outcome = run(ClosedLoop([ask(4, 2)] * 3, clients=1))
    assert [(record.due, record.end) for record in outcome.records] == [(0.0, 3.0), (3.0, 6.0), (6.0, 9.0)]
    both = run(ClosedLoop([ask(4, 2)] * 2, clients=50))
    assert [(record.due, record.end) for record in both.records] == [(0.0, 3.0), (0.0, 3.0)]


def test_too_little_room_preempts_and_every_answer_is_whole() -> None:
    requests = [ask(8, 12)] * 4
    outcome = run(OpenLoop(requests, [0.0, 0.1, 0.2, 0.3]), num_blocks=11)
    assert outcome.preemptions > 0
    assert [record.output_tokens for record in outcome.records] == [12] * 4


def test_refused_requests_have_failed() -> None:
    requests = [ask(4, 4), ask(4, 4), ask(60, 4)]
    outcome = run(OpenLoop(requests, [0.0, 0.0, 0.5]), max_num_seqs=1, max_waiting_requests=1)
    assert [record.failure for record in outcome.records] == [None, None, "http 400"]
    crowd = run(OpenLoop([ask(4, 4)] * 4, [0.0] * 4), max_num_seqs=1, max_waiting_requests=1)
    assert [record.failure for record in crowd.records] == [None, None, "http 429", "http 429"]


def test_waste_is_what_the_last_blocks_do_not_hold() -> None:
    # every eighth decode step is looked at, here one of 16 tokens
    outcome = run(OpenLoop([ask(8, 9)], [0.0]), block_size=16, num_blocks=8)
    assert outcome.kv_waste == 0.0
    outcome = run(OpenLoop([ask(8, 9)], [0.0]), block_size=32, num_blocks=4)
    assert outcome.kv_waste == 0.5


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    def ends(seed: int) -> list[float | None]:
        source = OpenLoop([ask(4, 8)] * 5, [0.0, 1.0, 2.0, 3.0, 4.0])
        server = VirtualServer(limits(), FlatDevice(), source, NO_TIME, Spread([0.5, 1.0, 1.5]), seed)
        return [record.end for record in server.run().records]

    assert ends(3) == ends(3)
    assert ends(3) != ends(4)


@pytest.mark.parametrize(("lasting_s", "paces"), [(1e9, 1), (1e-9, 3)])
def test_a_machine_is_as_slow_for_as_long_as_its_spread_says(lasting_s: float, paces: int) -> None:
    spread = Spread([0.5, 1.0, 1.5], 1.0, lasting_s)
    server = VirtualServer(limits(), FlatDevice(), OpenLoop([ask(4, 30)], [0.0]), NO_TIME, spread)
    [record] = server.run().records
    assert len({round(later - earlier, 6) for earlier, later in pairwise(record.piece_times)}) == paces


@pytest.mark.parametrize("lasting_s", [1e-9, 5.0])
def test_slow_steps_are_as_many_as_measured_however_long_slow_times_last(lasting_s: float) -> None:
    spread = Spread([0.5, 1.0, 1.5], 1.0, lasting_s)
    requests = OpenLoop([ask(4, 8)] * 2000, [10.0 * index for index in range(2000)])
    outcome = VirtualServer(limits(), FlatDevice(), requests, NO_TIME, spread).run()
    expected = PREFILL_S * outcome.steps["prefill"] + DECODE_S * outcome.steps["decode"]
    assert outcome.device_busy_s == pytest.approx(expected, rel=0.05)


def test_a_scheduler_that_stands_still_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    server = VirtualServer(limits(), FlatDevice(), OpenLoop([ask(4, 2)], [0.0]), NO_TIME)
    monkeypatch.setattr(server.scheduler, "schedule", lambda now: None)
    with pytest.raises(AssertionError, match="is stuck, 0 running, 1 waiting"):
        server.run()


def test_an_answer_comes_when_it_was_announced_whatever_the_rounding() -> None:
    """Times whose sum with the way back is rounded up must not keep the engine waking for an answer to come."""

    class Sevenths:
        name = "sevenths"

        def seconds(self, step: ScheduledStep) -> float:
            return 1.0 / (7.0 + len(step.rows) + 3.0 * len(step.token_ids))

    for way_s in (60e-6, 1e-3 / 3.0, 0.1):
        host = replace(NO_TIME, to_agent_s=way_s / 7.0, from_agent_s=way_s)
        requests, arrivals = [ask(3, 12)] * 40, [index / 3.0 for index in range(40)]
        outcome = VirtualServer(limits(), Sevenths(), OpenLoop(requests, arrivals), host).run()
        assert [record.output_tokens for record in outcome.records] == [12] * 40


def test_time_that_stands_still_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    server = VirtualServer(limits(), FlatDevice(), OpenLoop([ask(4, 2)], [0.0]), NO_TIME)
    monkeypatch.setattr(server.scheduler, "schedule", lambda now: None)
    monkeypatch.setattr(server.scheduler, "next_wakeup", lambda now: 0.0)
    with pytest.raises(AssertionError, match=r"virtual time stays at 0\.0"):
        server.run()


def test_two_replicas_serve_two_at_a_time() -> None:
    """What one server does one after the other, two do side by side; with one request they are one."""
    requests = [ask(5, 4), ask(5, 4)]
    alone = VirtualServer(limits(max_num_seqs=1), FlatDevice(), OpenLoop(requests, [0.0, 0.0]), NO_TIME).run()
    beside = VirtualServer(
        limits(max_num_seqs=1), FlatDevice(), OpenLoop(requests, [0.0, 0.0]), NO_TIME, num_replicas=2
    ).run()
    end = PREFILL_S + 3 * DECODE_S
    assert [record.end for record in alone.records] == [end, 2 * end]
    assert [record.end for record in beside.records] == [end, end]
    assert beside.device_busy_s == 2 * end
    assert beside.steps == {"prefill": 2, "decode": 6}
    assert (beside.num_replicas, beside.placed) == (2, [{"load": 1}, {"load": 1}])
    assert (alone.num_replicas, alone.placed) == (1, [])
