"""Tests light keys: tenants with few requests while another tenant has many. The clock is virtual."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llm_serving.admission.light_keys import LIGHT_SHARE, MAX_LIGHT_STREAK, MEMORY_S, LightKeys
from llm_serving.flight.reader import read_recording
from llm_serving.flight.state import RecordingCodec, ReplayCodec, restore_state
from llm_serving.request import Request
from llm_serving.scheduler.limits import Policy
from llm_serving.scheduler.output import ScheduledStep, StepKind
from llm_serving.scheduler.scheduler import Scheduler
from support.fakes import make_limits, make_request
from support.recorded_runs import recorded_simulation
from support.simulation import Simulation, random_run
from support.sweeps import with_sweeps
from tools.replaying.replayer import replay

POLICIES = list(Policy)
FILLING = [policy for policy in POLICIES if policy is not Policy.DECODE_FIRST]
"""The policies under which one key fills all batch rows."""
ROWS = 32
RESERVED = ROWS // 16
MANY = {"num_blocks": 600, "max_num_seqs": ROWS, "decode_batch_size": ROWS, "max_num_batched_tokens": 128}


def ask(name: str, tenant: str, max_tokens: int = 30, *, arrival: float = 0.0) -> Request:
    request = make_request(name, 6, max_tokens, arrival=arrival)
    request.tenant = tenant
    return request


def heavy(count: int, max_tokens: int = 30) -> list[Request]:
    return [ask(f"h{index}", "heavy", max_tokens + index % 7) for index in range(count)]


def running(simulation: Simulation, tenant: str) -> int:
    return sum(sequence.request.tenant == tenant for sequence in simulation.scheduler._running)


def flooded(policy: Policy, **changes: Any) -> Simulation:
    """Returns a simulation in which a heavy key has all batch rows and many waiting requests."""
    simulation = Simulation(make_limits(**{**MANY, "policy": policy, "decode_steps_ahead": 0, **changes}))
    simulation.add(*heavy(4 * ROWS))
    for _ in range(60):
        if running(simulation, "heavy") == ROWS:
            return simulation
        simulation.step()
    raise AssertionError("the heavy key does not fill the rows")


def steps_to_start(simulation: Simulation, request: Request) -> int:
    """Adds a request, and returns the number of steps until it starts."""
    simulation.add(request)
    for number in range(500):
        simulation.schedule()
        if request.first_scheduled_time is not None:
            return number
        simulation.answer()
    raise AssertionError("the request does not start")


def flooded_by_several(policy: Policy, num_keys: int = 4, num_rows: int = ROWS) -> Simulation:
    """Returns a simulation in which several heavy keys share all batch rows and have many waiting requests."""
    size = {"max_num_seqs": num_rows, "decode_batch_size": num_rows, "num_blocks": 40 * num_rows}
    simulation = Simulation(make_limits(**{**MANY, **size}, policy=policy, decode_steps_ahead=0))
    output = 30 * num_rows // ROWS
    simulation.add(*(ask(f"h{index}", f"heavy{index % num_keys}", output + index % 7) for index in range(4 * num_rows)))
    for _ in range(60):
        if len(simulation.scheduler._running) == num_rows:
            return simulation
        simulation.step()
    raise AssertionError("the heavy keys do not fill the rows")


def finish_one(simulation: Simulation, request: Request) -> None:
    while not request.is_finished:
        simulation.step()


@pytest.mark.parametrize("policy", FILLING)
def test_the_second_request_of_a_light_key_finds_a_free_row(policy: Policy) -> None:
    simulation = flooded(policy)
    first = ask("l0", "light", 20)
    steps_to_start(simulation, first)
    finish_one(simulation, first)
    for _ in range(40):
        simulation.step()
    assert running(simulation, "heavy") == ROWS - RESERVED
    assert steps_to_start(simulation, ask("l1", "light")) <= 1
    simulation.finish()


def test_without_the_setting_nothing_is_reserved() -> None:
    simulation = flooded(Policy.CHUNKED, light_keys_first=False)
    first = ask("l0", "light", 20)
    steps_to_start(simulation, first)
    finish_one(simulation, first)
    for _ in range(8):
        simulation.step()
    assert running(simulation, "heavy") > ROWS - RESERVED
    simulation.finish()


@pytest.mark.parametrize("policy", FILLING)
def test_the_reserve_ends_when_no_light_key_was_seen_for_some_time(policy: Policy) -> None:
    simulation = flooded(policy)
    simulation.add(*heavy_later(4 * ROWS))
    first = ask("l0", "light", 1)
    steps_to_start(simulation, first)
    finish_one(simulation, first)
    simulation.now += MEMORY_S
    most = 0
    for _ in range(80):
        simulation.step()
        most = max(most, running(simulation, "heavy"))
    assert most == ROWS
    simulation.finish()


def heavy_later(count: int) -> list[Request]:
    return [ask(f"later{index}", "heavy", 20 + index % 5) for index in range(count)]


@pytest.mark.parametrize("policy", [Policy.CHUNKED, Policy.SLO])
def test_the_prompt_of_a_light_key_gets_a_step_of_its_own(policy: Policy) -> None:
    simulation = flooded(policy)
    warm = ask("l0", "light", 1)
    steps_to_start(simulation, warm)
    finish_one(simulation, warm)
    for _ in range(40):
        simulation.step()
    request = ask("l1", "light")
    steps_to_start(simulation, request)
    [step] = [each for each in simulation.steps if request in each.requests]
    assert step.requests == [request]
    simulation.finish()


def with_a_queued_step(policy: Policy, **changes: Any) -> Simulation:
    """Returns a simulation of a flood in which one step runs and another one waits at the agent.

    A light key had a request before. So batch rows and blocks are free for its next one.
    """
    simulation = flooded(policy, decode_steps_ahead=1, **changes)
    warm = ask("l0", "light", 1)
    steps_to_start(simulation, warm)
    finish_one(simulation, warm)
    for _ in range(40):
        simulation.step()
    simulation.schedule()
    simulation.device.begin()
    assert len(simulation.device.queue) == 2
    return simulation


@pytest.mark.parametrize("policy", [Policy.CHUNKED, Policy.SLO])
def test_the_prompt_of_a_light_key_runs_before_a_queued_step(policy: Policy) -> None:
    simulation = with_a_queued_step(policy, runs_light_prefills_first=True)
    queued = [slot.seq for slot in simulation.device.queue]
    request = ask("l1", "light", arrival=simulation.now)
    simulation.add(request)
    [step] = simulation.schedule()
    assert (step.kind, step.requests, step.overtakes) == (StepKind.PREFILL, [request], True)
    for _ in range(3):
        simulation.run()
    assert simulation.device.ran[-3:] == [queued[0], step.seq, queued[1]]
    simulation.finish()


@pytest.mark.parametrize("policy", [Policy.CHUNKED, Policy.SLO])
def test_if_the_agent_keeps_the_order_the_prompt_of_a_light_key_waits_for_queued_steps(policy: Policy) -> None:
    simulation = with_a_queued_step(policy)
    simulation.add(ask("l1", "light", arrival=simulation.now))
    assert simulation.schedule() == []
    simulation.finish()
    assert not any(step.overtakes for step in simulation.steps)


@pytest.mark.parametrize("policy", [Policy.CHUNKED, Policy.SLO])
def test_requests_of_heavy_keys_overtake_no_step(policy: Policy) -> None:
    simulation = with_a_queued_step(policy, runs_light_prefills_first=True)
    simulation.add(*heavy_later(4))
    assert simulation.schedule() == []
    simulation.finish()
    overtaking = [step for step in simulation.steps if step.overtakes]
    assert [[request.request_id for request in step.requests] for step in overtaking] == [["l0"]]


def test_without_light_keys_first_no_step_overtakes() -> None:
    simulation = flooded(Policy.SLO, decode_steps_ahead=1, light_keys_first=False, runs_light_prefills_first=True)
    simulation.add(*(ask(f"l{index}", "light", arrival=simulation.now) for index in range(3)))
    simulation.finish()
    assert not any(step.overtakes for step in simulation.steps)


def test_the_second_chunk_of_a_prompt_does_not_overtake_the_first() -> None:
    """The prompt takes three steps of 16 tokens. A mixed step comes after ``MAX_LIGHT_STREAK`` of its own steps.

    The fake device also checks that no step overtakes an earlier step of the same sequence.
    """
    simulation = with_a_queued_step(Policy.CHUNKED, runs_light_prefills_first=True, chunk_tokens=16, num_blocks=900)
    request = make_request("l1", 44, 4, arrival=simulation.now)
    request.tenant = "light"
    simulation.add(request)
    [first] = simulation.schedule()
    assert (first.query_lens, first.overtakes) == ([16], True)
    simulation.finish()
    assert request.is_finished


def test_a_restored_scheduler_knows_which_step_overtakes() -> None:
    simulation = with_a_queued_step(Policy.CHUNKED, runs_light_prefills_first=True)
    simulation.add(ask("l1", "light", arrival=simulation.now))
    simulation.schedule()
    state = msgspec.msgpack.encode(simulation.scheduler.snapshot(RecordingCodec(None)))
    copy = Scheduler(simulation.limits)
    restore_state(copy, msgspec.msgpack.decode(state), ReplayCodec(keeps_tokens=False))
    assert [step.overtakes for step in copy.steps_in_flight()] == [False, False, True]


@pytest.mark.parametrize("policy", [Policy.CHUNKED, Policy.SLO])
def test_a_key_with_several_requests_is_light_beside_a_flood_from_several_keys(policy: Policy) -> None:
    """Each of the four heavy keys has a quarter of the flood, and many times the requests of the light key."""
    simulation = flooded_by_several(policy, num_rows=2 * ROWS)
    for index in range(3):
        steps_to_start(simulation, ask(f"l{index}", "light", 200, arrival=simulation.now))
    for _ in range(40):
        simulation.step()
    request = ask("l3", "light", arrival=simulation.now)
    assert steps_to_start(simulation, request) <= 1
    [step] = [each for each in simulation.steps if request in each.requests and each.kind is StepKind.PREFILL]
    assert step.requests == [request]
    simulation.finish()


@pytest.mark.parametrize("policy", [Policy.CHUNKED, Policy.SLO])
def test_a_key_with_a_large_part_of_the_batch_is_not_light_however_many_requests_wait(policy: Policy) -> None:
    """The key always has six of the 32 running requests. It has less than a 16th of all requests."""
    simulation = flooded_by_several(policy)
    for index in range(6):
        steps_to_start(simulation, ask(f"s{index}", "steady", 200, arrival=simulation.now))
    simulation.add(*(ask(f"w{index}", f"heavy{index % 4}", arrival=simulation.now) for index in range(4 * ROWS)))
    for _ in range(20):
        simulation.step()
    assert running(simulation, "steady") == 6
    before = len(simulation.steps)
    simulation.add(ask("s6", "steady", arrival=simulation.now))
    for _ in range(4):
        simulation.step()
    assert not any(
        {request.tenant for request in step.requests} == {"steady"} for step in list(simulation.steps)[before:]
    )
    simulation.finish()


def test_rows_are_reserved_while_a_light_key_runs_and_never_waited_for_a_row() -> None:
    limits = make_limits(**MANY, policy=Policy.CHUNKED, decode_steps_ahead=0)
    simulation = Simulation(limits)
    first = ask("l0", "light", 200)
    simulation.add(first)
    while first.first_token_time is None:
        simulation.step()
    simulation.add(*heavy(4 * ROWS))
    most = 0
    for _ in range(40):
        simulation.step()
        most = max(most, running(simulation, "heavy"))
    assert most == ROWS - 1 - RESERVED
    simulation.finish()


@pytest.mark.parametrize("policy", [Policy.CHUNKED, Policy.SLO])
def test_no_key_is_light_among_many_keys_with_similar_loads(policy: Policy) -> None:
    def steps(light_keys_first: bool) -> list[tuple[object, ...]]:
        simulation = Simulation(make_limits(**MANY, policy=policy, light_keys_first=light_keys_first))
        simulation.add(*(ask(f"r{index}", f"key{index % 20}", 20 + index % 9) for index in range(160)))
        simulation.finish()
        return [(s.kind, s.reason, s.rows, s.token_ids, s.starts, s.query_lens) for s in simulation.steps]

    assert steps(True) == steps(False)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("policy", [Policy.CHUNKED, Policy.SLO])
def test_light_keys_leave_steps_to_the_others(policy: Policy, first: bool) -> None:
    """A new light key arrives before each step. The heavy key still decodes after ``MAX_LIGHT_STREAK`` steps."""
    simulation = flooded(policy, runs_light_prefills_first=first, decode_steps_ahead=int(first))
    for index in range(60):
        simulation.add(ask(f"l{index}", f"light{index}", 1, arrival=simulation.now))
        simulation.step()
        simulation.device.begin()  # an agent begins its next step as soon as a step ends
    streak = longest = 0
    for step in (simulation.steps[seq] for seq in simulation.device.ran):
        streak = streak + 1 if only_light(step) else 0
        longest = max(longest, streak)
    assert longest == MAX_LIGHT_STREAK
    simulation.finish()


def only_light(step: ScheduledStep) -> bool:
    return all(request.tenant.startswith("light") for request in step.requests)


def test_a_light_key_that_always_waits_does_not_starve_the_others() -> None:
    """Whenever a request starts, the simulation also checks the bound of the keys' virtual token counters."""
    simulation = flooded(Policy.SLO)
    before = running_ids(simulation)
    live: list[Request] = []
    for index in range(1500):
        live = [request for request in live if not request.is_finished]
        if len(live) < 4:
            live.append(ask(f"l{index}", "light", 30, arrival=simulation.now))
            simulation.add(live[-1])
        simulation.step()
        if len(simulation.requests) < LIGHT_SHARE * 6:
            break
    assert running_ids(simulation).isdisjoint(before)
    started = {request.request_id for step in simulation.steps for request in step.requests}
    assert sum(name.startswith("h") for name in started) > 2 * ROWS
    simulation.finish()


