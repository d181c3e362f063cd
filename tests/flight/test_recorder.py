"""Tests the flight recorder. It forwards every call, records it, and never disturbs the engine."""

from __future__ import annotations

import errno
import inspect
import random
import subprocess
import sys

import pytest

from llm_serving.errors import ContextLengthError, ProtocolError
from llm_serving.flight.format import STATE_NAMES
from llm_serving.flight.history import arrivals, completed_steps
from llm_serving.flight.journal import WRITE_INTERVAL_S
from llm_serving.flight.reader import Added, Completed, Finished, Raised, Scheduled, read_recording
from llm_serving.flight.recorder import FlightRecorder
from llm_serving.flight.segments import PAUSE_S
from llm_serving.flight.setup import limits_from_map, limits_to_map, record
from llm_serving.request import FinishReason
from llm_serving.scheduler.limits import Policy
from llm_serving.scheduler.output import StepResult
from llm_serving.scheduler.scheduler import Scheduler
from support.fakes import make_limits, make_request
from support.recorded_runs import RING_BYTES, record_random_run, recorded_simulation, some_requests
from support.simulation import random_run
from support.small_configs import REPOSITORY
from support.time_limits import time_limit

UNRECORDED_METHODS = frozenset(
    (
        *("capacity", "check_integrity", "counts", "known_prefix", "next_wakeup", "queue_full", "restore"),
        *("sequences", "snapshot", "steps_in_flight", "fresh_blocks", "take_released", "take_wanted", "observe_cache"),
    )
)
"""Methods that need no record, because they change nothing. ``restore`` is never called on a recorded scheduler, and no
decision depends on ``observe_cache``.
"""


def public(kind, predicate):
    return {name for name, _ in inspect.getmembers(kind, predicate) if not name.startswith("_")}


def test_every_method_of_the_scheduler_is_recorded_or_listed_as_unrecorded():
    methods = public(Scheduler, inspect.isfunction)
    assert methods == public(FlightRecorder, inspect.isfunction) - {"close"} | UNRECORDED_METHODS
    for name in methods - UNRECORDED_METHODS:
        theirs, ours = (list(inspect.signature(getattr(kind, name)).parameters) for kind in (Scheduler, FlightRecorder))
        assert theirs == ours, name


def test_properties_are_those_of_the_scheduler(tmp_path):
    _, recorder = recorded_simulation(tmp_path)
    for name in public(Scheduler, lambda value: isinstance(value, property)):
        assert getattr(recorder, name) == getattr(recorder._scheduler, name)
    assert len(recorder._scheduler.counts()) == len(STATE_NAMES)


def test_a_run_is_the_same_with_and_without_a_recorder(tmp_path):
    def steps(recorded):
        rng = random.Random(4)
        simulation, _ = recorded_simulation(tmp_path)
        if not recorded:
            simulation.scheduler = Scheduler(simulation.limits)
        random_run(simulation, some_requests(rng, 40), rng, aborts=0.05)
        return [(step.kind, step.rows, step.starts, step.query_lens) for step in simulation.steps]

    assert steps(recorded=True) == steps(recorded=False)


def test_the_events_are_the_calls(tmp_path):
    simulation, recorder = recorded_simulation(tmp_path)
    simulation.now = 7.5
    simulation.add(make_request("a", 5, 2, arrival=7.0))
    with pytest.raises(ContextLengthError):
        recorder.add_request(make_request("b", 49))
    simulation.finish()
    with pytest.raises(ProtocolError):
        recorder.update(StepResult(99), 8.0)
    recorder.close()
    (stretch,) = read_recording(tmp_path)
    added, refused, *others = stretch.events()
    assert isinstance(added, Added)
    assert added.facts == {"request_id": "a", "arrival_time": 7.0, "num_prompt_tokens": 5, "max_tokens": 2}
    assert (added.number, added.refusal, added.prompt) == (0, None, None)
    assert isinstance(refused, Added)
    assert refused.refusal == "ContextLengthError"
    steps = [event.step for event in others if isinstance(event, Scheduled) and event.step is not None]
    assert [step.seq for step in steps] == [step.seq for step in simulation.steps]
    assert others[-1] == Completed(
        8.0, 99, [False, False, [[], 0, 0]], [], None, 0, 0, 0, "ProtocolError", list(recorder.counts())
    )
    assert {event.now for event in others[:-1]} == {7.5}
    (arrival, _) = arrivals(stretch)
    assert (arrival.num_output_tokens, arrival.end, arrival.token_times) == (2, "length", [7.5, 7.5])


