"""Tests that undisturbed decoding is written as one record.

From this record, the reader returns the same calls as from a recording with one record for each call.
"""

from __future__ import annotations

import random
from itertools import pairwise, product

import pytest

from llm_serving.flight.format import MAGIC, SegmentHeader, Tag, encode_frame
from llm_serving.flight.journal import WRITE_INTERVAL_S
from llm_serving.flight.reader import Completed, Scheduled, read_recording
from llm_serving.flight.setup import code_digest, limits_to_map
from llm_serving.scheduler.limits import Policy, PreemptionKind
from support.fake_device import BROKEN_SEED
from support.fakes import make_limits, make_request
from support.recorded_runs import record_random_run, recorded_simulation
from support.sweeps import with_sweeps
from tools.replaying.replayer import replay

ITERATION_S = WRITE_INTERVAL_S / 5


def decode(folder, num_iterations, prompts=(5,), **limits):
    """Records a simulation that decodes ``prompts`` for some loop iterations, with two steps in flight."""
    simulation, recorder = recorded_simulation(folder, block_size=4, **limits)
    for number, length in enumerate(prompts):
        simulation.add(make_request(f"r{number}", length, 40, ignore_eos=True))
    simulation.schedule()
    for _ in range(num_iterations):
        iterate(simulation)
    return simulation, recorder


def iterate(simulation, seq=None):
    simulation.now += ITERATION_S
    result = simulation.device.run_next()
    result.queue_us, result.graph_us, result.sample_us = result.seq, 100 + result.seq, 7 * result.seq
    simulation.update(result)
    simulation.schedule()


def record_each_call(monkeypatch):
    """Switches the decode log off, so that each call has its own record."""
    monkeypatch.setattr("llm_serving.flight.journal.Journal._start_log", lambda journal: None)


def events_of(folder):
    return [event for stretch in read_recording(folder) for event in stretch.events()]


def tags_of(folder):
    return [Tag(record[0]) for stretch in read_recording(folder) for s in stretch.segments for record in s.records]


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("prompts", [(5,), (5, 2, 9)])
def test_undisturbed_decoding_takes_few_records(tmp_path, monkeypatch, prompts, prefix_cache):
    limits = {"prefix_cache": prefix_cache}
    simulation, recorder = decode(tmp_path / "runs", 30, prompts, **limits)
    recorder.close()
    with monkeypatch.context() as patched:
        record_each_call(patched)
        if prefix_cache:
            pseudonyms = recorder._journal._requests.names.pseudonyms
            patched.setattr("llm_serving.flight.requests.Pseudonyms", lambda: pseudonyms)
        _, other = decode(tmp_path / "single", 30, prompts, **limits)
        other.close()
    assert tags_of(tmp_path / "runs").count(Tag.DECODING) >= 4
    assert tags_of(tmp_path / "single").count(Tag.DECODING) == 0
    events = events_of(tmp_path / "runs")
    assert events == events_of(tmp_path / "single")
    steps = [event.step for event in events if isinstance(event, Scheduled) and event.step is not None]
    assert [step.seq for step in steps] == [step.seq for step in simulation.steps]
    answers = [event for event in events if isinstance(event, Completed)]
    assert [(a.queue_us, a.graph_us, a.sample_us) for a in answers] == [
        (a.seq, 100 + a.seq, 7 * a.seq) for a in answers
    ]
    for folder in ("runs", "single"):
        (stretch,) = read_recording(tmp_path / folder)
        assert replay(stretch).difference is None
    sizes = [sum(file.stat().st_size for file in (tmp_path / folder).iterdir()) for folder in ("runs", "single")]
    assert sizes[0] < sizes[1]


KINDS = (PreemptionKind.RECOMPUTE, PreemptionKind.SWAP)


def is_swept(policy: Policy, kind: PreemptionKind) -> bool:
    """Returns whether only ``make test-sweeps`` runs a case. ``make test`` runs one kind of preemption per policy."""
    return kind is not KINDS[list(Policy).index(policy) % 2]