def running_ids(simulation: Simulation) -> set[str]:
    return {s.request.request_id for s in simulation.scheduler._running if s.request.tenant == "heavy"}


@pytest.mark.parametrize("tenant", ["", "only"])
@pytest.mark.parametrize("policy", POLICIES)
def test_with_one_key_or_none_no_step_changes(policy: Policy, tenant: str) -> None:
    def steps(light_keys_first: bool) -> list[tuple[object, ...]]:
        rng = random.Random(5)
        limits = make_limits(policy=policy, light_keys_first=light_keys_first, runs_light_prefills_first=True)
        simulation = Simulation(limits)
        requests = [ask(f"r{index}", tenant, rng.randint(1, 20)) for index in range(120)]
        random_run(simulation, requests, rng, aborts=0.02)
        return [(s.kind, s.reason, s.rows, s.token_ids, s.starts, s.query_lens, s.overtakes) for s in simulation.steps]

    assert steps(True) == steps(False)


def mixed_requests(rng: random.Random) -> list[Request]:
    """Returns the requests of a heavy key and of light keys, in random order. Some have another priority."""
    requests = [*heavy(90, 8), *(ask(f"l{index}", f"light{index % 5}", 6) for index in range(30))]
    for request in requests:
        request.priority = rng.choice((0, 0, 0, 1))
    rng.shuffle(requests)
    return requests


