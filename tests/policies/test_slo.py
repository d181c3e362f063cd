"""Tests which requests keep their objectives under policy ``slo``, on a device with known step times."""

from __future__ import annotations

from itertools import pairwise

import pytest

from llm_serving.policies.slo import LONGEST_STEP, MIN_LIGHT_TOKENS
from llm_serving.request import Request
from llm_serving.scheduler.limits import Policy, SchedulerLimits
from llm_serving.scheduler.output import ScheduledStep, StepKind, StepReason
from support.fakes import make_limits, make_request
from support.simulation import Simulation

BASE, ROW, PROMPT = 0.004, 0.0001, 0.0002


class TimedSimulation(Simulation):
    """A simulation whose steps take ``BASE + ROW * decoding sequences + PROMPT * prompt tokens`` seconds."""

    free_prompt_tokens = 0
    """Number of prompt tokens of a step that cost no time, as if the device read weights at the same time."""

    def run(self) -> bool:
        if not self.device.queue:
            return False
        seq = min(slot.seq for slot in self.device.queue)
        super().run()
        result = self.answers[-1]
        seconds = step_seconds(self.steps[seq], self.free_prompt_tokens)
        self.now += seconds
        result.graph_us = round(seconds * 1e6)
        return True


def step_seconds(step: ScheduledStep, free_prompt_tokens: int = 0) -> float:
    rows = sum(query_len == 1 for query_len in step.query_lens)
    return BASE + ROW * rows + PROMPT * max(step.num_tokens - rows - free_prompt_tokens, 0)


def slo_limits(**changes: object) -> SchedulerLimits:
    values: dict[str, object] = {
        "policy": Policy.SLO,
        "decode_steps_ahead": 0,
        "num_blocks": 2000,
        "block_size": 16,
        "max_model_len": 2000,
        "max_prompt_len": 1500,
        "max_num_batched_tokens": 1500,
        "max_num_seqs": 64,
        "prefill_batch_size": 8,
        "decode_batch_size": 64,
    }
    return make_limits(**{**values, **changes})


def timed(**changes: object) -> TimedSimulation:
    return TimedSimulation(slo_limits(**changes))


def learn(simulation: TimedSimulation) -> None:
    """Runs some requests, so that the scheduler's cost model learns the times of steps."""
    for index in range(12):
        simulation.add(make_request(f"t{index}", 20 * (index + 1), 3 * (index % 4 + 1), arrival=simulation.now))
        simulation.step()
    simulation.finish()


def gaps(simulation: TimedSimulation, request: Request) -> list[float]:
    """Returns the duration in seconds of each step in which ``request`` decodes."""
    return [
        step_seconds(step)
        for step in simulation.steps
        for other, start in zip(step.requests, step.starts, strict=True)
        if other is request and start >= len(request.prompt_token_ids)
    ]


def test_a_long_prompt_keeps_the_time_between_tokens() -> None:
    simulation = timed(tbt_objective=0.03, ttft_objective=60.0)
    learn(simulation)
    row = make_request("row", 5, 150, arrival=simulation.now)
    simulation.add(row)
    for _ in range(3):
        simulation.step()
    simulation.add(make_request("long", 1500, 2, arrival=simulation.now))
    simulation.finish()
    with_prompt = [step for step in simulation.steps if step.kind is StepKind.MIXED and row in step.requests]
    assert {step.reason for step in with_prompt} == {StepReason.BUDGET_CUT}
    assert 0.02 < max(gaps(simulation, row)) <= 0.03
    assert len(with_prompt) >= 1500 * PROMPT / 0.03


def test_an_almost_late_prompt_gets_the_lead_of_decoding_sequences() -> None:
    simulation = timed(tbt_objective=0.03, ttft_objective=0.34)
    learn(simulation)
    row = make_request("row", 5, 400, arrival=simulation.now)
    simulation.add(row)
    for _ in range(200):
        simulation.step()
    long = make_request("long", 1500, 2, arrival=simulation.now)
    simulation.add(long)
    simulation.finish()
    assert long.first_token_time is not None
    assert row.finish_time is not None
    assert row.first_token_time is not None
    assert long.first_token_time - long.arrival_time <= 0.34
    assert max(gaps(simulation, row)) > 0.03
    assert (row.finish_time - row.first_token_time) / 399 <= 0.03


