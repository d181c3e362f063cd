"""Tests KV tiers with the scheduler and the fake device, whose next token is a hash of the blocks that it reads.

A block that was loaded from a wrong place, too early, or with another content therefore changes a text.
"""

from __future__ import annotations

import random

import pytest

from llm_serving.flight.reader import read_recording
from llm_serving.flight.recorder import as_scheduler
from llm_serving.flight.setup import record
from llm_serving.ipc.shm import MoveKind
from llm_serving.kvstore.shared import SharedTier
from llm_serving.scheduler.limits import Policy, PreemptionKind
from llm_serving.scheduler.output import BlockMove, ScheduledStep, StepKind, StepReason, StepResult
from support.fakes import make_limits, make_request
from support.recorded_runs import fail, some_requests
from support.simulation import random_run
from support.sweeps import with_sweeps
from support.tiered_simulation import NAMESPACE, ManualMover, TieredSimulation, disk_tier
from tools.replaying.replayer import replay

MOVES_OF_TIERS = (StepReason.LOAD, StepReason.STORE)
PROMPT = [2 + place % 50 for place in range(40)]


def tier_limits(**changes):
    return make_limits(**{"prefix_cache": True, "has_tiers": True, "num_blocks": 17, **changes})


def run_alone(simulation, name, prompt):
    request = make_request(name, prompt, 4)
    simulation.add(request)
    simulation.finish()
    return request


def fill_with_others(simulation, name):
    """Evicts all cached blocks of earlier requests, by a request that needs all blocks of the device."""
    run_alone(simulation, name, [50 - place % 49 for place in range(48)])
    run_alone(simulation, name + "2", [3 + place % 41 for place in range(48)])


def test_evicted_blocks_come_back_from_the_host():
    simulation = TieredSimulation(tier_limits(), tier_hosts=64)
    run_alone(simulation, "a", PROMPT)
    fill_with_others(simulation, "b")
    again = run_alone(simulation, "c", PROMPT)
    assert again.num_cached_tokens == 36, "nine full blocks come back; the last token is always computed"
    assert simulation.store.figures.hits["host"] >= 9
    assert StepReason.LOAD in {step.reason for step in simulation.steps}


def test_a_request_whose_blocks_are_being_loaded_is_not_held_up():
    """The load uses blocks, so the request lacks blocks until the load ends. It must not count as held up. Otherwise a
    router would move the request to another replica, possibly back to this one, and the next load would begin.
    """
    simulation = TieredSimulation(tier_limits(), tier_hosts=64)
    run_alone(simulation, "a", PROMPT)
    fill_with_others(simulation, "b")
    request = make_request("c", PROMPT, 4)
    simulation.add(request)
    assert simulation.schedule()[-1].reason is StepReason.LOAD
    assert not simulation.scheduler.capacity().is_held_up
    simulation.finish()
    assert request.num_cached_tokens == 36


def test_after_a_load_without_owner_the_next_request_is_not_held_up():
    """The load of "c" uses the blocks that "c2" needs, so "c2" is held up until the load ends. Then the load of "c2"
    takes the same number of blocks. So the number of free blocks does not show that "c2" fits now.
    """
    simulation = TieredSimulation(tier_limits(), tier_hosts=64)
    run_alone(simulation, "a", PROMPT)
    fill_with_others(simulation, "b")
    simulation.add(make_request("c", PROMPT, 4), make_request("c2", PROMPT, 4))
    assert simulation.schedule()[-1].reason is StepReason.LOAD
    simulation.end("c")
    simulation.schedule()
    assert simulation.scheduler.capacity().is_held_up
    simulation.answer()
    assert simulation.schedule()[-1].reason is StepReason.LOAD
    assert not simulation.scheduler.capacity().is_held_up
    simulation.finish()
    assert simulation.requests["c2"].num_cached_tokens == 36