@pytest.mark.parametrize(("policy", "kind"), with_sweeps(product(Policy, KINDS), is_swept))
def test_a_random_run_reads_the_same_with_and_without_the_log(tmp_path, monkeypatch, policy, kind):
    limits = {"policy": policy, "preemption": kind, "num_blocks": 24, "num_host_blocks": 30}
    record_random_run(tmp_path / "runs", 5, **limits)
    record_each_call(monkeypatch)
    record_random_run(tmp_path / "single", 5, **limits)
    assert events_of(tmp_path / "runs") == events_of(tmp_path / "single")


def events_around(tmp_path, disturb):
    """Returns the simulation, the tags and the events of a recording.

    It has undisturbed decoding, then the calls of ``disturb``, then undisturbed decoding, all written in one flush.
    """
    simulation, recorder = decode(tmp_path, 10)
    recorder._guarded(recorder._journal.flush)
    for number in range(4):
        if number == 2:
            disturb(simulation)
        iterate(simulation)
    recorder.close()
    return simulation, tags_of(tmp_path), events_of(tmp_path)


def test_the_result_that_ends_a_request_is_recorded(tmp_path):
    simulation, recorder = recorded_simulation(tmp_path)
    simulation.add(make_request("a", 5, 40, ignore_eos=False))
    simulation.schedule()
    for number in range(12):
        simulation.now += ITERATION_S / 10
        result = simulation.device.run_next()
        if number == 8:
            (end,) = simulation.requests["a"].end_token_ids
            result.sampled_ids[0] = end
        simulation.update(result)
        simulation.schedule()
        if simulation.requests["a"].is_finished:
            break
    recorder.close()
    ends = [event.ends for event in events_of(tmp_path) if isinstance(event, Completed)]
    assert ends.count([0]) == 1
    (stretch,) = read_recording(tmp_path)
    assert replay(stretch).difference is None


def test_an_iteration_with_two_results_is_recorded(tmp_path):
    def two_at_once(simulation):
        result = simulation.device.run_next()
        simulation.update(result)

    simulation, _, events = events_around(tmp_path, two_at_once)
    steps = [event.step.seq for event in events if isinstance(event, Scheduled) and event.step is not None]
    assert steps == [step.seq for step in simulation.steps]
    (stretch,) = read_recording(tmp_path)
    assert replay(stretch).difference is None


def test_counts_that_change_during_decoding_are_recorded(tmp_path):
    _, recorder = decode(tmp_path, 30)
    recorder.close()
    free = [
        event.state[2]
        for event in events_of(tmp_path)
        if isinstance(event, Scheduled) and event.state is not None and event.step is not None
    ]
    assert free[0] - free[-1] >= 6
    assert {before - after for before, after in pairwise(free)} <= {0, 1}


def test_a_segment_of_version_1_is_read(tmp_path):
    """Version 1 of the format stores the scheduler's counts, for example of free blocks, with every call.

    It has no records of decode runs.
    """
    limits = make_limits()
    header = SegmentHeader("r", 0, "1", code_digest(), "", limits_to_map(limits), 1.0, 0.0, {}, format_version=1)
    facts = {"request_id": "a", "arrival_time": 1.0, "num_prompt_tokens": 3, "max_tokens": 1}
    free = limits.num_blocks - 1
    step = [0, 0, [[0], [0], [3], None], [0], [0], [[0, 0, [1]]], [], [0], [], "PROMPT_READY"]
    records = [
        [int(Tag.ADD), 0, facts, None, None],
        [int(Tag.TIME), 1.5],
        [int(Tag.SCHEDULE), step, None, [1, 0, free - 1, 0, 1, 0, 0]],
        [int(Tag.UPDATE), 0, None, [], None, 5, 6, 7, 1, [0, 0, free, 0, 0, 0, 0]],
    ]
    data = [MAGIC, encode_frame(header.to_map()), encode_frame({"new": True}), encode_frame(records)]
    (tmp_path / "r-000000.flight").write_bytes(b"".join(data))
    (stretch,) = read_recording(tmp_path)
    *_, scheduled, answered = stretch.events()
    assert (scheduled.now, scheduled.step.num_tokens, scheduled.state[0]) == (1.5, 3, 1)
    assert (answered.graph_us, answered.state[2]) == (6, free)
    assert replay(stretch).difference is None


