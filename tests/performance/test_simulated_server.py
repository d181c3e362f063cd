"""Tests the virtual server: its times can be calculated by hand, and its runs are repeatable."""

from dataclasses import replace
from itertools import pairwise

import pytest

from llm_serving.routing.pools import PromptPool, PromptPools
from llm_serving.scheduler.limits import Policy
from llm_serving.scheduler.output import ScheduledStep
from performance.simulation.server import Outcome, VirtualServer
from performance.simulation.spread import Spread
from performance.simulation.workload import ClosedLoop, OpenLoop, Source
from support.performance_simulated import DECODE_S, NO_TIME, PREFILL_S, FlatDevice, ask, limits


def run(source: Source, **changes: object) -> Outcome:
    return VirtualServer(limits(**changes), FlatDevice(), source, NO_TIME).run()


def test_one_request_takes_a_prefill_and_decode_steps() -> None:
    outcome = run(OpenLoop([ask(5, 4)], [10.0]))
    [record] = outcome.records
    assert list(record.piece_times) == [12.0, 13.0, 14.0, 15.0]
    assert (record.end, record.output_tokens, record.prompt_tokens, record.finish_reason) == (15.0, 4, 5, "length")
    assert outcome.steps == {"prefill": 1, "decode": 3}
    assert outcome.device_busy_s == PREFILL_S + 3 * DECODE_S


def test_an_output_ends_where_the_workload_specifies() -> None:
    outcome = run(OpenLoop([ask(5, 30, ends=3)], [0.0]))
    [record] = outcome.records
    assert (record.output_tokens, record.finish_reason, record.end) == (3, "stop", 4.0)


def test_host_time_matters_only_while_the_device_waits() -> None:
    host = replace(NO_TIME, accept_s=0.25, to_agent_s=0.125, from_agent_s=0.125, deliver_s=0.5)
    outcome = VirtualServer(limits(), FlatDevice(), OpenLoop([ask(5, 4)], [0.0]), host).run()
    # The first piece has five delays, which are 3 s together: request accepted, step sent, prefill run, result
    # received, piece delivered. Each later piece arrives one decode step after the one before, because its step already
    # waits in the agent's queue.
    assert list(outcome.records[0].piece_times) == [3.0, 4.0, 5.0, 6.0]
    alone = VirtualServer(limits(decode_steps_ahead=0), FlatDevice(), OpenLoop([ask(5, 4)], [0.0]), host).run()
    assert list(alone.records[0].piece_times) == [3.0, 4.25, 5.5, 6.75]


def test_an_arriving_request_delays_the_running_step() -> None:
    """The host needs 0.25 s to accept a request. This delays the step that runs on the device by 0.25 s.

    Without the second request, one decode step runs from second 2 to 3, and the next one from 3 to 4.
    """
    host = replace(NO_TIME, interrupt_s=0.25)
    requests, first = [ask(5, 4), ask(5, 1)], {}
    for due in (-1.0, 2.5, 3.5, 20.0):
        source = OpenLoop(requests, [0.0, due]) if due > 0.0 else OpenLoop(requests[:1], [0.0])
        outcome = VirtualServer(limits(policy=Policy.FCFS), FlatDevice(), source, host).run()
        first[due] = list(outcome.records[0].piece_times)
        busy = PREFILL_S + 3 * DECODE_S + (PREFILL_S if due > 0.0 else 0.0)
        assert outcome.device_busy_s == busy + (0.25 if 0.0 < due < 20.0 else 0.0)
    assert first[-1.0] == first[20.0] == [2.0, 3.0, 4.0, 5.0]
    # The second request arrives at 2.5 s. Its prefill was sent before the last decode step of the first request, so
    # that step runs after the prefill.
    assert first[2.5] == [2.0, 3.25, 4.25, 7.25]
    assert first[3.5] == [2.0, 3.0, 4.25, 5.25]


