"""Tests recordings of several replicas. Each replays on its own, even if requests moved between replicas."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from llm_serving.flight.format import replica_folder
from llm_serving.flight.history import arrivals
from llm_serving.flight.reader import Added, Completed, Granted, Released, read_recording
from llm_serving.flight.recorder import FlightRecorder, as_scheduler
from llm_serving.flight.setup import record
from llm_serving.scheduler.limits import Policy, PreemptionKind
from llm_serving.scheduler.scheduler import Scheduler
from support.fakes import make_limits
from support.handover_simulation import ROLES, play_hand_overs
from support.recorded_runs import RING_BYTES, fail, some_requests
from support.routed_simulation import RoutedSimulation
from support.script_drawing import draw_script
from support.sweeps import with_sweeps
from tools.replaying.main import main
from tools.replaying.replayer import replay


def record_routed(
    folder: Path, seed: int, *, ring_bytes: int = RING_BYTES, count: int = 150, **limits: object
) -> RoutedSimulation:
    """Records three replicas with random arrivals, steps, aborts and losses. Each replica has its own recorder."""
    recorders: list[FlightRecorder] = []

    def recorded(scheduler: Scheduler, index: int) -> Scheduler:
        recorders.append(record(scheduler, replica_folder(folder, index), ring_bytes, on_error=fail))
        return as_scheduler(recorders[-1])

    rng = random.Random(seed)
    routed = RoutedSimulation(make_limits(num_blocks=21, **limits), 3, seed, record=recorded)
    todo = some_requests(rng, count)
    while todo or not routed.router.is_idle:
        choice = rng.random()
        if todo and choice < 0.3:
            routed.add(todo.pop())
        elif choice < 0.6:
            routed.schedule()
        elif choice < 0.64 and routed.requests:
            routed.end(rng.choice(list(routed.requests)))
            routed.drop_void_steps()
        elif choice < 0.665:
            routed.lose(rng.randrange(3), blameless=rng.random() < 0.3)
        elif choice < 0.7:
            routed.revive(rng.randrange(3))
        elif choice < 0.95 and any(replica.has_work for replica in routed.replicas):
            routed.answer()
        else:
            routed.now += 0.001
        if not todo and rng.random() < 0.02:
            routed.finish()
    routed.finish()
    for recorder in recorders:
        recorder.close()
    return routed


@pytest.mark.parametrize(
    ("policy", "prefix_cache"),
    with_sweeps(itertools.product(Policy, [True, False]), lambda policy, prefix_cache: not prefix_cache),
)
def test_the_recording_of_each_replica_replays(tmp_path: Path, policy: Policy, prefix_cache: bool) -> None:
    routed = record_routed(
        tmp_path, 5, count=100, policy=policy, prefix_cache=prefix_cache, preemption=PreemptionKind.SWAP,
        num_host_blocks=16,
    )  # fmt: skip
    assert routed.seen["requests that lost their replica"]
    came_with_output = went = 0
    for index in range(3):
        [stretch] = read_recording(replica_folder(tmp_path, index))
        result = replay(stretch)
        assert result.difference is None
        assert result.num_steps == routed.replicas[index].num_steps
        for event in stretch.events():
            came_with_output += isinstance(event, Added) and bool(event.output)
            went += len(event.numbers) if isinstance(event, Released) else 0
    assert came_with_output
    assert went == sum(replica.num_recalled for replica in routed.router.replicas)


def test_recordings_with_hand_overs_replay(tmp_path: Path) -> None:
    recorders: list[FlightRecorder] = []

    def recorded(scheduler: Scheduler, index: int) -> Scheduler:
        folder = replica_folder(tmp_path / str(seed), index)
        recorders.append(record(scheduler, folder, RING_BYTES, on_error=fail))
        return as_scheduler(recorders[-1])

    granted = handed = bad = 0
    for seed in range(8):
        roles = ROLES[seed % len(ROLES)]
        routed = play_hand_overs(draw_script(300 + seed), roles, seed, faults=0.3, record=recorded)
        for recorder in recorders:
            recorder.close()
        recorders.clear()
        for index in range(len(roles)):
            [stretch] = read_recording(replica_folder(tmp_path / str(seed), index))
            assert replay(stretch).difference is None
            assert replay(stretch).num_steps == routed.replicas[index].num_steps
            for event in stretch.events():
                granted += isinstance(event, Granted)
                handed += isinstance(event, Added) and event.handed is not None
                bad += len(event.bad_moves) if isinstance(event, Completed) else 0
    assert granted
    assert handed
    assert bad


def test_a_replay_can_begin_with_any_segment(tmp_path: Path) -> None:
    routed = record_routed(tmp_path, 6, ring_bytes=1 << 18, count=250, prefix_cache=True)
    assert sum(replica.num_recalled for replica in routed.router.replicas)
    late = 0
    for index in range(3):
        for stretch in read_recording(replica_folder(tmp_path, index)):
            for first in range(len(stretch.segments)):
                rest = type(stretch)(stretch.segments[first:])
                assert replay(rest).difference is None
                late += "parts" in rest.segments[0].state
    assert late, "no segment begins with requests under way"


def test_the_command_replays_all_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_routed(tmp_path, 7)
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if line.startswith("replica_")] == ["replica_0:", "replica_1:", "replica_2:"]
    assert sum(line.startswith("identical, ") for line in said) == 3
    assert main([str(tmp_path / "replica_1"), "--html", str(tmp_path / "timeline.html")]) == 0
    assert main([str(tmp_path), "--policy", "fcfs"]) == 2
    assert "choose one" in capsys.readouterr().err
    assert main([str(tmp_path / "replica_1"), "--policy", "fcfs"]) == 0


def test_the_recordings_contain_the_outcome_of_every_request(tmp_path: Path) -> None:
    """Each request ends in exactly one recording. The recordings of its earlier replicas report that it moved."""
    routed = record_routed(tmp_path, 8)
    ends: dict[str, list[str]] = {}
    for stretch in read_recording(tmp_path):
        for arrival in arrivals(stretch):
            if arrival.end is not None and arrival.end != "moved":
                ends.setdefault(arrival.facts["request_id"], []).append(arrival.end)
    assert all(len(found) == 1 for found in ends.values())
    placed = [name for name, by in routed.served_by.items() if by]
    assert set(placed) <= set(ends)
    for name in placed:
        reason = routed.requests[name].finish_reason
        assert reason is not None
        assert ends[name] == [reason.value]