@pytest.mark.parametrize("seed", with_sweeps([(seed,) for seed in range(3)], bool))
@pytest.mark.parametrize("policy", POLICIES)
def test_random_runs_lose_no_request_row_or_block(policy: Policy, seed: int) -> None:
    """The simulation compares every text, and checks rows, blocks and counters after each operation."""
    rng = random.Random(seed)
    rows = rng.choice((2, 8, 24))
    limits = make_limits(policy=policy, num_blocks=90, max_num_seqs=rows, decode_batch_size=rows,
                         num_host_blocks=rng.choice((0, 40)), prefix_cache=rng.random() < 0.5)  # fmt: skip
    simulation = Simulation(limits)
    random_run(simulation, mixed_requests(rng), rng, aborts=0.02)
    assert simulation.scheduler.is_idle


def test_requests_are_counted_only_after_a_change_and_the_counts_are_always_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look, num_counted = LightKeys.look, 0
    count = LightKeys._count

    def checked_look(self: LightKeys, now: float) -> bool:
        result = look(self, now)
        found = self._light
        count(self)
        assert self._light == found
        return result

    def noted_count(self: LightKeys) -> None:
        nonlocal num_counted
        num_counted += 1
        count(self)

    monkeypatch.setattr(LightKeys, "look", checked_look)
    monkeypatch.setattr(LightKeys, "_count", noted_count)
    rng = random.Random(4)
    simulation = Simulation(make_limits(policy=Policy.SLO, num_blocks=90, max_num_seqs=8, decode_batch_size=8))
    random_run(simulation, mixed_requests(rng), rng, aborts=0.05)
    assert num_counted > 50
    before = num_counted
    simulation.add(*heavy_later(20))
    for _ in range(30):
        simulation.schedule()
    assert num_counted - before <= 4