def test_a_load_of_distrusted_blocks_adds_nothing_to_the_prefix_cache():
    simulation = TieredSimulation(tier_limits(), tier_hosts=64)
    run_alone(simulation, "a", PROMPT)
    fill_with_others(simulation, "b")
    simulation.add(make_request("c", PROMPT, 4))
    assert simulation.schedule()[-1].reason is StepReason.LOAD
    simulation.store.distrust()
    simulation.scheduler.distrust_blocks(simulation.now, recompute=False)
    simulation.finish()
    assert simulation.requests["c"].num_cached_tokens == 0


@pytest.mark.parametrize(("reason", "counts"), [(reason, reason in MOVES_OF_TIERS) for reason in StepReason])
def test_only_copies_of_the_tiers_teach_the_time_of_a_copy(reason, counts):
    """The tiers compare this time with the time to compute a block. Copies of hand-overs also check the blocks."""
    tiers = TieredSimulation(tier_limits(), tier_hosts=64).scheduler._tiers
    tiers.step_completed(ScheduledStep(0, StepKind.PREFILL, token_ids=[1] * 4), StepResult(0, graph_us=4000))
    before = tiers._block_s
    move = ScheduledStep(1, StepKind.MOVE, moves=[BlockMove(MoveKind.HAND_IN, 1, 1)], reason=reason)
    tiers.step_completed(move, StepResult(1, graph_us=1000))
    assert (tiers._block_s < before) is counts


def test_blocks_survive_a_restart_on_the_ssd(tmp_path):
    disk = disk_tier(tmp_path)
    run_alone(TieredSimulation(tier_limits(), 64, disk), "a", PROMPT)
    disk[0].close()
    after = TieredSimulation(tier_limits(), 64, disk_tier(tmp_path))
    assert run_alone(after, "b", PROMPT).num_cached_tokens == 36
    assert after.store.figures.hits == {"host": 0, "ssd": 9, "shared": 0}


def test_other_salts_find_nothing(tmp_path):
    """Requests of other keys have another salt, so they never get each other's blocks."""
    disk = disk_tier(tmp_path)
    run_alone(TieredSimulation(tier_limits(), 64, disk), "a", PROMPT)
    disk[0].close()
    after = TieredSimulation(tier_limits(), 64, disk_tier(tmp_path))
    request = make_request("b", PROMPT, 4)
    request.cache_salt = b"another key"
    after.add(request)
    after.finish()
    assert request.num_cached_tokens == 0
    assert after.store.figures.hits == {"host": 0, "ssd": 0, "shared": 0}


def test_a_damaged_record_is_a_miss_and_the_blocks_before_it_are_used(tmp_path):
    disk = disk_tier(tmp_path, segment_bytes=1 << 20)
    run_alone(TieredSimulation(tier_limits(), 64, disk), "a", PROMPT)
    disk[0].close()
    [segment] = tmp_path.glob("*/*.kv")
    data = bytearray(segment.read_bytes())
    record_bytes = len(data) // disk[0].figures.blocks
    data[4 * record_bytes - 1] ^= 1
    segment.write_bytes(data)
    after = TieredSimulation(tier_limits(), 64, disk_tier(tmp_path))
    assert run_alone(after, "b", PROMPT).num_cached_tokens == 12
    assert after.store.figures.disk.rejected == 1


def test_after_a_failed_self_check_nothing_of_the_run_is_used(tmp_path):
    simulation = TieredSimulation(tier_limits(), 64, disk_tier(tmp_path))
    run_alone(simulation, "a", PROMPT)
    simulation.mover.run()
    simulation.lose_agent(blameless=True)
    assert run_alone(simulation, "b", PROMPT).num_cached_tokens == 0


def shared_tier(folder):
    """Returns an open tier in a shared folder, with a mover of the test's own."""
    tier, mover = SharedTier(folder, 1 << 30, lambda text: None), ManualMover()
    tier.mover = mover
    tier.open(lambda: NAMESPACE)
    mover.run()
    return tier, mover