def test_prompts_get_only_the_tokens_that_they_need() -> None:
    """The objectives would allow steps of 900 tokens.

    The prompt gets only the smaller steps of policy ``chunked``, because it is on time with them.
    """
    simulation = timed(tbt_objective=0.2, ttft_objective=5.0)
    row, _ = row_and_long_prompt(simulation)
    assert max(gaps(simulation, row)) == BASE + ROW + 255 * PROMPT


def test_no_step_is_longer_than_twice_the_objective() -> None:
    """A step is at most twice as long as the objective for the time between tokens, which is 30 ms here.

    The sequence has got its tokens faster than the objective demands. So its mean time between tokens would still be
    good with a step of 0.3 s.
    """
    simulation = timed(tbt_objective=0.03, ttft_objective=0.34)
    row, long = row_and_long_prompt(simulation, steps_ahead=200)
    assert 0.03 < max(gaps(simulation, row)) <= LONGEST_STEP * 0.03
    assert long.first_token_time is not None
    assert long.first_token_time - long.arrival_time <= 0.34


def test_sequences_behind_their_pace_still_decode() -> None:
    """If all requests miss their objectives in any case, sequences still decode, in the same steps as policy
    ``chunked``.
    """
    simulation = timed(tbt_objective=0.001, ttft_objective=0.01)
    row, _ = row_and_long_prompt(simulation)
    assert max(gaps(simulation, row)) == BASE + ROW + 255 * PROMPT


def test_small_steps_do_not_predict_large_ones() -> None:
    """Small steps must not predict the cost of large steps.

    Here, 240 prompt tokens cost almost nothing, because the device reads the weights at the same time.
    """
    simulation = timed(tbt_objective=0.1, ttft_objective=0.3)
    simulation.free_prompt_tokens = 240
    row, _ = row_and_long_prompt(simulation)
    prompts = [step.num_tokens - 1 for step in simulation.steps if step.kind is StepKind.MIXED and row in step.requests]
    sizes = [size for size in prompts if size > 1]
    assert sizes[0] <= 2 * 255
    assert all(later <= 2 * earlier for earlier, later in pairwise(sizes))


def row_and_long_prompt(simulation: TimedSimulation, steps_ahead: int = 3) -> tuple[Request, Request]:
    """Runs a decoding sequence, and a prompt of 1500 tokens that arrives later, until both end.

    Returns both requests.
    """
    learn(simulation)
    row = make_request("row", 5, 400, arrival=simulation.now)
    simulation.add(row)
    for _ in range(steps_ahead):
        simulation.step()
    long = make_request("long", 1500, 2, arrival=simulation.now)
    simulation.add(long)
    simulation.finish()
    return row, long


def test_only_requests_that_keep_their_pace_start() -> None:
    """A request starts only if all sequences then keep the objective of 6.4 ms between tokens, with a margin of 0.64
    ms.

    A step takes 4 ms, plus 0.1 ms for each sequence. So about 17 sequences fit.
    """
    simulation = timed(tbt_objective=0.0064, ttft_objective=60.0)
    learn(simulation)
    simulation.add(*(make_request(f"r{index}", 4, 40, arrival=simulation.now) for index in range(40)))
    before = len(simulation.steps)
    simulation.finish()
    most = max(step.num_seqs for step in simulation.steps[before:] if step.kind is StepKind.DECODE)
    assert 10 <= most <= 18


def test_late_requests_come_last_but_are_served() -> None:
    simulation = timed(max_num_seqs=1, ttft_objective=0.2, tbt_objective=1.0)
    learn(simulation)
    start = simulation.now
    late = [make_request(f"late{index}", 100, 2, arrival=start - 5.0) for index in range(3)]
    timely = [make_request(f"timely{index}", 100, 2, arrival=start) for index in range(3)]
    simulation.add(*late, *timely)
    simulation.finish()
    ends = {name: request.finish_time for name, request in simulation.requests.items() if not name.startswith("t0")}
    assert max(ends[r.request_id] or 0 for r in timely) < min(ends[r.request_id] or 0 for r in late)
    assert all(r.first_token_time is not None and r.first_token_time - start <= 0.2 for r in timely)