def test_arrivals_have_the_outcome_of_the_requests(tmp_path):
    rng = random.Random(9)
    simulation, recorder = recorded_simulation(tmp_path, num_blocks=24)
    random_run(simulation, some_requests(rng, 60), rng, aborts=0.03)
    recorder.close()
    (stretch,) = read_recording(tmp_path)
    found = {arrival.facts["request_id"]: arrival for arrival in arrivals(stretch)}
    assert recorder.figures.preemptions > 0
    assert found.keys() == simulation.requests.keys()
    for name, request in simulation.requests.items():
        assert found[name].num_output_tokens == len(request.output_token_ids)
        assert found[name].end == request.finish_reason.value
        assert found[name].end_time == request.finish_time


def test_completed_steps_have_the_times_of_the_device(tmp_path):
    simulation, recorder = recorded_simulation(tmp_path)
    simulation.add(make_request("a", 5, 3))
    for microseconds in (500, 20, 30):
        simulation.schedule()
        result = simulation.device.run_next()
        result.queue_us, result.graph_us, result.sample_us = 1, microseconds, 2
        simulation.now += 0.25
        recorder.update(result, simulation.now)
    recorder.close()
    (stretch,) = read_recording(tmp_path)
    steps = list(completed_steps(stretch))
    first, second = (step for step, _, _ in steps[:2])
    assert (first.kind.value, first.num_tokens, first.num_context_tokens) == ("prefill", 5, 5)
    assert (second.kind.value, second.num_tokens, second.num_context_tokens) == ("decode", 1, 6)
    assert [(event.queue_us, event.graph_us, event.sample_us) for _, _, event in steps] == [
        (1, 500, 2),
        (1, 20, 2),
        (1, 30, 2),
    ]
    _, scheduled, completed = steps[0]
    assert (scheduled, completed.now) == (0.0, 0.25)


def test_the_ring_keeps_its_size_and_each_segment_has_the_state(tmp_path):
    ring_bytes = 1 << 19
    for seed in range(8):
        record_random_run(tmp_path, seed, count=100, ring_bytes=ring_bytes)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= ring_bytes
    stretches = read_recording(tmp_path)
    segments = [segment for stretch in stretches for segment in stretch.segments]
    assert len(segments) > 4
    assert all("missing" not in segment.state for segment in segments)


def test_a_state_too_large_for_the_ring_is_reported_and_left_out(tmp_path):
    record_random_run(tmp_path, 1, count=400, ring_bytes=1 << 16)
    segments = [segment for stretch in read_recording(tmp_path) for segment in stretch.segments]
    assert any("too large for a ring of 65536" in segment.state.get("missing", "") for segment in segments)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1 << 16


def test_the_files_contain_no_tokens_and_no_texts(tmp_path):
    secret = 1_234_500_000
    for prefix_cache in (False, True):
        folder = tmp_path / str(prefix_cache)
        complaints = []
        recorder = record(
            Scheduler(make_limits(prefix_cache=prefix_cache)), folder, 1 << 20, on_error=complaints.append
        )
        for number in range(6):
            prompt = [secret + place for place in range(10 + number)]
            request = make_request(
                f"r{number}", prompt, 6, stop=("a secret stop",), stop_token_ids=frozenset({secret - 1})
            )
            recorder.add_request(request)
            now = float(number)
            for _ in range(3):
                while (step := recorder.schedule(now)) is not None:
                    tokens = [secret + 77 if samples else -1 for samples in step.do_sample]
                    size = len(tokens)
                    recorder.update(StepResult(step.seq, tokens, [0.0] * size, [0.0] * size), now)
        # Starts a segment with the scheduler's state, so the recording also contains the requests in this state.
        recorder._guarded(recorder._journal._begin_segment)
        recorder.fail_all("a secret error", 9.0)
        recorder.close()
        assert complaints == []
        stretches = read_recording(folder)
        assert len(stretches[0].segments) == 2
        found = list(scalars([[s.header.to_map(), s.state, s.records] for s in stretches[0].segments]))
        packed = b"".join(value for value in found if isinstance(value, bytes))
        data = b"".join(path.read_bytes() for path in folder.iterdir())
        assert not [value for value in found if isinstance(value, int) and secret - 1 <= value < secret + 100]
        for token in range(secret - 1, secret + 100):
            assert token.to_bytes(4, "little") not in packed
            assert token.to_bytes(4, "big") not in data
        assert b"secret" not in data


def scalars(value):
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        for item in value:
            yield from scalars(item)
    else:
        yield value


