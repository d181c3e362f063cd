"""Tests a group of agents behind one executor, with real processes, sockets and shared memory.

Only the device is a stub.
"""

import os
import signal
import time

import pytest

from llm_serving.errors import AgentLostError, AgentStartError
from llm_serving.executor.base import AgentLost, AgentReady, AgentStatus
from llm_serving.executor.step_join import StepJoin
from llm_serving.executor.vitals import LOOK_EVERY_S
from llm_serving.ipc.shm import NUM_SLOTS
from llm_serving.model.parallel import answering_rank
from llm_serving.scheduler.output import StepResult
from support.executor_steps import (
    events_until,
    loss_by_event,
    prefill,
    results,
    shm_entries,
    submit_decode_before_prefill,
)
from support.processes import running
from support.stub_agent import DIE, HANG, RAISE, REFUSE, SLOW, stub_token
from support.sweeps import with_sweeps

PAIR = ("parallel_config.tensor_parallel=2",)
FOUR = ("parallel_config.tensor_parallel=2", "parallel_config.pipeline_parallel=2")
BAD_LAST = (*PAIR, "model_config.model_name=bad-last-agent")


def pids(executor):
    return [agent["pid"] for agent in executor.agents()]


@pytest.mark.parametrize(("overrides", "size"), [(PAIR, 2), (FOUR, 4)])
def test_a_group_is_ready_together_and_answers_once(make_executor, overrides, size):
    stages = []
    executor = make_executor(*overrides, report=lambda rank, stage, done, total: stages.append((rank, stage)))
    [ready] = events_until(executor, AgentReady)
    assert ready.summary["agents"] == size
    assert {rank for rank, stage in stages if stage == "warm up"} == set(range(size))
    assert shm_entries() == set(), "names are gone once every agent has mapped slots and exchange"
    executor.submit(prefill(0, 5, row=3, top_logits=2))
    [result] = results(executor, 1)
    assert result.sampled_ids == [stub_token(1, 3)]
    assert result.tops == [((0, 0.0), (1, -1.0))]
    answering = answering_rank(0, executor._config.parallel_config)
    assert (result.graph_us, result.sample_us) == (11 + answering, 22), "those of the agent that samples"
    assert executor.poll(0.1) == []
    assert executor.num_free_slots == NUM_SLOTS


def test_every_agent_is_reported(make_executor):
    executor = make_executor(*FOUR, "parallel_config.data_parallel=2", replica=1)
    events_until(executor, AgentReady)
    agents = executor.agents()
    assert [(a["rank"], a["replica"], a["tensor_parallel_index"], a["pipeline_stage"]) for a in agents] == [
        (4, 1, 0, 0),
        (5, 1, 1, 0),
        (6, 1, 0, 1),
        (7, 1, 1, 1),
    ]
    assert {agent["state"] for agent in agents} == {"ready"}
    assert len({agent["pid"] for agent in agents}) == len({agent["address"] for agent in agents}) == 4
    executor.request_status()
    [status] = events_until(executor, AgentStatus)
    assert [agent["rank"] for agent in status.agents] == [4, 5, 6, 7]
    assert all(agent["rss_bytes"] > 0 for agent in status.agents)


def test_steps_run_in_the_order_they_were_sent(make_executor):
    """The agents of a group run steps in the order of the server, also with the policy ``prefill_first``.

    Otherwise two agents could choose different orders.
    """
    executor = make_executor(*PAIR, "scheduler_config.policy=prefill_first")
    events_until(executor, AgentReady)
    submit_decode_before_prefill(executor)
    assert [result.seq for result in results(executor, 3)] == [0, 1, 2]


def test_a_queued_step_is_not_aborted(make_executor):
    """A group does not abort a queued step, because one agent could already have started it while another has not."""
    executor = make_executor(*PAIR)
    events_until(executor, AgentReady)
    executor.submit(prefill(0, SLOW))
    executor.submit(prefill(1, 5))
    executor.abort(1)
    assert [(result.seq, result.aborted) for result in results(executor, 2)] == [(0, False), (1, False)]