def test_a_segment_of_version_2_is_read(tmp_path):
    """Version 2 of the format does not list irregular loop iterations in its records of decode runs.

    A regular iteration has one result and one step.
    """
    _, recorder = decode(tmp_path / "new", 30)
    recorder.close()
    (stretch,) = read_recording(tmp_path / "new")
    (segment,) = stretch.segments
    runs = [record for record in segment.records if record[0] == Tag.DECODING]
    assert [record.pop() for record in runs] == [[]] * len(runs)
    header = segment.header.to_map() | {"format_version": 2}
    data = [MAGIC, *map(encode_frame, (header, segment.state, segment.records))]
    (tmp_path / "r-000000.flight").write_bytes(b"".join(data))
    assert events_of(tmp_path / "r-000000.flight") == events_of(tmp_path / "new")


def test_irregular_iterations_are_part_of_the_same_record(tmp_path, monkeypatch):
    """A decode run may contain a loop iteration with two results and two steps, as when the engine thread was late."""

    def irregular_run(folder):
        simulation, recorder = decode(folder, 10)
        recorder._guarded(recorder._journal.flush)
        for number in range(4):
            if number == 2:
                for _ in range(2):
                    simulation.update(simulation.device.run_next())
                simulation.schedule()
            else:
                iterate(simulation)
        recorder.close()
        return simulation

    simulation = irregular_run(tmp_path / "runs")
    with monkeypatch.context() as patched:
        record_each_call(patched)
        irregular_run(tmp_path / "single")
    events = events_of(tmp_path / "runs")
    assert events == events_of(tmp_path / "single")
    assert [event.step.seq for event in events if isinstance(event, Scheduled) and event.step is not None] == [
        step.seq for step in simulation.steps
    ]
    (stretch,) = read_recording(tmp_path / "runs")
    irregular = [record[-1] for segment in stretch.segments for record in segment.records if record[0] == Tag.DECODING]
    assert [0, 1, 1, True] not in [odd for each in irregular for odd in each]
    assert [odd[1:] for odd in irregular[-1]] == [[2, 2, True]]
    assert replay(stretch).difference is None


def test_random_requests_between_undisturbed_decoding(tmp_path):
    """Requests arrive and end at random times, as in a server."""
    rng = random.Random(3)
    simulation, recorder = recorded_simulation(tmp_path)
    for number in range(40):
        simulation.add(make_request(f"r{number}", rng.randint(1, 9), rng.randint(1, 30), ignore_eos=True))
        simulation.schedule()
        for _ in range(rng.randint(0, 25)):
            if simulation.device.queue:
                iterate(simulation)
    simulation.finish()
    recorder.close()
    assert tags_of(tmp_path).count(Tag.DECODING) > 10
    (stretch,) = read_recording(tmp_path)
    result = replay(stretch)
    assert (result.difference, result.num_steps) == (None, recorder.num_steps)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_recording_with_logits_that_are_not_finite_is_replayed(tmp_path, prefix_cache):
    simulation, recorder = recorded_simulation(tmp_path, block_size=4, prefix_cache=prefix_cache)
    for number in range(3):
        seed = BROKEN_SEED if number == 1 else number
        simulation.add(make_request(f"r{number}", 5, 40, ignore_eos=True, seed=seed))
    simulation.schedule()
    for _ in range(30):
        iterate(simulation)
    recorder.close()
    assert [len(request.output_token_ids) > 2 for request in simulation.requests.values()] == [True, False, True]
    (stretch,) = read_recording(tmp_path)
    assert replay(stretch).difference is None
