"""Runs a short chaos test with a single agent, and tests the ledger of its faults and losses.

tests/long/chaos.py runs the same kind of test for minutes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import pytest

from support.chaos_faults import KINDS, FaultRig, Injection, Outcome, schedule
from support.chaos_ledger import POOL_THREADS, Holdings, Ledger, MemoryWatch
from support.chaos_load import REQUESTS, Answer, ChaosLoad
from support.fault_environment import fault_environment
from support.fault_module.sitecustomize import damaged
from support.server_process import running_server
from support.small_configs import REPOSITORY
from support.time_limits import time_limit

FAULTS = (
    Injection("corrupt", 0, "flip", 0.0),
    Injection("disconnect", 0, "", 0.0),
    Injection("descriptors", 0, "", 0.0),
)


def test_faults_change_no_text_and_leak_nothing(shallow_model, tmp_path):
    orders = tmp_path / "orders"
    orders.mkdir()
    # Agents read fault orders from a folder and remove them, which confinement would not permit.
    settings = ["serving_config.confine_agents=off", f"model_config.model_path={shallow_model}"]
    with fault_environment(CHAOS_FOLDER=str(orders)), running_server(tmp_path / "server", settings) as server:
        load = ChaosLoad(server.url, seed=1, num_clients=2)
        with load:
            rig = FaultRig(server, orders, load)
            outcomes = []
            before = None
            # The last fault is also injected first, because the server then starts threads that it keeps. ``before``
            # must count these threads.
            for injection in (FAULTS[-1], *FAULTS):
                outcomes.append(rig.inject(injection))
                if before is None:
                    before = quiet_holdings(server, load)
            after = quiet_holdings(server, load)
        ledger = Ledger(load, outcomes)
    assert ledger.losses == []
    assert before.leaks(after) == []
    assert [row.count for row in map(ledger.rows.get, ("corrupt", "disconnect", "descriptors"))] == [1, 1, 2]
    assert ledger.rows["corrupt"].detected_s
    assert ledger.figures()["answers"] > 5


@pytest.mark.sweep
@pytest.mark.parametrize("plant", [None, "leak", "corruption"])
def test_the_program_finds_the_bug_that_it_plants(plant):
    """The same run without a planted bug finds nothing."""
    arguments = ["--minutes", "0.2", "--seed", "1", "--only", "disconnect,flood"]
    for setting in ("parallel_config.tensor_parallel=1", "parallel_config.data_parallel=1"):
        arguments += ["--set", setting]
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "tests/long/chaos.py"), *arguments, *(["--plant", plant] if plant else [])],
        capture_output=True,
        text=True,
        timeout=time_limit(180.0),
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == (1 if plant else 0), done.stdout + done.stderr
    assert figures["pass"] is (plant is None)
    assert (figures["wrong"] > 0) == (plant == "corruption")
    growth = [float(found) for found in re.findall(r"^  memory: (\S+) MiB more", done.stdout, re.M)]
    assert figures["leaks"] == len(growth) == (plant == "leak")
    # The planted bug keeps 256 KiB of each request. A server without it grows by less than 10 MiB in its first minute.
    assert all(each > 10.0 for each in growth)


def quiet_holdings(server, load):
    assert load.pause(timeout_s=60.0)
    server.wait_until_idle()
    found = Holdings.of(server)
    load.resume()
    return found


def test_a_seed_repeats_the_schedule_and_a_round_has_every_kind():
    size = len(KINDS)
    first, second = list(islice(schedule(7, 4), 3 * size)), list(islice(schedule(7, 4), 3 * size))
    assert first == second
    assert first != list(islice(schedule(8, 4), 3 * size))
    for start in range(0, 3 * size, size):
        assert sorted(each.kind for each in first[start : start + size]) == sorted(KINDS)
    assert {each.kind for each in islice(schedule(7, 1, ("kill", "stop")), 6)} == {"kill", "stop"}


FAULT = Outcome(Injection("kill", 0, "", 0.0), began=10.0, ended=15.0, detected_s=0.1, recovered_s=5.0, pause_s=4.0)
GOOD = Answer(0, 11.0, 12.0, ("text",))


def ledger_of(*answers: Answer, outcome: Outcome = FAULT, hung: int = 0) -> Ledger:
    load = SimpleNamespace(answers=list(answers), num_hung=hung, expected=[("text",)])
    load.is_equal = lambda answer: ChaosLoad.is_equal(load, answer)
    return Ledger(load, [outcome])


def test_good_answers_and_explained_failures_are_no_losses():
    refused = replace(GOOD, texts=(), error="the server is recovering", status=503)
    ledger = ledger_of(GOOD, refused, replace(refused, status=200), replace(GOOD, began=1.0, ended=2.0))
    assert ledger.losses == []
    assert (ledger.rows["kill"].answered, ledger.rows["kill"].failed) == (3, 2)
    assert (ledger.rows["kill"].recovered_s, ledger.rows["kill"].start_s) == ([5.0], [1.0])
    assert ledger.rows["no fault"].answered == 1


@pytest.mark.parametrize(
    ("answer", "phrase"),
    [
        (replace(GOOD, texts=("other",)), "got another text during kill"),
        (replace(GOOD, texts=(), error="no", status=500), "failed during kill: 500"),
        (replace(GOOD, texts=(), error="no response", status=0), "failed during kill: 0"),
        (Answer(0, 1.0, 2.0, (), "recovering", 503), "failed during no fault: 503"),
        (Answer(0, 30.0, 31.0, ("",)), "got another text during no fault"),
    ],
)
def test_everything_else_is_a_loss(answer, phrase):
    [loss] = ledger_of(GOOD, answer).losses
    assert phrase in loss


def test_a_fault_without_recovery_and_a_client_without_response_are_losses():
    assert len(ledger_of(outcome=replace(FAULT, problem="the server did not recover")).losses) == 1
    assert ledger_of(hung=2).losses == ["2 clients never got a response"]


def test_a_server_with_other_texts_than_its_reference_gets_no_load(monkeypatch):
    answers = [Answer(number, 1.0, 2.0, (f"text {number}",)) for number in range(len(REQUESTS))]
    monkeypatch.setattr("support.chaos_load.undisturbed", lambda url: answers)
    texts = [answer.texts for answer in answers]
    assert ChaosLoad("", 1, reference=texts).expected == texts
    with pytest.raises(AssertionError, match="the servers differ"):
        ChaosLoad("", 1, reference=[*texts[1:], texts[0]])


def test_memory_that_grows_is_a_leak_and_noise_is_none():
    watch = MemoryWatch([(float(second), 200.0 + (second % 3)) for second in range(600)])
    assert watch.leak() == ""
    watch = MemoryWatch([(float(second), 200.0 + 0.06 * second) for second in range(600)])
    assert watch.slope_mib() == pytest.approx(36.0)
    assert "memory: 21.5 MiB more" in watch.leak()


@pytest.mark.parametrize(
    ("minutes", "slope", "is_leak"), [(30, 1.1, True), (30, 0.9, False), (20, 3.0, True), (10, 3.0, False)]
)
def test_a_long_run_may_grow_by_the_goal_and_no_more(minutes, slope, is_leak):
    watch = MemoryWatch([(float(second), 200.0 + slope * second / 600) for second in range(60 * minutes)])
    assert watch.slope_mib() == pytest.approx(slope)
    assert bool(watch.leak()) == is_leak


def test_memory_counts_after_the_first_round_of_faults():
    samples = [(float(second), 200.0 + 0.1 * min(second, 600)) for second in range(1000)]
    assert MemoryWatch(samples).leak() != ""
    assert MemoryWatch(samples, first_round_end=600.0).leak() == ""
    assert MemoryWatch(samples, first_round_end=100.0).counted()[0][0] == 400.0, "the warm-up is at least 40 %"


def test_two_versions_during_a_reload_are_no_growth():
    samples = [(float(second), 220.0 if 900 <= second <= 930 else 200.0) for second in range(1000)]
    assert MemoryWatch(samples).slope_mib() > 1.0
    assert MemoryWatch(samples, reloads=[(900.0, 930.0)]).slope_mib() == pytest.approx(0.0)
    assert MemoryWatch(samples, reloads=[(900.0, 929.0)]).slope_mib() > 0.0


def test_an_agent_that_grows_is_a_leak_and_a_larger_successor_is_none():
    steady = {pid: [(600.0 * pid + second, 400.0 + 50.0 * pid) for second in range(300)] for pid in range(3)}
    assert MemoryWatch(agents=steady).leak() == ""
    growing = {pid: [(at, size + 0.02 * (at % 600.0)) for at, size in life] for pid, life in steady.items()}
    watch = MemoryWatch(agents=growing)
    assert watch.agents_slope_mib() == pytest.approx(12.0)
    assert "memory of an agent: 5.4 MiB more" in watch.leak()


def test_the_start_of_an_agent_is_no_growth():
    life = [(float(second), 40.0 + 6.0 * min(75, second)) for second in range(300)]
    watch = MemoryWatch(agents={1: life})
    assert watch.leak() == ""
    assert watch.agents_slope_mib() == pytest.approx(0.0)


def test_the_end_of_an_agent_does_not_hide_that_agents_grow():
    watch = MemoryWatch()
    for pid in range(3):
        for second in range(300):
            watch.add_agent(pid, (600.0 * pid + second, 400.0 + 0.02 * second))
        watch.add_agent(pid, (600.0 * pid + 300, 0.0))
    assert watch.agents_slope_mib() == pytest.approx(12.0)
    assert "memory of an agent" in watch.leak()


def test_more_of_anything_is_a_leak():
    before = Holdings(agents=4, descriptors=40, threads=9, segments=2)
    assert before.leaks(before) == []
    assert before.leaks(replace(before, descriptors=39)) == []
    assert before.leaks(replace(before, threads=9 + POOL_THREADS)) == []
    later = 10 + POOL_THREADS
    assert before.leaks(replace(before, threads=later)) == [f"threads: 9 at the start, {later} at the end"]
    assert before.leaks(replace(before, descriptors=41)) == ["descriptors: 40 at the start, 41 at the end"]


def test_each_order_damages_a_frame_in_its_way():
    frame = b"\x03\x00\x00\x00abc"
    assert damaged("flip", frame) == b"\x03\x00\x00\x00!bc"
    assert damaged("truncate", frame) == b"\x03\x00\x00\x00"
    assert damaged("duplicate", frame) == frame * 2
    assert damaged("huge", frame) == b"\xff\xff\xff\xffabc"