@pytest.mark.parametrize(
    ("token", "phrase"), [(RAISE, "ZeroDivisionError: something nobody thought of"), (REFUSE, "token 203 is refused")]
)
def test_a_step_that_all_refuse_harms_no_other(make_executor, token, phrase):
    executor = make_executor(*PAIR)
    events_until(executor, AgentReady)
    executor.submit(prefill(0, token))
    executor.submit(prefill(1, 5))
    first, second = results(executor, 2)
    assert (first.seq, first.error) == (0, phrase)
    assert second.sampled_ids == [stub_token(1, 0)]
    assert executor.num_free_slots == NUM_SLOTS


def test_a_step_that_one_fails_ends_and_the_group_is_restarted(make_executor):
    """If one agent fails a step, its requests end with the error, and all other steps become void.

    The group is restarted, because its other agents may be in the middle of the step.
    """
    executor = make_executor(*BAD_LAST)
    events_until(executor, AgentReady)
    before = pids(executor)
    executor.submit(prefill(0, REFUSE))
    events = events_until(executor, AgentLost)
    failed, lost = events
    assert (failed.seq, failed.error) == (0, "token 203 is refused")
    assert lost.error.startswith("agent 1 failed step 0, and the rest of the group did not; restarting agents 0 to 1")
    events_until(executor, AgentReady)
    assert not set(before) & set(pids(executor))
    executor.submit(prefill(1, 5))
    assert results(executor, 1)[0].sampled_ids == [stub_token(1, 0)]


def test_a_failure_that_others_do_not_answer_is_not_waited_for_long(make_executor, monkeypatch):
    """If one agent fails a step, the executor waits only briefly for the results of the others.

    Their results may never come: an agent may be waiting for the failed agent's part of a sum.
    """
    monkeypatch.setattr(StepJoin, "GRACE_S", 0.5)
    executor = make_executor(*BAD_LAST)
    events_until(executor, AgentReady)
    os.kill(pids(executor)[0], signal.SIGSTOP)
    executor.submit(prefill(0, RAISE))
    failed, lost = events_until(executor, AgentLost)
    assert (failed.seq, failed.error) == (0, "ZeroDivisionError: something nobody thought of")
    assert "agent 1 failed step 0, and no answer came from agents 0 within 0.5 s" in lost.error
    events_until(executor, AgentReady)


@pytest.mark.parametrize("victim", with_sweeps([(rank,) for rank in range(4)], lambda rank: rank in (1, 2)))
def test_any_killed_agent_takes_the_group_down_and_it_comes_back(make_executor, victim):
    executor = make_executor(*FOUR)
    events_until(executor, AgentReady)
    before = pids(executor)
    executor.submit(prefill(0, HANG))
    os.kill(before[victim], signal.SIGKILL)
    lost = loss_by_event(executor)
    assert not lost.final
    assert lost.error.startswith(f"agent {victim}, process {before[victim]}:")
    assert "signal 9" in lost.error
    assert "restarting agents 0 to 3 in 0.25 s" in lost.error
    assert {agent["state"] for agent in executor.agents()} == {"restarting"}
    assert executor.num_free_slots == 0
    events_until(executor, AgentReady)
    assert running(before) == []
    assert [agent["restarts"] for agent in executor.agents()] == [1] * 4
    executor.submit(prefill(1, 5))
    assert results(executor, 1)[0].sampled_ids == [stub_token(1, 0)]


def test_an_agent_that_is_killed_while_it_starts_ends_the_group(make_executor):
    """If an agent is killed before the group has ever been ready, the loss is final.

    The executor ends the other agents.
    """
    executor = make_executor(*PAIR, "model_config.model_name=loads-forever")
    while any(pid is None for pid in pids(executor)):
        executor.poll(0.1)
    before = pids(executor)
    os.kill(before[1], signal.SIGKILL)
    [lost] = events_until(executor, AgentLost)
    assert lost.final
    assert lost.error.startswith("agent 1, process")
    assert running(before) == []
    assert {agent["state"] for agent in executor.agents()} == {"stopped"}


