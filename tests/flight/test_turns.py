"""Turns alike as one record: what is read is what single records would have told."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from llm_serving.flight.format import MAGIC, SegmentHeader, Tag, encode_frame
from llm_serving.flight.journal import WRITE_INTERVAL_S
from llm_serving.flight.reader import Answered, Scheduled, read_recording
from llm_serving.flight.setup import code_digest, limits_to_map
from llm_serving.scheduler.policy import Policy, PreemptionKind
from support.fakes import make_limits, make_request
from support.recorded_runs import record_random_run, recorded_simulation
from tools.replaying.replayer import replay

TURN_S = WRITE_INTERVAL_S / 5


def decode(folder, num_turns, prompts=(5,), **limits):
    """A recorded simulation in which ``prompts`` decode for so many turns, with two steps in flight."""
    simulation, recorder = recorded_simulation(folder, block_size=4, **limits)
    for number, length in enumerate(prompts):
        simulation.add(make_request(f"r{number}", length, 40, ignore_eos=True))
    simulation.schedule()
    for _ in range(num_turns):
        turn(simulation)
    return simulation, recorder


def turn(simulation, seq=None):
    simulation.now += TURN_S
    result = simulation.device.run_next()
    result.queue_us, result.graph_us, result.sample_us = result.seq, 100 + result.seq, 7 * result.seq
    simulation.update(result)
    simulation.schedule()


def one_by_one(monkeypatch):
    """Each call has a record of its own, as every call has that is not of turns alike."""
    monkeypatch.setattr("llm_serving.flight.journal.Journal._enter_turns", lambda journal: None)


def events_of(folder):
    return [event for stretch in read_recording(folder) for event in stretch.events()]


def tags_of(folder):
    return [Tag(record[0]) for stretch in read_recording(folder) for s in stretch.segments for record in s.records]


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("prompts", [(5,), (5, 2, 9)])
def test_peaceful_decoding_is_little_but_turns(tmp_path, monkeypatch, prompts, prefix_cache):
    limits = {"prefix_cache": prefix_cache}
    simulation, recorder = decode(tmp_path / "turns", 30, prompts, **limits)
    recorder.close()
    with monkeypatch.context() as patched:
        one_by_one(patched)
        if prefix_cache:
            pseudonyms = recorder._journal._requests.identities.pseudonyms
            patched.setattr("llm_serving.flight.identities.Pseudonyms", lambda: pseudonyms)
        _, other = decode(tmp_path / "single", 30, prompts, **limits)
        other.close()
    assert tags_of(tmp_path / "turns").count(Tag.TURNS) >= 4
    assert tags_of(tmp_path / "single").count(Tag.TURNS) == 0
    events = events_of(tmp_path / "turns")
    assert events == events_of(tmp_path / "single")
    steps = [event.step for event in events if isinstance(event, Scheduled) and event.step is not None]
    assert [step.seq for step in steps] == [step.seq for step in simulation.steps]
    answers = [event for event in events if isinstance(event, Answered)]
    assert [(a.queue_us, a.graph_us, a.sample_us) for a in answers] == [
        (a.seq, 100 + a.seq, 7 * a.seq) for a in answers
    ]
    for folder in ("turns", "single"):
        (stretch,) = read_recording(tmp_path / folder)
        assert replay(stretch).difference is None
    sizes = [sum(file.stat().st_size for file in (tmp_path / folder).iterdir()) for folder in ("turns", "single")]
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("kind", [PreemptionKind.RECOMPUTE, PreemptionKind.SWAP])
def test_a_random_run_tells_the_same_either_way(tmp_path, monkeypatch, policy, kind):
    limits = {"policy": policy, "preemption": kind, "num_blocks": 24, "num_host_blocks": 30}
    record_random_run(tmp_path / "turns", 5, **limits)
    one_by_one(monkeypatch)
    record_random_run(tmp_path / "single", 5, **limits)
    assert events_of(tmp_path / "turns") == events_of(tmp_path / "single")


def after_some_turns(tmp_path, disturb):
    """The events of peaceful turns, ``disturb`` and more turns, all written together."""
    simulation, recorder = decode(tmp_path, 10)
    recorder._guarded(recorder._journal.flush)
    for number in range(4):
        if number == 2:
            disturb(simulation)
        turn(simulation)
    recorder.close()
    return simulation, tags_of(tmp_path), events_of(tmp_path)


def test_an_answer_that_ends_its_request_is_told(tmp_path):
    simulation, recorder = recorded_simulation(tmp_path)
    simulation.add(make_request("a", 5, 40, ignore_eos=False))
    simulation.schedule()
    for number in range(12):
        simulation.now += TURN_S / 10
        result = simulation.device.run_next()
        if number == 8:
            (end,) = simulation.requests["a"].end_token_ids
            result.sampled_ids[0] = end
        simulation.update(result)
        simulation.schedule()
        if simulation.requests["a"].is_finished:
            break
    recorder.close()
    ends = [event.ends for event in events_of(tmp_path) if isinstance(event, Answered)]
    assert ends.count([0]) == 1
    (stretch,) = read_recording(tmp_path)
    assert replay(stretch).difference is None


def test_a_turn_with_an_answer_and_no_step_is_not_alike(tmp_path):
    """Two answers in a turn."""

    def two_at_once(simulation):
        result = simulation.device.run_next()
        simulation.update(result)

    simulation, _, events = after_some_turns(tmp_path, two_at_once)
    steps = [event.step.seq for event in events if isinstance(event, Scheduled) and event.step is not None]
    assert steps == [step.seq for step in simulation.steps]
    (stretch,) = read_recording(tmp_path)
    assert replay(stretch).difference is None


def test_counts_that_change_within_turns_alike_come_back(tmp_path):
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
    """Counts with every call, and no runs."""
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
    """Its turns are all alike, and say nothing of odd ones."""
    _, recorder = decode(tmp_path / "new", 30)
    recorder.close()
    (stretch,) = read_recording(tmp_path / "new")
    (segment,) = stretch.segments
    turns = [record for record in segment.records if record[0] == Tag.TURNS]
    assert [record.pop() for record in turns] == [[]] * len(turns)
    header = segment.header.to_map() | {"format_version": 2}
    data = [MAGIC, *map(encode_frame, (header, segment.state, segment.records))]
    (tmp_path / "r-000000.flight").write_bytes(b"".join(data))
    assert events_of(tmp_path / "r-000000.flight") == events_of(tmp_path / "new")


def test_turns_with_other_numbers_of_answers_and_steps_are_told_in_the_same_record(tmp_path, monkeypatch):
    """A turn brings two answers and sends two steps, as when the engine's thread was late."""

    def odd_run(folder):
        simulation, recorder = decode(folder, 10)
        recorder._guarded(recorder._journal.flush)
        for number in range(4):
            if number == 2:
                for _ in range(2):
                    simulation.update(simulation.device.run_next())
                simulation.schedule()
            else:
                turn(simulation)
        recorder.close()
        return simulation

    simulation = odd_run(tmp_path / "turns")
    with monkeypatch.context() as patched:
        one_by_one(patched)
        odd_run(tmp_path / "single")
    events = events_of(tmp_path / "turns")
    assert events == events_of(tmp_path / "single")
    assert [event.step.seq for event in events if isinstance(event, Scheduled) and event.step is not None] == [
        step.seq for step in simulation.steps
    ]
    (stretch,) = read_recording(tmp_path / "turns")
    odd_turns = [record[-1] for segment in stretch.segments for record in segment.records if record[0] == Tag.TURNS]
    assert [0, 1, 1, True] not in [odd for odds in odd_turns for odd in odds]
    assert [odd[1:] for odd in odd_turns[-1]] == [[2, 2, True]]
    assert replay(stretch).difference is None


def test_random_peace(tmp_path):
    """Requests that come and go between stretches of peace, as in a server."""
    rng = random.Random(3)
    simulation, recorder = recorded_simulation(tmp_path)
    for number in range(40):
        simulation.add(make_request(f"r{number}", rng.randint(1, 9), rng.randint(1, 30), ignore_eos=True))
        simulation.schedule()
        for _ in range(rng.randint(0, 25)):
            if simulation.device.queue:
                turn(simulation)
    simulation.finish()
    recorder.close()
    assert tags_of(tmp_path).count(Tag.TURNS) > 10
    (stretch,) = read_recording(tmp_path)
    result = replay(stretch)
    assert (result.difference, result.num_steps) == (None, recorder.num_steps)
