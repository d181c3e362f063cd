"""Tests ``tools/replay.py``: identical replays, the first difference, what-if runs, and timelines."""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest

from llm_serving.flight.format import FlightRecordingError
from llm_serving.flight.history import arrivals
from llm_serving.flight.reader import Completed, Stretch, read_recording
from llm_serving.flight.setup import limits_to_map, record
from llm_serving.flight.timeline import SpanPhase, build_timeline
from llm_serving.scheduler.limits import AdmissionKind, BatchingStrategy, Policy, PreemptionKind
from llm_serving.scheduler.output import ScheduledStep, StepKind
from llm_serving.scheduler.scheduler import Scheduler
from support.fakes import make_limits, make_request
from support.recorded_runs import record_random_run, record_waves, recorded_simulation, some_requests
from support.simulation import random_run
from support.sweeps import with_sweeps
from tools.replaying.figures import figures_of
from tools.replaying.main import main
from tools.replaying.replayer import replay
from tools.replaying.result_order import ResultOrder
from tools.replaying.what_if import DeviceModel, changed_limits, fit_device, what_if


def assert_identical(stretch, least_steps=1):
    result = replay(stretch)
    assert result.difference is None, result.difference
    assert result.num_steps >= least_steps


def preemption_of(policy):
    """Returns the kind of preemption that ``make test`` combines with a policy. Each kind is combined with at least one
    policy.
    """
    return list(PreemptionKind)[list(Policy).index(policy) % len(PreemptionKind)]


@pytest.mark.parametrize(
    ("policy", "preemption", "prefix_cache"),
    with_sweeps(
        itertools.product(Policy, PreemptionKind, [False, True]),
        lambda policy, preemption, prefix_cache: (
            prefix_cache == (preemption is PreemptionKind.AUTO) or preemption is not preemption_of(policy)
        ),
    ),
)
def test_a_replay_from_a_later_segment_is_identical(tmp_path, policy, preemption, prefix_cache):
    recorder = record_waves(
        tmp_path,
        7,
        num_blocks=17,
        policy=policy,
        preemption=preemption,
        num_host_blocks=20,
        prefix_cache=prefix_cache,
    )
    assert recorder.figures.preemptions > 0
    (stretch,) = read_recording(tmp_path)
    assert len(stretch.segments) > 1
    assert_identical(stretch, 100)
    for first in (1, len(stretch.segments) - 1):
        assert_identical(Stretch(stretch.segments[first:]), 0)


@pytest.mark.parametrize(
    ("batching", "admission"),
    with_sweeps(
        itertools.product(BatchingStrategy, AdmissionKind),
        # Half of the pairs have each mode with several kinds of admission.
        lambda batching, admission: (list(BatchingStrategy).index(batching) + list(AdmissionKind).index(admission)) % 2,
    ),
)
def test_every_mode_is_identical(tmp_path, batching, admission):
    record_waves(
        tmp_path,
        3,
        batching=batching,
        admission=admission,
        page_attention=batching is not BatchingStrategy.CONTINUOUS,
        predict_output_length=True,
        fairness=True,
    )
    (stretch,) = read_recording(tmp_path)
    assert len(stretch.segments) > 1
    for first in (1, len(stretch.segments) - 1):
        assert_identical(Stretch(stretch.segments[first:]), 0)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_drafts_replay_identically(tmp_path, prefix_cache):
    """The recording has no tokens, only the number of offered drafts and of rejected ones."""
    record_random_run(tmp_path, 7, count=40, drafts=True, prefix_cache=prefix_cache, decode_steps_ahead=1)
    (stretch,) = read_recording(tmp_path)
    completed = [event for event in stretch.events() if isinstance(event, Completed)]
    assert any(event.rejected for event in completed)
    assert_identical(stretch, 50)


def test_failed_steps_and_lost_agents_replay_identically(tmp_path):
    rng = random.Random(2)
    simulation, recorder = recorded_simulation(tmp_path, num_blocks=24, prefix_cache=True)
    for number, request in enumerate(some_requests(rng, 60)):
        simulation.add(request)
        simulation.step()
        if number % 20 == 7:
            simulation.schedule()
            simulation.fail_step("the device is on fire")
        elif number % 20 == 14:
            simulation.schedule()
            simulation.lose_agent(blameless=number == 34)
        elif number % 20 == 18:
            simulation.end(request.request_id)
            simulation.drop_void_steps()
    recorder.fail_all("enough", simulation.now)
    recorder.close()
    (stretch,) = read_recording(tmp_path)
    assert_identical(stretch, 60)