def test_a_full_disk_pauses_the_recording_until_a_new_segment(tmp_path, monkeypatch):
    complaints = []
    recorder = record(Scheduler(make_limits()), tmp_path, RING_BYTES, on_error=complaints.append)
    simulation, _ = recorded_simulation(tmp_path / "unused")
    simulation.scheduler = recorder

    def run(name):
        simulation.add(make_request(name, 5, 4, arrival=simulation.now))
        simulation.finish()

    run("before")

    def full(records):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(recorder._journal._segments._ring, "append", full)
        simulation.now = 1.0
        run("lost")
        assert len(complaints) == 1
        assert "pauses for 60 s" in complaints[0]
        assert "No space left" in complaints[0]
    simulation.now = PAUSE_S
    run("lost too")
    simulation.now = 2.0 + PAUSE_S
    run("after")
    recorder.close()
    before, after = read_recording(tmp_path)
    assert [arrival.facts["request_id"] for arrival in arrivals(before)] == ["before"]
    assert after.header.after_gap
    assert "parts" in after.segments[0].state
    assert len(complaints) == 1


def test_a_folder_that_cannot_be_made_is_reported_and_harmless(tmp_path):
    (tmp_path / "file").write_text("")
    complaints = []
    recorder = record(Scheduler(make_limits()), tmp_path / "file" / "flight", RING_BYTES, on_error=complaints.append)
    simulation, _ = recorded_simulation(tmp_path)
    simulation.scheduler = recorder
    simulation.add(make_request("a", 5, 4))
    simulation.finish()
    recorder.close()
    assert len(complaints) == 1
    assert "Not a directory" in complaints[0]


def test_an_error_of_the_recorder_only_ends_the_recording(tmp_path, monkeypatch):
    complaints = []
    recorder = record(Scheduler(make_limits()), tmp_path, RING_BYTES, on_error=complaints.append)
    monkeypatch.setattr(recorder._journal._steps, "record", None)
    simulation, _ = recorded_simulation(tmp_path / "unused")
    simulation.scheduler = recorder
    recorder._journal._segments.is_new = False
    recorder._journal._begin_segment()
    monkeypatch.setattr(recorder._journal._steps, "record", None)
    simulation.add(make_request("a", 5, 4))
    simulation.finish()
    recorder.close()
    assert len(complaints) == 1
    assert "stopped on an internal error: TypeError" in complaints[0]


def test_an_error_of_the_scheduler_is_recorded_and_passed_on(tmp_path, monkeypatch):
    simulation, recorder = recorded_simulation(tmp_path)
    simulation.add(make_request("a", 5, 4))

    def broken(now):
        raise AssertionError("broken")

    monkeypatch.setattr(recorder._scheduler, "schedule", broken)
    with pytest.raises(AssertionError, match="broken"):
        recorder.schedule(1.0)
    (stretch,) = read_recording(tmp_path)
    *_, last = stretch.events()
    assert isinstance(last, Raised)
    assert (last.now, last.error) == (1.0, "AssertionError")


def test_a_killed_process_loses_only_its_last_iteration(tmp_path):
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from support.fakes import make_request\n"
        "from support.recorded_runs import recorded_simulation\n"
        f"simulation, recorder = recorded_simulation(Path({str(tmp_path)!r}))\n"
        "for number in range(30):\n"
        "    simulation.now += 0.5\n"
        "    simulation.add(make_request(f'r{number}', 5, 4, arrival=simulation.now))\n"
        "    simulation.finish()\n"
        "    print(recorder.num_steps, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"},
        capture_output=True,
        timeout=time_limit(60),
        check=False,
    )
    assert done.returncode == -9, done.stderr.decode()
    (stretch,) = read_recording(tmp_path)
    steps = [event for event in stretch.events() if isinstance(event, Scheduled) and event.step is not None]
    assert len(steps) == int(done.stdout.split()[-1])
    assert len(arrivals(stretch)) == 30


def decoding(folder, **limits):
    """Returns a recorded simulation with a decode step in flight, its recorder, and its file."""
    simulation, recorder = recorded_simulation(folder, **limits)
    simulation.now = 1.0
    simulation.add(make_request("a", 5, 40, arrival=1.0))
    simulation.schedule()
    iterate(simulation, 1.0)
    (file,) = folder.iterdir()
    return simulation, recorder, file


def iterate(simulation, now):
    """Completes the oldest step and schedules the next one, so the number of steps in flight stays the same."""
    simulation.now = now
    simulation.scheduler.update(simulation.device.run_next(), now)
    simulation.schedule()


def recorded_steps(file):
    (stretch,) = read_recording(file)
    return [event.step.seq for event in stretch.events() if isinstance(event, Scheduled) and event.step is not None]


def test_steps_are_written_together_after_the_interval(tmp_path):
    simulation, recorder, file = decoding(tmp_path)
    recorder._guarded(recorder._journal.flush)
    size, frames = file.stat().st_size, 0
    for number in range(1, 11):
        iterate(simulation, 1.0 + number * WRITE_INTERVAL_S / 10)
        if file.stat().st_size != size:
            size, frames = file.stat().st_size, frames + 1
    assert frames == 1
    assert recorded_steps(file) == [step.seq for step in simulation.steps]
    iterate(simulation, 1.0 + 1.5 * WRITE_INTERVAL_S)
    assert file.stat().st_size == size
    assert recorded_steps(file) == [step.seq for step in simulation.steps][:-1]
    recorder.close()
    assert recorded_steps(file) == [step.seq for step in simulation.steps]