def test_a_group_that_keeps_dying_is_given_up(make_executor):
    executor = make_executor(*BAD_LAST, "serving_config.agent_restart_limit=1")
    for attempt in range(2):
        events_until(executor, AgentReady)
        executor.submit(prefill(attempt, DIE))
        *_, lost = events_until(executor, AgentLost)
    assert lost.final
    assert lost.error.endswith("given up after 1 restarts")


def test_an_agent_that_does_not_answer_in_time_is_named(make_executor):
    executor = make_executor(*BAD_LAST, "serving_config.step_timeout_s=1")
    events_until(executor, AgentReady)
    executor.submit(prefill(0, HANG))
    [lost] = events_until(executor, AgentLost)
    assert "agent 1 did not answer step 0 within 1 s (serving_config.step_timeout_s)" in lost.error


def look_for(minutes, group, begin, *, has_data):
    """Looks at a group of sleeping agents for some simulated minutes. With ``has_data``, data arrive before each look.
    """
    for number in range(round(60.0 * minutes / LOOK_EVERY_S)):
        now = begin + number * LOOK_EVERY_S
        group.look(now, 0.0, [], now - 0.1 if has_data else 0.0)


def test_agents_that_sleep_are_lost_only_if_no_data_arrive(make_executor):
    """Agents of a node wait for the masks of their step, which may come after other data."""
    executor = make_executor(*PAIR)
    events_until(executor, AgentReady)
    look_for(1, executor._group, 100.0, has_data=True)
    with pytest.raises(AgentLostError, match=r"have done nothing for 2\.0 s in the middle of a step"):
        look_for(100, executor._group, 160.0, has_data=False)  # so long, because the agents may not sleep yet


def test_agents_that_are_late_to_start_are_named(make_executor):
    overrides = ("model_config.model_name=loads-forever", "serving_config.agent_start_timeout_s=2")
    executor = make_executor(*PAIR, *overrides)
    [lost] = events_until(executor, AgentLost)
    assert lost.final
    assert lost.error.startswith("agents 0, 1 were not ready after 2 s")


def test_a_lost_replica_does_not_affect_another(make_executor):
    """The loss of a replica causes no event in another replica's executor."""
    first, second = (make_executor(*PAIR, "parallel_config.data_parallel=2", replica=index) for index in (0, 1))
    for executor in (first, second):
        events_until(executor, AgentReady)
    os.kill(pids(first)[1], signal.SIGKILL)
    events_until(first, AgentLost)
    second.submit(prefill(0, 5))
    assert results(second, 1)[0].sampled_ids == [stub_token(1, 0)]
    assert [agent["state"] for agent in second.agents()] == ["ready", "ready"]
    events_until(first, AgentReady)


def test_shared_memory_larger_than_the_disk(make_executor, monkeypatch, record_property):
    def full(descriptor, offset, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        AgentStartError, match=r"^/dev/shm has no room for \d+ bytes of step slots and exchange: No space"
    ):
        make_executor(*PAIR)
    record_property("names_left", f"{len(shm_entries())} of 1")
    assert shm_entries() == set()


def test_a_shared_memory_folder_without_write_permission(make_executor, monkeypatch, record_property):
    def refuse(descriptor, offset, size):
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(AgentStartError, match=r"^/dev/shm is not writable: Permission denied; make it writable for"):
        make_executor(*PAIR)
    record_property("names_left", f"{len(shm_entries())} of 1")
    assert shm_entries() == set()


def test_events_of_a_lost_group_are_not_delivered_late(make_executor):
    """One poll finds both the result of a step and the end of an agent.

    The result is delivered before the loss, and no event of the group follows the loss.
    """
    executor = make_executor(*PAIR)
    events_until(executor, AgentReady)
    executor.submit(prefill(0, 5))
    time.sleep(0.3)
    os.kill(pids(executor)[0], signal.SIGKILL)
    time.sleep(0.3)
    events = events_until(executor, AgentLost)
    assert isinstance(events[-1], AgentLost)
    assert [event.seq for event in events if isinstance(event, StepResult)] in ([], [0])