def test_the_tighter_objective_is_first() -> None:
    simulation = timed(max_num_seqs=1, tbt_objective=1.0)
    learn(simulation)
    slack, tight = make_request("slack", 100, 2, arrival=simulation.now), make_request("tight", 100, 2)
    tight.arrival_time = simulation.now
    slack.ttft_objective, tight.ttft_objective = 5.0, 0.5
    simulation.add(slack, tight)
    simulation.finish()
    assert tight.finish_time is not None
    assert slack.first_scheduled_time is not None
    assert tight.finish_time <= slack.first_scheduled_time


def test_without_measurements_slo_works_like_chunked() -> None:
    simulation = timed(chunk_tokens=40)
    simulation.add(make_request("row", 5, 9))
    simulation.step()
    simulation.add(make_request("long", 100, 2))
    (step,) = simulation.schedule()
    assert (step.reason, step.num_tokens) == (StepReason.BUDGET_SHARED, 40)
    simulation.finish()


def test_impossible_objectives_stop_no_request() -> None:
    simulation = timed(tbt_objective=0.001, ttft_objective=0.001)
    learn(simulation)
    simulation.add(*(make_request(f"r{index}", 30, 10, arrival=simulation.now) for index in range(30)))
    before = len(simulation.steps)
    simulation.finish()
    assert max(step.num_seqs for step in simulation.steps[before:]) >= 30


def taken_at_the_door(simulation: TimedSimulation, seconds: float, every_s: float, prompt: int = 4) -> int:
    """Returns the maximum number of waiting requests over some seconds.

    Requests arrive regularly, and are refused while the queue is full.
    """
    most, end, due, number = 0, simulation.now + seconds, simulation.now, 0
    while simulation.now < end:
        while due <= simulation.now:
            if simulation.scheduler.queue_full() is None:
                simulation.add(make_request(f"door{number}", prompt, 40, arrival=due))
                number += 1
            due += every_s
        simulation.step()
        most = max(most, simulation.scheduler.figures.waiting)
    simulation.finish()
    return most


def test_the_admission_limit_counts_batch_rows_that_keep_their_pace() -> None:
    """Only about 17 of the 64 batch rows can be used, because more sequences would miss the objective between tokens.

    The server takes at most 8 requests in addition to these 17. The unused batch rows do not count.
    """
    simulation = timed(tbt_objective=0.0064, ttft_objective=0.1, max_waiting_requests=8)
    learn(simulation)
    assert taken_at_the_door(simulation, 2.0, 0.0005) <= 8 + 18


def test_the_admission_limit_counts_requests_that_can_start_in_time() -> None:
    """A prompt of 100 tokens takes at least 20 ms, so fewer than ten requests can start within the objective of 0.2 s.
    """
    simulation = timed(ttft_objective=0.2, tbt_objective=1.0, max_waiting_requests=8)
    learn(simulation)
    assert taken_at_the_door(simulation, 2.0, 0.002, prompt=100) <= 8 + 10


@pytest.mark.parametrize("first", [False, True])
def test_steps_are_sent_late_for_light_keys_only_if_the_agent_keeps_the_order(first: bool) -> None:
    """A light key has just had a request. The next one must not wait for a queued step."""
    simulation = timed(decode_steps_ahead=1, runs_light_prefills_first=first)
    learn(simulation)
    for index in range(40):
        request = make_request(f"h{index}", 20, 400, arrival=simulation.now)
        request.tenant = "heavy"
        simulation.add(request)
    for _ in range(40):
        simulation.step()
    light = make_request("light", 20, 1, arrival=simulation.now)
    light.tenant = "light"
    simulation.add(light)
    while not light.is_finished:
        simulation.step()
    while simulation.device.queue:
        simulation.answer()
    simulation.schedule()
    assert simulation.scheduler.figures.steps_in_flight == (2 if first else 1)
    assert (simulation.scheduler.next_wakeup(simulation.now) is None) == first


class HiddenTime(TimedSimulation):
    """A simulation in which the time between two steps is longer than the step by ``hidden``, a fraction of the step.

    The agent does not report this time, for example because it waits for a processor core.
    """

    hidden = 0.2

    def run(self) -> bool:
        before = self.now
        ran = super().run()
        self.now += self.hidden * (self.now - before)
        return ran


