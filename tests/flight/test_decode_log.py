"""Tests the log of undisturbed decoding, in which each loop iteration gives every sequence one token.

The tests show which loop iterations the log accepts and which it refuses.
"""

from __future__ import annotations

import pytest

from llm_serving.flight.decode_log import DUE, LOGGED, REFUSED, DecodeLog
from llm_serving.scheduler.output import BlockMove, MoveKind, RequestUpdate, ScheduledStep, StepKind, StepResult
from support.fakes import make_request

COUNTS = (2, 0, 7, 0, 2, 0, 0)
MAX_ITERATIONS = 8
ENDING = 99


class Batch:
    """A batch of decoding sequences. Makes their steps as columns, and the results of these steps."""

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

    def result(self, seq, **others):
        floats = [1.0] * self.size
        values = {"sampled_ids": [3] * self.size, "logits": floats, "logsumexps": floats, **others}
        return StepResult(seq, queue_us=seq, graph_us=1000 * seq, sample_us=7, **values)

    def updates(self):
        return [RequestUpdate(request, 3, index) for index, request in enumerate(self.requests)]


def begun(*, keeps_updates=False, size=2):
    batch = Batch(size)
    log = DecodeLog(lambda: COUNTS, MAX_ITERATIONS)
    log.due = 1000.0
    log.begin(5, batch.step(), [1] * size, {ENDING}, keeps_updates)
    return log, batch


def iterate(log, batch, seq, now):
    assert log.result(batch.result(seq), batch.updates(), now)
    assert log.step(batch.step(), now)
    return log.end(now, None)


def test_the_run_has_the_times_and_the_new_blocks():
    log, batch = begun()
    assert iterate(log, batch, 5, 1.0) == LOGGED
    batch.columns["block_tables"][1].extend((8, 9))
    assert iterate(log, batch, 6, 2.0) == LOGGED
    run = log.take()
    assert (run.latest.seq, run.first_result, run.first_step) == (7, 5, 6)
    assert (run.times, run.times_us) == ([1.0, 2.0], [(5, 5000, 7), (6, 6000, 7)])
    assert (run.growths, run.counts, run.table_lens) == ([(1, 1, 1, [8, 9])], [(1, COUNTS)], [1, 3])
    assert (run.updates, run.irregular) == ([], [])
    assert log.take() is None
    log.due = 3.0
    assert iterate(log, batch, 7, 3.0) == DUE
    run = log.take()
    assert (run.first_result, run.first_step, run.times, run.times_us) == (7, 8, [3.0], [(7, 7000, 7)])
    assert log.num_steps == 3


def test_a_full_log_is_due_and_accepts_no_more():
    log, batch = begun()
    ends = [iterate(log, batch, seq, 1.0) for seq in range(5, 5 + MAX_ITERATIONS)]
    assert ends == [LOGGED] * (MAX_ITERATIONS - 1) + [DUE]
    assert not log.result(batch.result(5 + MAX_ITERATIONS), batch.updates(), 2.0)
    log.take()
    assert iterate(log, batch, 5 + MAX_ITERATIONS, 2.0) == LOGGED


def test_two_results_and_two_steps_make_an_iteration_irregular():
    log, batch = begun(keeps_updates=True)
    batch.step()
    log.stop()
    log.begin(5, batch.step(), [1, 1], set(), True)
    first, second = batch.updates(), batch.updates()
    assert log.result(batch.result(5), first, 1.0)
    assert log.result(batch.result(6), second, 1.0)
    assert log.step(batch.step(), 1.0)
    assert log.step(batch.step(), 1.0)
    assert log.end(1.0, None) == LOGGED
    run = log.take()
    assert (run.times, [seq for seq, _, _ in run.times_us]) == ([1.0], [5, 6])
    assert run.updates[0] is first
    assert run.updates[1] is second
    assert run.irregular == [(0, 2, 2, True)]


def test_an_interrupted_iteration_is_irregular():
    log, batch = begun()
    iterate(log, batch, 5, 1.0)
    assert log.result(batch.result(6), batch.updates(), 2.0)
    with pytest.raises(ValueError, match="has not ended"):
        log.take()
    log.stop()
    run = log.take()
    assert (run.latest.seq, run.times, len(run.times_us), run.irregular) == (6, [1.0, 2.0], 2, [(1, 1, 0, False)])
    assert not log.result(batch.result(7), batch.updates(), 3.0)
    with pytest.raises(ValueError, match="different sizes"):
        log.begin(5, batch.step(), [1], set(), False)


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
def test_a_result_that_disturbs_decoding_is_refused(others):
    log, batch = begun()
    values = {"seq": 5, **others}
    assert not log.result(batch.result(**values), batch.updates(), 1.0)
    assert iterate(log, batch, 5, 1.0) == LOGGED
    assert not log.result(batch.result(6), batch.updates()[:1], 2.0)


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
def test_a_step_that_disturbs_decoding_is_refused(others):
    log, batch = begun()
    assert log.result(batch.result(5), batch.updates(), 1.0)
    assert not log.step(batch.step(**others), 1.0)
    batch.seq -= 1
    assert not log.step(batch.step(), 1.5)
    batch.seq -= 1
    assert log.end(1.0, None) == REFUSED
    assert log.step(batch.step(), 1.0)
    assert log.end(1.0, 2.0) == REFUSED
    assert log.end(1.5, None) == REFUSED
    assert log.end(1.0, None) == LOGGED


def test_a_shorter_block_table_and_another_kind_of_step_are_refused():
    log, batch = begun()
    assert log.result(batch.result(5), batch.updates(), 1.0)
    step = batch.step()
    step.kind = StepKind.MIXED
    assert not log.step(step, 1.0)
    step.kind = StepKind.DECODE
    table = batch.columns["block_tables"][0]
    table.clear()
    assert not log.step(step, 1.0)
    table.append(1)
    assert log.step(step, 1.0)