def test_a_recording_without_its_beginning_is_identical(tmp_path):
    record_waves(tmp_path, 8, waves=14, num_blocks=24, prefix_cache=True)
    (stretch,) = read_recording(tmp_path)
    assert stretch.header.index > 0, "the ring has come round"
    assert_identical(stretch, 500)


def test_a_torn_end_is_left_out(tmp_path):
    record_random_run(tmp_path, 5)
    (file,) = tmp_path.iterdir()
    data = file.read_bytes()
    file.write_bytes(data[: len(data) * 2 // 3])
    (stretch,) = read_recording(tmp_path)
    assert stretch.segments[0].is_torn
    assert_identical(stretch, 25)


def test_the_program_prints_identical_and_the_number_of_steps(tmp_path, capsys):
    recorder = record_random_run(tmp_path, 1)
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"identical, {recorder.num_steps} steps\n"


def test_the_program_shows_the_first_difference(tmp_path, capsys, monkeypatch):
    recorder = record_random_run(tmp_path, 1, num_blocks=18)
    monkeypatch.setattr("llm_serving.scheduler.limits.SchedulerLimits.watermark_blocks", 3)
    assert main([str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    found = re.match(r"different after (\d+) equal steps \(run .*\), in \w+:\n  .*\n    recorded  ", printed)
    assert found, printed
    assert 0 < int(found[1]) < recorder.num_steps
    assert "\n    replayed  " in printed
    assert "  before:\n" in printed
    assert "result of step" in printed


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no flight recording"),
        (b"not one", "not a segment of a flight recording"),
        (b"LLMFLT01", "its segments are empty"),
    ],
)
def test_an_unreadable_file_gives_exit_code_2(tmp_path, capsys, content, message):
    if content is not None:
        (tmp_path / "x.flight").write_bytes(content)
    assert main([str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_a_recording_with_limits_of_another_version_is_refused(tmp_path):
    record_random_run(tmp_path, 1)
    (stretch,) = read_recording(tmp_path)
    stretch.header.limits["colour"] = "red"
    with pytest.raises(FlightRecordingError, match="limits this version does not know: colour"):
        replay(stretch)


def test_a_replay_by_other_code_is_reported(tmp_path, capsys, monkeypatch):
    record_random_run(tmp_path, 1)
    monkeypatch.setattr("tools.replaying.replayer.code_digest", lambda: "another")
    assert main([str(tmp_path)]) == 0
    assert "another version of the scheduler's code" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("policy", "sent", "answered", "overtaken"),
    [
        ("prefill_first", "pd", "10", 0),
        ("prefill_first", "dp", "10", None),
        ("prefill_first", "dd", "10", 0),
        ("prefill_first", "pp", "10", 0),
        ("decode_first", "pd", "10", None),
        ("decode_first", "dp", "10", 0),
        ("fcfs", "dp", "10", 0),
        ("fcfs", "pd", "01", None),
        ("chunked", "md", "10", 0),
        ("fcfs", "dv", "10", None),
        ("fcfs", "vd", "10", 0),
        ("prefill_first", "dm", "10", None),
    ],
)
def test_the_policy_decides_which_step_may_overtake(policy, sent, answered, overtaken):
    kinds = {"p": StepKind.PREFILL, "d": StepKind.DECODE, "m": StepKind.MIXED, "v": StepKind.MOVE}
    order = ResultOrder(policy)
    for seq, kind in enumerate(sent):
        order.sent(ScheduledStep(seq, kinds[kind]))
    found = [order.completed(int(seq), ran=True) for seq in answered]
    assert found[0] == overtaken
    assert found[1] is None


def test_a_dropped_step_overtakes_no_step():
    order = ResultOrder("fcfs")
    order.sent(ScheduledStep(0, StepKind.DECODE))
    order.sent(ScheduledStep(1, StepKind.DECODE))
    assert order.completed(1, ran=False) is None


@pytest.mark.parametrize(
    ("kind", "overtaken", "is_light", "wrong"),
    [
        (StepKind.PREFILL, StepKind.MIXED, False, None),
        (StepKind.PREFILL, StepKind.DECODE, False, None),
        (StepKind.PREFILL, StepKind.MOVE, False, 0),
        (StepKind.PREFILL, StepKind.PREFILL, True, 0),
        (StepKind.MIXED, StepKind.PREFILL, True, 0),
    ],
)
def test_a_prefill_step_for_light_keys_overtakes_all_other_steps_except_moves(kind, overtaken, is_light, wrong):
    order = ResultOrder("slo")
    order.sent(ScheduledStep(0, overtaken, overtakes=is_light))
    order.sent(ScheduledStep(1, kind, overtakes=kind is StepKind.PREFILL))
    assert order.completed(1, ran=True) == wrong


class SteadyDevice:
    """A device that takes 2 ms per step and 0.1 ms per token."""

    name = "steady"

    def seconds(self, step):
        return 0.002 + 0.0001 * len(step.token_ids)


class SteadyModel(DeviceModel):
    """The model that a fit to ``SteadyDevice`` should find."""

    def __init__(self):
        object.__setattr__(self, "latency_s", 0.0)

    @property
    def device(self):
        return SteadyDevice()


@pytest.fixture
def steady(tmp_path):
    """Returns the recording of a load on a SteadyDevice, and the scheduler limits of the run."""
    rng = random.Random(6)
    recorder = record(Scheduler(make_limits()), tmp_path / "load", 1 << 24, on_error=pytest.fail)
    now = 0.0
    for number in range(120):
        now += rng.expovariate(60.0)
        request = make_request(f"r{number}", rng.randint(1, 40), rng.randint(1, 24), arrival=now)
        recorder.add_request(request)
    recorder.close()
    (wanted,) = read_recording(tmp_path / "load")
    return what_if(wanted, recorder.limits, SteadyModel())


def test_the_same_limits_and_times_give_the_same_run(steady):
    limits = changed_limits(steady.header.limits, [])
    assert limits_to_map(limits) == steady.header.limits
    again = what_if(steady, limits, SteadyModel())
    assert figures_of(again) == figures_of(steady)
    assert figures_of(steady).ended == 120


def test_a_what_if_run_has_the_recorded_outcomes(tmp_path):
    recorder = record_random_run(tmp_path, 4, count=40)
    (stretch,) = read_recording(tmp_path)
    changed = what_if(stretch, changed_limits(stretch.header.limits, ["policy=fcfs", "num_blocks=28"]), SteadyModel())
    before, after = ({each.number: each for each in arrivals(one)} for one in (stretch, changed))
    ends = {each.end for each in before.values()}
    assert ends == {"stop", "length", "abort"}
    assert {n: (e.end, e.num_output_tokens) for n, e in after.items()} == {
        n: (e.end, e.num_output_tokens) for n, e in before.items()
    }
    assert changed.header.limits["policy"] == "fcfs"
    assert recorder.limits.policy is not Policy.FCFS
    assert_identical(changed)


def test_a_fit_finds_the_times_of_a_steady_device(steady):
    model = fit_device(_with_times(steady))
    assert model.fit.provenance["median_error"] < 0.01


def _with_times(stretch):
    """Sets the device time of each recorded result to the time that ``SteadyDevice`` takes for the step.

    Returns ``stretch``, whose records have changed.
    """
    sizes = {}
    for segment in stretch.segments:
        for record_ in segment.records:
            if record_[0] == 2 and record_[1] is not None:
                step = record_[1]
                sizes[step[0]] = step
        tokens = {}
        for event in segment.events():
            if getattr(event, "step", None) is not None:
                tokens[event.step.seq] = event.step.num_tokens
        for record_ in segment.records:
            if record_[0] == 3:
                record_[6] = round(1e6 * (0.002 + 0.0001 * tokens[record_[1]]))
    return stretch


def test_the_program_compares_recorded_and_what_if(tmp_path, capsys):
    rng = random.Random(6)
    simulation, recorder = recorded_simulation(tmp_path)
    run_next = simulation.device.run_next

    def timed():
        result = run_next()
        result.graph_us = 2000
        return result

    simulation.device.run_next = timed
    random_run(simulation, some_requests(rng, 60), rng)
    recorder.close()
    assert main([str(tmp_path), "--policy", "fcfs", "--set", "scheduler_config.decode_steps_ahead=0"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split("  ")[-1].strip() == "scheduler_config.decode_steps_ahead=0, policy=fcfs"
    table = {row[:20].strip(): row[20:].split() for row in rows if row.startswith("  ")}
    assert table["requests"] == ["60", "60", "60"]
    assert len(set(table["output tokens"])) == 1
    assert {"TTFT p50, ms", "TTFT p99, ms", "TBT p99, ms", "total time, s", "preemptions"} <= table.keys()


@pytest.mark.parametrize("change", ["colour=red", "policy", "policy=sideways", "block_size=0"])
def test_an_invalid_change_gives_exit_code_2(tmp_path, capsys, change):
    record_random_run(tmp_path, 1)
    assert main([str(tmp_path), "--set", change]) == 2
    assert change.partition("=")[0] in capsys.readouterr().err


def test_a_timeline_has_every_phase_of_every_request(steady):
    timeline = build_timeline(steady)
    assert len(timeline.lanes) == 120
    phases = set()
    for lane, arrival in zip(timeline.lanes, arrivals(steady), strict=True):
        assert lane.request_id == arrival.facts["request_id"]
        assert lane.end == arrival.end
        assert lane.num_output_tokens == arrival.num_output_tokens
        phases |= {span.phase for span in lane.spans}
        assert lane.spans[0].begin == arrival.facts["arrival_time"]
        assert lane.spans[-1].end == arrival.token_times[-1]
        for before, after in zip(lane.spans, lane.spans[1:], strict=False):
            assert before.end == after.begin
    assert {SpanPhase.QUEUED, SpanPhase.PREFILL, SpanPhase.DECODE} <= phases


def test_the_timeline_shows_a_preemption(tmp_path):
    recorder = record_random_run(tmp_path, 7, num_blocks=24)
    (stretch,) = read_recording(tmp_path)
    spans = [span for lane in build_timeline(stretch).lanes for span in lane.spans]
    assert recorder.figures.preemptions > 0
    assert sum(span.phase is SpanPhase.PREEMPTED for span in spans) > 0


def test_the_timeline_shows_a_restart_after_a_lost_agent(tmp_path):
    simulation, recorder = recorded_simulation(tmp_path)
    simulation.add(make_request("r"))
    for _ in range(4):
        simulation.step()
    simulation.now = 1.0
    simulation.lose_agent()
    simulation.now = 2.0
    simulation.finish()
    recorder.close()
    (stretch,) = read_recording(tmp_path)
    (lane,) = build_timeline(stretch).lanes
    phases = [span.phase for span in lane.spans]
    assert SpanPhase.RESTARTED in phases
    assert SpanPhase.PREEMPTED not in phases


def test_the_page_contains_everything_and_loads_no_other_file(steady, tmp_path, capsys):
    record_random_run(tmp_path / "run", 7)
    page, trace = tmp_path / "t.html", tmp_path / "t.json"
    assert main([str(tmp_path / "run"), "--html", str(page), "--trace", str(trace)]) == 0
    text = page.read_text()
    assert not re.search(r"(src|href)\s*=|https?:|@import|url\(", text)
    data = json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', text)[1])
    assert len(data["lanes"]) == 80
    assert data["phases"][1] == "queued"
    assert {step[2] for step in data["steps"]} == {"prefill", "decode"}
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    assert sum(event["ph"] == "X" and event["pid"] == 1 for event in events) == len(data["steps"])
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


def test_a_request_id_is_escaped_in_the_page(tmp_path):
    simulation, recorder = recorded_simulation(tmp_path / "run")
    name = "</script><script>alert(1)</script>\u2028"
    simulation.add(make_request(name, 3, 2))
    simulation.finish()
    recorder.close()
    page = tmp_path / "t.html"
    assert main([str(tmp_path / "run"), "--html", str(page)]) == 0
    assert "<script>alert" not in page.read_text()
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', page.read_text())[1]
    assert json.loads(data)["lanes"][0][0] == name
