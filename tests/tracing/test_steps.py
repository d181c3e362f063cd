"""Tests the steps in traces. Any number of steps becomes a bounded number of groups, and only traced requests get
steps.
"""

import math

import pytest

from llm_serving.engine.step_traces import trace_step
from llm_serving.request import Request
from llm_serving.sampling_params import SamplingParams
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepKind, StepResult
from llm_serving.tracing.steps import MAX_GROUPS, StepGroup, StepGroups


def step(number: int, kind: str = "decode") -> StepGroup:
    return StepGroup(number, number + 0.5, frozenset((kind,)), 1, 1, number, 2 * number, 0.5 + number / 1e4, 3, 5, 7)


@pytest.mark.parametrize("count", [0, 1, MAX_GROUPS, MAX_GROUPS + 1, 100, 1000, 5000])
def test_no_step_is_lost_and_the_groups_are_bounded(count: int) -> None:
    groups = StepGroups()
    for number in range(count):
        groups.add(step(number))
    found = groups.all()
    size = max(1, 2 ** math.ceil(math.log2(max(1, count) / MAX_GROUPS)))
    assert [one.steps for one in found[:-1]] == [size] * len(found[:-1])
    assert MAX_GROUPS / 2 < len(found) <= MAX_GROUPS or count <= MAX_GROUPS == len(found) or count == len(found)
    assert sum(one.steps for one in found) == sum(one.request_tokens for one in found) == count
    assert sum(one.graph_us for one in found) == 5 * count
    first = 0
    for one in found:
        last = first + one.steps - 1
        assert (one.start, one.end, one.sequences, one.tokens) == (first, last + 0.5, last, 2 * last)
        assert one.slowest == 0.5 + last / 1e4
        first = last + 1


def test_a_group_names_the_kinds_of_its_steps() -> None:
    both = step(1).joined(step(2, "mixed"))
    assert both.attributes()["llm_serving.step.kind"] == "decode+mixed"
    assert both.attributes()["llm_serving.step.agent_queue_seconds"] == 6e-6


class Recorder:
    def __init__(self) -> None:
        self.steps: list[tuple[int, bool]] = []
        self.groups: list[StepGroup] = []

    def step(self, step: StepGroup, *, has_token: bool) -> None:
        self.steps.append((step.request_tokens, has_token))
        self.groups.append(step)


def request(name: str, trace: Recorder | None) -> Request:
    return Request(name, [1, 2], SamplingParams(), 0.0, frozenset(), trace=trace)


def test_a_step_is_added_to_the_traced_requests_in_it() -> None:
    chunk, token, drafts, ended = (Recorder() for _ in range(4))
    requests = [request("a", chunk), request("b", token), request("c", drafts), request("d", ended), request("e", None)]
    requests[3].status = requests[3].status.FINISHED
    columns = [requests[index] for index in (0, 1, 2, 2, 3, 4)]
    made = ScheduledStep(4, StepKind.MIXED, columns, list(range(6)), [1] * 12, [7, 1, 1, 1, 1, 1])
    updates = [RequestUpdate(requests[index], 9, index) for index in (1, 2, 2, 4)]
    trace_step(made, StepResult(4, queue_us=250_000, graph_us=20), updates, 10.0, 11.0)
    assert chunk.steps == [(7, False)]
    assert token.steps == [(1, True)]
    assert drafts.steps == [(2, True)]
    assert ended.steps == []
    [group] = token.groups
    assert (group.start, group.end, group.sequences, group.tokens) == (10.25, 11.0, 6, 12)


def test_a_request_that_the_step_ends_gets_the_step_and_a_failed_step_is_left_out() -> None:
    recorder = Recorder()
    ended = request("a", recorder)
    ended.status = ended.status.FINISHED
    made = ScheduledStep(4, StepKind.DECODE, [ended], [0], [1], [1])
    trace_step(made, StepResult(4, error="broken"), [RequestUpdate(ended, error="broken")], 1.0, 2.0)
    assert recorder.steps == []
    trace_step(made, StepResult(4), [RequestUpdate(ended, 3, 0)], 1.0, 2.0)
    assert recorder.steps == [(1, True)]
