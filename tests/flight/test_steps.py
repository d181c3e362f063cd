"""Tests the records of steps. The reader restores every column and every block table."""

from __future__ import annotations

import random

import pytest

from llm_serving.flight.format import MAGIC, FrameReader, encode_frame
from llm_serving.flight.step_writer import StepWriter
from llm_serving.flight.steps import StepReader
from llm_serving.scheduler.limits import Policy, PreemptionKind
from llm_serving.scheduler.output import ScheduledStep, StepKind, StepReason
from support.fakes import make_limits
from support.recorded_runs import some_requests
from support.simulation import Simulation, random_run


class Watched(Simulation):
    """Writes each scheduled step to a record, reads it back, and compares both."""

    def __init__(self, limits):
        super().__init__(limits)
        self.writer, self.reader = StepWriter(), StepReader()
        self.block_tables = {}
        self.numbers = {}
        self.bytes = 0

    def schedule(self):
        schedule = self.scheduler.schedule

        def watched(now):
            step = schedule(now)
            if step is not None:
                self.look_at(step)
            return step

        self.scheduler.schedule = watched
        try:
            return super().schedule()
        finally:
            del self.scheduler.schedule

    def number(self, request):
        return self.numbers.setdefault(request.request_id, len(self.numbers))

    def look_at(self, step):
        frame = encode_frame(self.writer.record(step, self.number))
        self.bytes += len(frame)
        read = self.reader.step(next(FrameReader(MAGIC + frame, None)))
        numbers = [self.number(request) for request in step.requests]
        for index, place, blocks in read.blocks:
            table = self.block_tables.setdefault(numbers[index], [])
            del table[place:]
            table += blocks
        assert read.numbers == numbers
        for name in ("seq", "kind", "rows", "query_lens", "starts", "do_sample", "sample_positions", "moves"):
            assert getattr(read, name) == getattr(step, name), name
        assert read.restarts == [index for index, restarts in enumerate(step.restarts) if restarts]
        assert read.histories == [history.index for history in step.histories]
        assert read.reason == step.reason.name
        assert (read.num_seqs, read.num_tokens) == (step.num_seqs, step.num_tokens)
        assert [self.block_tables[number] for number in numbers] == step.block_tables


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("kind", [PreemptionKind.RECOMPUTE, PreemptionKind.SWAP])
def test_every_step_of_a_run_is_restored(policy, kind):
    rng = random.Random(5)
    watched = Watched(
        make_limits(num_blocks=24, policy=policy, preemption=kind, num_host_blocks=30, prefix_cache=rng.random() < 0.5)
    )
    random_run(watched, some_requests(rng, 60), rng, aborts=0.02)
    assert len(watched.steps) > 100


def decode(seq, requests, start, tables):
    return ScheduledStep(
        seq,
        StepKind.DECODE,
        requests,
        rows=[0, 1, 2],
        token_ids=[-1] * 3,
        query_lens=[1] * 3,
        starts=[start] * 3,
        block_tables=tables,
        do_sample=[True] * 3,
        sample_positions=[start - 5] * 3,
        reason=StepReason.ROWS_READY,
    )


def test_a_decode_step_of_an_unchanged_batch_is_next_to_nothing():
    requests, tables = some_requests(random.Random(1), 3), [[1, 2], [3, 4], [5, 6]]
    writer = StepWriter()
    first = writer.record(decode(7, requests, 6, tables), requests.index)
    assert first[2:5] == [[[0, 1, 2], [0, 1, 2], None, None], [6] * 3, [1] * 3]
    assert first[5] == [(0, 0, [1, 2]), (1, 0, [3, 4]), (2, 0, [5, 6])]
    tables[1].append(9)
    second = writer.record(decode(8, requests, 7, tables), requests.index)
    assert second == [8, 1, None, None, None, [(1, 2, [9])], [], None, [], "ROWS_READY"]
    assert len(encode_frame(second)) < 40
    third = writer.record(decode(9, requests, 8, [tables[0], [3, 4, 9], tables[2]]), requests.index)
    assert third[5] == [(1, 0, [3, 4, 9])], "another table, though it holds the same"


def test_a_new_segment_contains_whole_block_tables():
    requests, tables = some_requests(random.Random(1), 3), [[1, 2], [3, 4], [5, 6]]
    StepWriter().record(decode(7, requests, 6, tables), requests.index)
    assert len(StepWriter().record(decode(8, requests, 7, tables), requests.index)[5]) == 3
