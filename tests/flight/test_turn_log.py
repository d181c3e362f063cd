"""The log of turns: what it takes down and what it refuses, in Python and the same in C."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

import pytest

from llm_serving.flight.setup import NOT_NATIVE, recorder_of
from llm_serving.flight.turn_log import DUE, IS_NATIVE, REFUSED, TAKEN, TurnLog, turn_log
from llm_serving.scheduler.output import BlockMove, MoveKind, RequestUpdate, ScheduledStep, StepKind, StepResult
from llm_serving.scheduler.scheduler import Scheduler
from support.fakes import make_limits, make_request
from support.small_configs import REPOSITORY, small_config

COUNTS = (2, 0, 7, 0, 2, 0, 0)
MAX_TURNS = 8
ENDING = 99
MAKERS = [TurnLog] + [turn_log] * IS_NATIVE
SOURCE = REPOSITORY / "llm_serving" / "flight" / "_turn_log.c"


def test_it_is_built_where_it_can_be():
    assert IS_NATIVE or not (Path(sysconfig.get_path("include")) / "Python.h").is_file()


def test_its_lines_are_as_short_as_those_of_python():
    assert [line for line in SOURCE.read_text().splitlines() if len(line) > 120] == []


@pytest.mark.parametrize("is_native", [True, False])
def test_a_server_says_when_it_is_not_built(tmp_path, monkeypatch, is_native):
    monkeypatch.setattr("llm_serving.flight.setup.IS_NATIVE", is_native)
    complaints = []
    recorder = recorder_of(small_config(tmp_path), Scheduler(make_limits()), complaints.append)
    recorder.close()
    assert complaints == ([] if is_native else [NOT_NATIVE])


class Batch:
    """Sequences that decode, the columns of their steps, and answers to them."""

    def __init__(self, size: int = 2, first_seq: int = 5) -> None:
        self.size, self.seq = size, first_seq
        self.requests = [make_request(f"r{index}", 5, 40) for index in range(size)]
        self.columns = {
            "requests": self.requests,
            "rows": list(range(size)),
            "query_lens": [1] * size,
            "block_tables": [[index + 1] for index in range(size)],
            "do_sample": [True] * size,
            "restarts": [False] * size,
        }

    def step(self, **others):
        values = {
            **self.columns,
            "starts": [self.seq + 300 * index for index in range(self.size)],
            "sample_positions": [self.seq + 7 * index for index in range(self.size)],
            **others,
        }
        step = ScheduledStep(self.seq, StepKind.DECODE, **values)
        self.seq += 1
        return step

    def answer(self, seq, **others):
        floats = [1.0] * self.size
        values = {"sampled_ids": [3] * self.size, "logits": floats, "logsumexps": floats, **others}
        return StepResult(seq, queue_us=seq, graph_us=1000 * seq, sample_us=7, **values)

    def updates(self):
        return [RequestUpdate(request, 3, index) for index, request in enumerate(self.requests)]


def begun(make, *, keeps_updates=False, size=2):
    batch = Batch(size)
    log = make(lambda: COUNTS, MAX_TURNS)
    log.due = 1000.0
    log.begin(5, batch.step(), [1] * size, {ENDING}, keeps_updates)
    return log, batch


def turn(log, batch, seq, now):
    assert log.answer(batch.answer(seq), batch.updates(), now)
    assert log.step(batch.step(), now)
    return log.end(now, None)


@pytest.mark.parametrize("make", MAKERS)
def test_turns_leave_their_times_and_blocks(make):
    log, batch = begun(make)
    assert turn(log, batch, 5, 1.0) == TAKEN
    batch.columns["block_tables"][1].extend((8, 9))
    assert turn(log, batch, 6, 2.0) == TAKEN
    latest, answered, sent, *columns = log.take()
    assert (latest.seq, answered, sent) == (7, 5, 6)
    assert columns == [
        [1.0, 2.0], [5, 6], [5000, 6000], [7, 7], [(1, 1, 1, [8, 9])], [(1, COUNTS)], [], [], [1, 3],
    ]  # fmt: skip
    assert log.take() is None
    log.due = 3.0
    assert turn(log, batch, 7, 3.0) == DUE
    assert log.take()[1:5] == (7, 8, [3.0], [7])
    assert log.num_steps == 3


@pytest.mark.parametrize("make", MAKERS)
def test_it_is_due_when_it_is_full_and_then_takes_no_more(make):
    log, batch = begun(make)
    ends = [turn(log, batch, seq, 1.0) for seq in range(5, 5 + MAX_TURNS)]
    assert ends == [TAKEN] * (MAX_TURNS - 1) + [DUE]
    assert not log.answer(batch.answer(5 + MAX_TURNS), batch.updates(), 2.0)
    log.take()
    assert turn(log, batch, 5 + MAX_TURNS, 2.0) == TAKEN


@pytest.mark.parametrize("make", MAKERS)
def test_two_answers_and_two_steps_in_a_turn_are_told(make):
    log, batch = begun(make, keeps_updates=True)
    batch.step()
    log.leave()
    log.begin(5, batch.step(), [1, 1], set(), True)
    first, second = batch.updates(), batch.updates()
    assert log.answer(batch.answer(5), first, 1.0)
    assert log.answer(batch.answer(6), second, 1.0)
    assert log.step(batch.step(), 1.0)
    assert log.step(batch.step(), 1.0)
    assert log.end(1.0, None) == TAKEN
    taken = log.take()
    assert taken[3:5] == ([1.0], [5, 6])
    assert taken[9][0] is first
    assert taken[9][1] is second
    assert taken[10] == [(0, 2, 2, True)]


@pytest.mark.parametrize("make", MAKERS)
def test_a_turn_in_the_middle_of_which_something_happens_is_told_as_far_as_it_went(make):
    log, batch = begun(make)
    turn(log, batch, 5, 1.0)
    assert log.answer(batch.answer(6), batch.updates(), 2.0)
    with pytest.raises(ValueError, match="under way"):
        log.take()
    log.leave()
    taken = log.take()
    assert (taken[0].seq, taken[3], taken[4], taken[10]) == (6, [1.0, 2.0], [5, 6], [(1, 1, 0, False)])
    assert not log.answer(batch.answer(7), batch.updates(), 3.0)
    with pytest.raises(ValueError, match="several sizes"):
        log.begin(5, batch.step(), [1], set(), False)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    "others",
    [
        {"error": "broken"},
        {"aborted": True},
        {"sampled_ids": [3, ENDING]},
        {"sampled_ids": [3, -1]},
        {"sampled_ids": [3]},
        {"logits": [1.0]},
        {"logsumexps": []},
        {"seq": 6},
    ],
)
def test_another_answer_is_refused(make, others):
    log, batch = begun(make)
    values = {"seq": 5, **others}
    assert not log.answer(batch.answer(**values), batch.updates(), 1.0)
    assert turn(log, batch, 5, 1.0) == TAKEN
    assert not log.answer(batch.answer(6), batch.updates()[:1], 2.0)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    "others",
    [
        {"requests": []},
        {"rows": [0, 1]},
        {"query_lens": [1, 1]},
        {"do_sample": [True, True]},
        {"block_tables": [[1], [2]]},
        {"restarts": [True, False]},
        {"starts": [6, 307]},
        {"starts": [6]},
        {"sample_positions": [6, 14]},
        {"moves": [BlockMove(MoveKind.COPY, 1, 2)]},
        {"histories": [None]},
        {"reason": None},
    ],
)
def test_another_step_is_refused(make, others):
    log, batch = begun(make)
    assert log.answer(batch.answer(5), batch.updates(), 1.0)
    assert not log.step(batch.step(**others), 1.0)
    batch.seq -= 1
    assert not log.step(batch.step(), 1.5)
    batch.seq -= 1
    assert log.end(1.0, None) == REFUSED
    assert log.step(batch.step(), 1.0)
    assert log.end(1.0, 2.0) == REFUSED
    assert log.end(1.5, None) == REFUSED
    assert log.end(1.0, None) == TAKEN


def test_a_table_that_is_shorter_is_refused_and_other_kinds_too():
    for make in MAKERS:
        log, batch = begun(make)
        assert log.answer(batch.answer(5), batch.updates(), 1.0)
        step = batch.step()
        step.kind = StepKind.MIXED
        assert not log.step(step, 1.0)
        step.kind = StepKind.DECODE
        table = batch.columns["block_tables"][0]
        table.clear()
        assert not log.step(step, 1.0)
        table.append(1)
        assert log.step(step, 1.0)


@pytest.mark.skipif(not IS_NATIVE, reason="not built")
@pytest.mark.parametrize("seed", range(5))
def test_random_calls_mean_the_same_to_both(seed):
    rng = random.Random(seed)
    batch = Batch(3)
    logs = [make(lambda: COUNTS, MAX_TURNS) for make in MAKERS]
    latest, answered, now, num_taken = batch.step(), 5, 0.0, 0
    for log in logs:
        log.due = 1e9
        log.begin(5, latest, [1, 1, 1], {ENDING}, True)

    def both(call):
        nonlocal num_taken
        results = [call(log) for log in logs]
        assert results[0] == results[1]
        num_taken += results[0] in (True, TAKEN, DUE)
        return results[0]

    for _ in range(2000):
        choice = rng.random()
        if choice < 0.35:
            token = rng.choice((3, 3, 3, 3, 3, 3, 400, 70000, ENDING, -1))
            answer, updates = batch.answer(answered, sampled_ids=[3, token, 5]), batch.updates()
            answered += bool(both(lambda log: log.answer(answer, updates, now)))  # noqa: B023
        elif choice < 0.65:
            if rng.random() < 0.2:
                batch.columns["block_tables"][rng.randrange(3)].append(rng.randrange(1000))
            step = batch.step()
            batch.seq -= not both(lambda log: log.step(step, now))  # noqa: B023
        elif choice < 0.95:
            if both(lambda log: log.end(now, None)) != REFUSED:  # noqa: B023
                now += rng.choice((0.0, 0.25))
        else:
            both(lambda log: log.leave())
            taken = both(lambda log: log.take())
            latest = latest if taken is None else taken[0]
            lens = list(map(len, batch.columns["block_tables"]))
            both(lambda log: log.begin(answered, latest, lens, {ENDING}, True))  # noqa: B023
    assert logs[0].num_steps == logs[1].num_steps > 100
    assert num_taken > 400


@pytest.mark.skipif(not IS_NATIVE, reason="not built")
def test_it_reads_only_classes_whose_fields_are_slots():
    from llm_serving.flight._turn_log import TurnLog as NativeTurnLog

    class Loose:
        seq = 0

    with pytest.raises(TypeError, match=r"Loose.seq is not a slot"):
        NativeTurnLog(Loose, StepResult, lambda: COUNTS, 4)