def flood(simulation: Simulation, num_steps: int, *, output: int = 60, light: bool = False) -> list[Request]:
    """Runs steps while requests of the key "heavy" always wait. Returns those of these requests that have ended.

    With ``light``, a request of another light key arrives before each step.
    """
    requests: list[Request] = []
    for step in range(num_steps):
        while simulation.scheduler.figures.waiting < 8:
            requests.append(make_request(f"h{len(requests)}", 100, output, arrival=simulation.now))
            requests[-1].tenant = "heavy"
            simulation.add(requests[-1])
        if light and step > 20:
            one = make_request(f"l{step}", 200, 1, arrival=simulation.now)
            one.tenant = f"light{step}"
            simulation.add(one)
        simulation.step()
    return [request for request in requests if request.is_finished]


def per_token_s(request: Request) -> float:
    assert request.first_token_time is not None
    assert request.finish_time is not None
    return (request.finish_time - request.first_token_time) / (len(request.output_token_ids) - 1)


@pytest.mark.parametrize("hidden", [0.0, 0.1, 0.2])
def test_the_pace_is_kept_if_the_time_between_steps_is_longer_than_a_step(hidden: float) -> None:
    simulation = HiddenTime(slo_limits(tbt_objective=0.03, ttft_objective=1.0))
    simulation.hidden = hidden
    learn(simulation)
    ended = flood(simulation, 500)
    simulation.finish()
    assert len(ended) > 100
    late = [request.request_id for request in ended if per_token_s(request) > 0.03]
    assert len(late) <= len(ended) / 50


@pytest.mark.parametrize("objective", [None, 1000.0])
def test_a_stream_far_ahead_does_not_hide_that_others_are_behind(objective: float | None) -> None:
    """One stream has many tokens from a quiet time, or an objective of its own that it keeps easily."""
    simulation = HiddenTime(slo_limits(tbt_objective=0.03, ttft_objective=1.0))
    learn(simulation)
    ahead = make_request("ahead", 5, 1900, arrival=simulation.now)
    ahead.tbt_objective = objective
    simulation.add(ahead)
    for _ in range(800 if objective is None else 3):
        simulation.step()
    ended = flood(simulation, 300)
    assert not ahead.is_finished
    assert len(ended) > 100
    late = [request.request_id for request in ended if per_token_s(request) > 0.03]
    assert len(late) <= len(ended) / 50


def test_a_step_of_light_keys_is_not_tiny() -> None:
    simulation = timed(tbt_objective=0.03, ttft_objective=1.0, num_blocks=6000)
    learn(simulation)
    flood(simulation, 400, light=True)
    steps = [step for step in simulation.steps if all(one.tenant.startswith("light") for one in step.requests)]
    ends = [step for step in steps if any(step.do_sample)]
    assert len(steps) > 10
    assert min(step.num_tokens for step in steps if step not in ends) >= MIN_LIGHT_TOKENS


def test_steps_of_light_keys_leave_the_other_streams_their_pace() -> None:
    """Light keys always send. A step of their own would take up to 54 ms, and the objective between tokens is 30 ms."""
    simulation = timed(tbt_objective=0.03, ttft_objective=1.0, num_blocks=6000)
    learn(simulation)
    ended = flood(simulation, 600, light=True)
    alone = [step for step in simulation.steps if all(one.tenant.startswith("light") for one in step.requests)]
    simulation.finish()
    assert len(ended) > 20
    assert alone
    late = [request.request_id for request in ended if per_token_s(request) > 0.03]
    assert len(late) <= len(ended) / 10


class FreePrompts(Simulation):
    """A simulation in which each decoding sequence of a step takes 100 us and prompts take no time."""

    def run(self) -> bool:
        if not self.device.queue:
            return False
        step = self.steps[min(slot.seq for slot in self.device.queue)]
        super().run()
        self.answers[-1].graph_us = 100 * sum(query_len == 1 for query_len in step.query_lens)
        return True


def test_prompts_without_cost_do_not_limit_admission() -> None:
    simulation = FreePrompts(slo_limits())
    for index in range(12):
        simulation.add(make_request(f"t{index}", 20, 12))
        simulation.step()
    simulation.finish()
    simulation.add(*(make_request(f"r{index}", 20, 4) for index in range(30)))
    simulation.finish()
    assert len(simulation.ended) == 42