def test_a_request_with_blocks_that_another_server_distrusts_is_computed_again(tmp_path):
    """Two servers share a folder. The second one reads blocks of the first one, whose self-check fails then."""
    first = TieredSimulation(tier_limits(), 64, shared_tier(tmp_path))
    run_alone(first, "a", PROMPT)
    first.mover.run()
    tier, mover = shared_tier(tmp_path)
    second = TieredSimulation(tier_limits(), 64, (tier, mover))
    request = make_request("b", PROMPT, 12, ignore_eos=True)
    second.add(request)
    while len(request.output_token_ids) < 3:
        second.step()
    assert request.num_cached_tokens == 36
    assert second.store.figures.hits["host"] + second.store.figures.hits["shared"] == 9
    num_steps, woken = len(second.steps), []
    tier.when_changed(lambda: woken.append(1))
    tier.look()
    assert not second.store.has_news
    first.store.distrust()
    first.mover.run()
    tier.look()
    assert (tier.num_doubts, woken, second.store.has_news) == (1, [1], True)
    second.finish()
    assert not second.store.has_news
    again = [step for step in second.steps[num_steps:] if step.kind is StepKind.PREFILL]
    assert again[0].starts == [0], "all tokens are computed again"
    mover.run()
    assert not list(tmp_path.rglob("*.kv")), "the blocks of the second server may depend on those of the first one"


def test_a_lost_agent_leaves_the_blocks_on_the_ssd(tmp_path):
    simulation = TieredSimulation(tier_limits(), 64, disk_tier(tmp_path))
    run_alone(simulation, "a", PROMPT)
    simulation.mover.run()
    simulation.lose_agent()
    assert run_alone(simulation, "b", PROMPT).num_cached_tokens == 36


def play(folder, seed, **changes):
    """Plays a random run with few blocks, aborts, lost agents and failed steps. ``finish`` compares every text."""
    rng = random.Random(seed)
    limits = tier_limits(num_blocks=rng.choice([17, 21, 40]), **changes)
    disk = disk_tier(folder, max_bytes=rng.choice([3000, 1 << 20]), segment_bytes=1000) if rng.random() < 0.7 else None
    simulation = TieredSimulation(limits, rng.choice([1, 7, 40]), disk, chance=rng.choice([0.1, 0.5, 0.9]), seed=seed)
    recorder = record(simulation.scheduler, folder / "flight", 1 << 22, on_error=fail)
    simulation.scheduler = as_scheduler(recorder)
    for wave in range(3):
        requests = some_requests(rng, 25)
        for request in requests:
            request.request_id = f"{wave}.{request.request_id}"
        random_run(simulation, requests, rng, aborts=0.02)
        if wave == 0:
            simulation.lose_agent(blameless=rng.random() < 0.5)
    recorder.close()
    if disk is not None:
        disk[0].close()
    return simulation


CASES = [
    (seed, {"policy": policy, "preemption": preemption, "num_host_blocks": hosts})
    for seed, (policy, preemption, hosts) in enumerate(
        [
            (Policy.PREFILL_FIRST, PreemptionKind.RECOMPUTE, 0),
            (Policy.CHUNKED, PreemptionKind.SWAP, 12),
            (Policy.SLO, PreemptionKind.AUTO, 30),
            (Policy.DECODE_FIRST, PreemptionKind.RECOMPUTE, 0),
            (Policy.FCFS, PreemptionKind.SWAP, 4),
        ]
        * 40
    )
]


@pytest.mark.parametrize(("seed", "changes"), with_sweeps(CASES, lambda seed, changes: seed >= 5))
def test_random_runs_have_the_texts_of_runs_without_tiers(tmp_path, seed, changes):
    """Every text equals that of the request alone, no block is lost, and the recording replays."""
    simulation = play(tmp_path, seed, **changes)
    assert simulation.store.figures.stored > 0
    for stretch in read_recording(tmp_path / "flight"):
        assert replay(stretch).difference is None


def test_the_random_runs_load_blocks(tmp_path):
    hits = {"host": 0, "ssd": 0}
    for seed, changes in CASES[:6]:
        folder = tmp_path / str(seed)
        folder.mkdir()
        found = play(folder, seed, **changes).store.figures.hits
        hits = {tier: hits[tier] + found[tier] for tier in hits}
    assert min(hits.values()) > 5, hits