@pytest.mark.parametrize("chunk_tokens", [8, 64])
@pytest.mark.parametrize("seed", with_sweeps([(seed,) for seed in range(3)], bool))
@pytest.mark.parametrize("policy", [Policy.CHUNKED, Policy.SLO])
def test_steps_that_overtake_change_no_text(policy: Policy, seed: int, chunk_tokens: int) -> None:
    """The simulation compares every text, and checks that no two steps in flight conflict in any order."""
    rng = random.Random(seed)
    limits = make_limits(policy=policy, num_blocks=rng.choice((60, 200)), max_num_seqs=24, decode_batch_size=24,
                         num_host_blocks=rng.choice((0, 40)), prefix_cache=seed % 2 == 0, chunk_tokens=chunk_tokens,
                         runs_light_prefills_first=True)  # fmt: skip
    simulation = Simulation(limits)
    random_run(simulation, mixed_requests(rng), rng, aborts=0.02)
    ran = simulation.device.ran
    assert any(simulation.steps[seq].overtakes for place, seq in enumerate(ran) if min(ran[place:]) < seq)


@pytest.mark.parametrize("policy", [Policy.SLO, Policy.CHUNKED, Policy.PREFILL_FIRST])
def test_a_recording_with_light_keys_replays_identically(tmp_path: Path, policy: Policy) -> None:
    rng = random.Random(3)
    simulation, recorder = recorded_simulation(
        tmp_path, 1 << 18, policy=policy, num_blocks=200, max_num_seqs=24, decode_batch_size=24,
        runs_light_prefills_first=True,
    )  # fmt: skip
    random_run(simulation, mixed_requests(rng), rng, aborts=0.02)
    recorder.close()
    stretch = read_recording(tmp_path)[-1]
    result = replay(stretch)
    assert result.difference is None
    assert result.num_steps > 50