def test_a_request_delays_the_step_that_started_before_the_last_result_arrived() -> None:
    """At 3.05 s, the result of the first decode step is still in transfer to the engine.

    The next step was queued and has started, so the arriving request delays it.
    """
    host = replace(NO_TIME, interrupt_s=0.25, from_agent_s=0.125)
    outcome = VirtualServer(
        limits(policy=Policy.FCFS), FlatDevice(), OpenLoop([ask(5, 4), ask(5, 1)], [0.0, 3.05]), host
    ).run()
    alone = VirtualServer(limits(policy=Policy.FCFS), FlatDevice(), OpenLoop([ask(5, 4)], [0.0]), host).run()
    assert list(alone.records[0].piece_times) == [2.125, 3.125, 4.125, 5.125]
    assert list(outcome.records[0].piece_times)[:3] == [2.125, 3.125, 4.375]


def test_each_of_several_simultaneous_requests_causes_a_delay() -> None:
    host = replace(NO_TIME, interrupt_s=0.25)
    source = OpenLoop([ask(5, 3), *[ask(5, 1)] * 3], [0.0, 2.5, 2.5, 2.5])
    outcome = VirtualServer(limits(), FlatDevice(), source, host).run()
    assert list(outcome.records[0].piece_times)[:2] == [2.0, 3.75]


def test_pieces_of_a_step_are_delivered_one_after_the_other() -> None:
    host = replace(NO_TIME, deliver_piece_s=0.125)
    outcome = VirtualServer(limits(), FlatDevice(), OpenLoop([ask(3, 1)] * 3, [0.0] * 3), host).run()
    assert [record.end for record in outcome.records] == [2.0, 2.125, 2.25]


def test_a_prompt_overtakes_a_queued_decode_under_prefill_first_only() -> None:
    requests, arrivals = [ask(4, 6), ask(4, 2)], [0.0, 3.5]
    first = run(OpenLoop(requests, arrivals), policy=Policy.PREFILL_FIRST)
    queued = run(OpenLoop(requests, arrivals), policy=Policy.FCFS)
    # when the second request arrives, a decode step runs until 4 and the next one is queued
    assert first.records[1].piece_times[0] == 6.0
    assert queued.records[1].piece_times[0] == 7.0


def test_a_closed_loop_client_sends_when_its_request_has_completed() -> None:
    outcome = run(ClosedLoop([ask(4, 2)] * 3, clients=1))
    assert [(record.due, record.end) for record in outcome.records] == [(0.0, 3.0), (3.0, 6.0), (6.0, 9.0)]
    both = run(ClosedLoop([ask(4, 2)] * 2, clients=50))
    assert [(record.due, record.end) for record in both.records] == [(0.0, 3.0), (0.0, 3.0)]


def test_too_few_blocks_cause_preemption_and_every_output_is_complete() -> None:
    requests = [ask(8, 12)] * 4
    outcome = run(OpenLoop(requests, [0.0, 0.1, 0.2, 0.3]), num_blocks=11)
    assert outcome.preemptions > 0
    assert [record.output_tokens for record in outcome.records] == [12] * 4


def test_rejected_requests_have_failed() -> None:
    requests = [ask(4, 4), ask(4, 4), ask(60, 4)]
    outcome = run(OpenLoop(requests, [0.0, 0.0, 0.5]), max_num_seqs=1, max_waiting_requests=1)
    assert [record.failure for record in outcome.records] == [None, None, "http 400"]
    crowd = run(OpenLoop([ask(4, 4)] * 4, [0.0] * 4), max_num_seqs=1, max_waiting_requests=1)
    assert [record.failure for record in crowd.records] == [None, None, "http 429", "http 429"]


def test_kv_waste_is_the_empty_part_of_the_last_blocks() -> None:
    # The share of wasted KV cache is measured at every eighth decode step. At the step that is measured here, the
    # sequence has 16 tokens.
    outcome = run(OpenLoop([ask(8, 9)], [0.0]), block_size=16, num_blocks=8)
    assert outcome.kv_waste == 0.0
    outcome = run(OpenLoop([ask(8, 9)], [0.0]), block_size=32, num_blocks=4)
    assert outcome.kv_waste == 0.5


