#!/usr/bin/env python3
"""Records a run of the scheduler with the agent's own task queue: ``planted_run.py FOLDER POLICY``.

Scheduler and queue are those of the tree on ``PYTHONPATH``, which may contain a planted bug.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from agent.task_queue import TaskQueue
from llm_serving.flight.setup import record
from llm_serving.ipc.messages import Decode, Move, Prefill
from llm_serving.ipc.shm import NUM_SLOTS
from llm_serving.request import Request
from llm_serving.sampling_params import SamplingParams
from llm_serving.scheduler.limits import Policy, SchedulerLimits
from llm_serving.scheduler.output import ScheduledStep, StepKind, StepResult
from llm_serving.scheduler.scheduler import Scheduler

NUM_REQUESTS = 60
_MESSAGES = {StepKind.DECODE: Decode, StepKind.MOVE: Move}


def main(folder: str, policy: str) -> None:
    rng = random.Random(3)
    limits = SchedulerLimits(
        num_blocks=25,
        block_size=4,
        max_model_len=64,
        max_prompt_len=48,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        prefill_batch_size=2,
        decode_batch_size=8,
        policy=Policy(policy),
    )
    scheduler = record(Scheduler(limits), Path(folder), 1 << 22, on_error=sys.exit)
    queue, sent = TaskQueue(policy, NUM_SLOTS), {}
    now, arrived = 0.0, 0
    while arrived < NUM_REQUESTS or not scheduler.is_idle:
        now += 0.01
        while arrived < NUM_REQUESTS and rng.random() < 0.6:
            sampling = SamplingParams(max_tokens=rng.randint(1, 14))
            scheduler.add_request(Request(f"r{arrived}", [7] * rng.randint(1, 40), sampling, now))
            arrived += 1
        while len(sent) < NUM_SLOTS and (step := scheduler.schedule(now)) is not None:
            sent[step.seq] = step
            queue.put(_MESSAGES.get(step.kind, Prefill)(step.seq, step.seq % NUM_SLOTS))
        if sent:
            message, waited_us = queue.get()
            scheduler.update(answer(sent.pop(message.seq), waited_us), now + 0.005)
    scheduler.close()


def answer(step: ScheduledStep, waited_us: int) -> StepResult:
    zeros = [0.0] * len(step.rows)
    sampled = [7 if samples else -1 for samples in step.do_sample]
    return StepResult(step.seq, sampled, zeros, zeros, queue_us=waited_us, graph_us=4000, sample_us=100)


if __name__ == "__main__":
    main(*sys.argv[1:])