@pytest.mark.parametrize("call", ["add", "abort"])
def test_calls_about_requests_are_written_after_the_interval(tmp_path, call):

    def answer(now):
        simulation.now = now
        simulation.update(simulation.device.run_next())
        simulation.schedule()

    simulation, recorder = recorded_simulation(tmp_path)
    simulation.now = 1.0
    for name in "ab":
        simulation.add(make_request(name, 5, 40, arrival=1.0))
    simulation.schedule()
    answer(1.0)
    recorder._guarded(recorder._journal.flush)
    (file,) = tmp_path.iterdir()
    size, now = file.stat().st_size, 1.0 + WRITE_INTERVAL_S / 10
    if call == "add":
        simulation.now = now
        simulation.add(make_request("c", 5, 4, arrival=now))
    else:
        recorder.finish_request("a", FinishReason.ABORT, now)
    answer(now)
    assert file.stat().st_size == size
    answer(1.0 + WRITE_INTERVAL_S)
    assert recorded_steps(file) == [step.seq for step in simulation.steps]
    (stretch,) = read_recording(file)
    told = [type(event) for event in stretch.events() if isinstance(event, Added | Finished)]
    assert told == [Added, Added, Added if call == "add" else Finished]


@pytest.mark.parametrize("call", ["void", "lost", "failed"])
def test_a_fault_is_written_at_the_end_of_its_iteration(tmp_path, call):
    simulation, recorder, file = decoding(tmp_path)
    recorder._guarded(recorder._journal.flush)
    size, now = file.stat().st_size, 1.0 + WRITE_INTERVAL_S / 10
    if call == "void":
        recorder.void_steps()
        iterate(simulation, now)
    else:
        if call == "lost":
            recorder.agent_lost(now)
        else:
            recorder.fail_all("broken", now)
        while recorder.schedule(now) is not None:
            pass
    assert file.stat().st_size > size


def test_a_failed_step_is_written_at_the_end_of_its_iteration(tmp_path):
    _, recorder, file = decoding(tmp_path)
    recorder._guarded(recorder._journal.flush)
    size, now = file.stat().st_size, 1.0 + WRITE_INTERVAL_S / 10
    seq = min(recorder._journal._sent)
    recorder.update(StepResult(seq, error="broken"), now)
    assert recorder.schedule(now) is None
    assert file.stat().st_size > size
    (stretch,) = read_recording(file)
    assert [event.fault for event in stretch.events() if isinstance(event, Completed) and event.seq == seq] == [
        [False, True, [[], 0, 0]]
    ]


def test_iterations_without_an_end_are_written_in_time(tmp_path, monkeypatch):
    """While no step slot is free, the engine does not call ``schedule``, so the recorder sees no end of the loop
    iteration.
    """
    monkeypatch.setattr("llm_serving.flight.journal._MAX_PENDING", 8)
    simulation, recorder, file = decoding(tmp_path)
    recorder._guarded(recorder._journal.flush)
    size = file.stat().st_size
    for _ in range(12):
        simulation.scheduler.update(simulation.device.run_next(), 1.0)
        simulation.steps.append(recorder.schedule(1.0))
        simulation.device.submit(simulation.steps[-1])
    assert len(recorder._journal._pending) < 16
    assert file.stat().st_size > size
    recorder.close()
    assert recorded_steps(file) == [step.seq for step in simulation.steps]


def test_a_record_has_no_blocks_that_came_after_its_step(tmp_path):
    """A step's record has the blocks that its block tables had at this step.

    The block tables may grow before the record is written. The record does not contain the later blocks.
    """
    simulation, recorder, file = decoding(tmp_path, block_size=4)
    for _ in range(30):
        iterate(simulation, 1.0)
    recorder.close()
    (stretch,) = read_recording(file)
    steps = [event.step for event in stretch.events() if isinstance(event, Scheduled) and event.step is not None]
    length = 0
    for step in steps:
        for index, place, blocks in step.blocks:
            assert (index, place) == (0, length)
            length += len(blocks)
        assert length == -(-(step.starts[0] + step.query_lens[0]) // 4)
    assert length > 8


def test_limits_can_be_converted_to_a_map_and_back():
    limits = make_limits(policy=Policy.CHUNKED, cache_namespace=b"n", batch_size=3)
    assert limits_from_map(limits_to_map(limits)) == limits