def test_the_run_depends_on_the_seed() -> None:
    def ends(seed: int) -> list[float | None]:
        source = OpenLoop([ask(4, 8)] * 5, [0.0, 1.0, 2.0, 3.0, 4.0])
        server = VirtualServer(limits(), FlatDevice(), source, NO_TIME, Spread([0.5, 1.0, 1.5]), seed)
        return [record.end for record in server.run().records]

    assert ends(3) == ends(3)
    assert ends(3) != ends(4)


@pytest.mark.parametrize(("lasting_s", "paces"), [(1e9, 1), (1e-9, 3)])
def test_slow_periods_last_as_long_as_the_spread_specifies(lasting_s: float, paces: int) -> None:
    spread = Spread([0.5, 1.0, 1.5], 1.0, lasting_s)
    server = VirtualServer(limits(), FlatDevice(), OpenLoop([ask(4, 30)], [0.0]), NO_TIME, spread)
    [record] = server.run().records
    assert len({round(later - earlier, 6) for earlier, later in pairwise(record.piece_times)}) == paces


@pytest.mark.parametrize("lasting_s", [1e-9, 5.0])
def test_the_number_of_slow_steps_does_not_depend_on_how_long_slow_periods_last(lasting_s: float) -> None:
    spread = Spread([0.5, 1.0, 1.5], 1.0, lasting_s)
    requests = OpenLoop([ask(4, 8)] * 2000, [10.0 * index for index in range(2000)])
    outcome = VirtualServer(limits(), FlatDevice(), requests, NO_TIME, spread).run()
    expected = PREFILL_S * outcome.steps["prefill"] + DECODE_S * outcome.steps["decode"]
    assert outcome.device_busy_s == pytest.approx(expected, rel=0.05)


def test_a_stuck_scheduler_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    server = VirtualServer(limits(), FlatDevice(), OpenLoop([ask(4, 2)], [0.0]), NO_TIME)
    monkeypatch.setattr(server.scheduler, "schedule", lambda now: None)
    with pytest.raises(AssertionError, match="is stuck, 0 running, 1 waiting"):
        server.run()


def test_a_result_arrives_at_its_announced_time_despite_rounding() -> None:
    """The end time of a step plus the transfer time may be rounded up.

    The engine must still wake exactly once for the result.
    """

    class Sevenths:
        name = "sevenths"

        def seconds(self, step: ScheduledStep) -> float:
            return 1.0 / (7.0 + len(step.rows) + 3.0 * len(step.token_ids))

    for way_s in (60e-6, 1e-3 / 3.0, 0.1):
        host = replace(NO_TIME, to_agent_s=way_s / 7.0, from_agent_s=way_s)
        requests, arrivals = [ask(3, 12)] * 40, [index / 3.0 for index in range(40)]
        outcome = VirtualServer(limits(), Sevenths(), OpenLoop(requests, arrivals), host).run()
        assert [record.output_tokens for record in outcome.records] == [12] * 40


def test_virtual_time_that_does_not_advance_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    server = VirtualServer(limits(), FlatDevice(), OpenLoop([ask(4, 2)], [0.0]), NO_TIME)
    monkeypatch.setattr(server.scheduler, "schedule", lambda now: None)
    monkeypatch.setattr(server.scheduler, "next_wakeup", lambda now: 0.0)
    with pytest.raises(AssertionError, match=r"virtual time stays at 0\.0"):
        server.run()


def test_pools_by_prompt_length_are_simulated() -> None:
    """Three short prompts run one after the other at replica 1, and the long prompt runs at replica 0."""
    pools = PromptPools([PromptPool("short", 1, 5), PromptPool("long", 1)])
    requests = [ask(5, 4), ask(5, 4), ask(6, 4), ask(5, 4)]
    server = VirtualServer(
        limits(max_num_seqs=1), FlatDevice(), OpenLoop(requests, [0.0] * 4), NO_TIME, num_replicas=2, pools=pools
    )
    outcome = server.run()
    end = PREFILL_S + 3 * DECODE_S
    assert [record.end for record in outcome.records] == pytest.approx([end, 2 * end, end, 3 * end])
    assert outcome.placed == [{"load": 1}, {"load": 3}]


def test_two_replicas_run_two_requests_in_parallel() -> None:
    """With two requests, two replicas take half of the time of one. With one request, there is no difference."""
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
