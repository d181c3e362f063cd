"""Tests how the results of several agents are joined into one result of the step."""

import pytest

from llm_serving.errors import AgentLostError
from llm_serving.executor.step_join import StepJoin
from llm_serving.ipc.messages import StepDone, StepFailed


def done(seq, slot=0, **times):
    return StepDone(seq=seq, slot=slot, **times)


def failed(seq, text, slot=0, **known):
    return StepFailed(seq=seq, slot=slot, error=text, **known)


def test_the_last_answer_completes_a_step_with_the_times_of_the_agent_that_samples():
    join = StepJoin(3, first_rank=4, answering=2)
    assert join.add(1, done(7, queue_us=1, graph_us=30, fetched_bytes=3)) is None
    assert join.add(0, done(8)) is None
    assert join.add(2, done(7, queue_us=2, graph_us=10, sample_us=5, draft_us=4, fetched_bytes=6)) is None
    assert join.missing(7) == [4]
    assert join.missing(9) == [4, 5, 6]
    own = {"queue_us": 2, "graph_us": 10, "sample_us": 5, "draft_us": 4}
    assert join.add(0, done(7, queue_us=0, graph_us=20)) == done(7, **own, fetched_bytes=9)
    assert (join.torn, join.overdue_at) == (None, None)


def test_a_failure_of_all_agents_is_one_failure():
    join = StepJoin(2, first_rank=0)
    assert join.add(0, failed(1, "no")) is None
    assert join.add(1, failed(1, "no")) == failed(1, "no")
    join.add(1, failed(2, "second"))
    assert join.add(0, failed(2, "first")) == failed(2, "second; first")
    assert join.torn is None


def test_a_failure_of_some_agents_loses_the_group():
    join = StepJoin(3, first_rank=3)
    join.add(0, failed(1, "no"))
    join.add(1, done(1))
    assert join.torn is None, "the third may be on its way"
    assert join.add(2, failed(1, "neither")) == failed(1, "no; neither")
    assert join.torn == "agents 3, 5 failed step 1, and the rest of the group did not"


def test_a_sampling_that_fails_in_some_agents_keeps_the_group():
    join = StepJoin(3, first_rank=3)
    join.add(0, failed(1, "no", only_sampling=True))
    join.add(1, done(1))
    assert join.add(2, done(1)).error == "no"
    assert (join.torn, join.overdue_at) == (None, None)


def test_a_sampling_that_fails_does_not_hide_another_failure():
    join = StepJoin(3, first_rank=3)
    join.add(0, failed(1, "no", only_sampling=True))
    join.add(1, failed(1, "broken"))
    assert join.add(2, done(1)).error == "no; broken"
    assert join.torn == "agents 3, 4 failed step 1, and the rest of the group did not"


def test_agents_that_fail_in_different_ways_are_out_of_step():
    join = StepJoin(2, first_rank=0)
    join.add(0, failed(1, "no", only_sampling=True))
    join.add(1, failed(1, "broken"))
    assert join.torn == "agents 0, 1 failed step 1 in different ways"


def test_a_failure_is_not_waited_for_forever():
    join = StepJoin(2, first_rank=0)
    join.add(0, done(1))
    join.add(0, failed(2, "no"))
    due = join.overdue_at
    join.check_overdue(due - 0.01)
    assert join.torn is None
    join.check_overdue(due)
    assert join.torn == "agent 0 failed step 2, and no answer came from agents 1 within 5 s"
    assert join.take_failures() == [(2, "no")], "step 1 is void, not failed"
    assert (join.torn, join.overdue_at, join.missing(1)) == (None, None, [0, 1])


@pytest.mark.parametrize("answer", [done(1), done(1, slot=1), failed(1, "no")])
def test_two_answers_of_an_agent_to_a_step(answer):
    join = StepJoin(2, first_rank=0)
    join.add(0, done(1))
    with pytest.raises(AgentLostError, match="agent 0 answered step 1 in slot"):
        join.add(0, answer)
