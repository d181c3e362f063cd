"""The agent's one device thread: loads and compiles the model, then runs queued messages one after the other."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Protocol

from agent.server import AgentServer
from agent.task_queue import TaskQueue
from llm_serving.errors import GroupBrokenError, GroupDownError, LLMServingError
from llm_serving.ipc.messages import (
    Decode,
    Failed,
    Move,
    Prefill,
    Progress,
    Ready,
    Reset,
    ResetDone,
    Shutdown,
    Step,
    StepDone,
    StepFailed,
)
from llm_serving.ipc.shm import SlotMemory, StepSlot

logger = logging.getLogger("agent.worker")

MAX_ERROR_CHARS = 8000

StartReport = Callable[[str, int, int], None]
"""Called with a stage of the start, units done, units in all."""


class Runner(Protocol):
    """What the worker drives; ``ModelRunner`` is the one with a model. Used by one thread only.

    ``run_prefill``, ``run_decode`` and ``run_moves`` read a slot's inputs, write its outputs and return the
    microseconds spent in the graph (or moving blocks) and in the sampler. An exception is the failure of that step
    alone.
    """

    def load(self) -> None: ...

    def compile(self) -> None: ...

    def warm_up(self) -> None: ...

    def summary(self) -> dict[str, str | int | float]: ...

    def run_prefill(self, slot: StepSlot) -> tuple[int, int]: ...

    def run_decode(self, slot: StepSlot) -> tuple[int, int]: ...

    def run_moves(self, slot: StepSlot) -> tuple[int, int]: ...

    def reset(self) -> None: ...


class Worker:
    """Runs in the process's main thread and owns the device."""

    def __init__(self, make_runner: Callable[[StartReport], Runner], queue: TaskQueue, server: AgentServer) -> None:
        self._make_runner = make_runner
        self._queue = queue
        self._server = server

    def run(self) -> int:
        """Serve until shut down; the process's exit code. Problems at the start are reported to the server."""
        memory = self._server.wait_until_connected()
        try:
            runner = self._start()
        except Exception as error:
            logger.exception("the agent could not start")
            failed = Failed(error=str(error)[:MAX_ERROR_CHARS], traceback=traceback.format_exc()[-MAX_ERROR_CHARS:])
            self._server.send(failed)
            return 1
        self._server.send(Ready(summary=runner.summary()))
        return self._serve(memory, runner)

    def _start(self) -> Runner:
        runner = self._make_runner(
            lambda stage, done, total: self._server.send(Progress(stage=stage, done=done, total=total))
        )
        runner.load()
        runner.compile()
        runner.warm_up()
        return runner

    def _serve(self, memory: SlotMemory, runner: Runner) -> int:
        """Until the end is asked for, 0, or the group is gone, 1."""
        while True:
            message, queue_us = self._queue.get()
            if isinstance(message, Shutdown):
                return 0
            if isinstance(message, Reset):
                runner.reset()
                self._server.send(ResetDone(seq=message.seq))
                continue
            try:
                answer = _run_step(message, queue_us, memory, runner)
            except GroupDownError as error:
                logger.error("step %d: %s; this agent ends with its group", message.seq, error)
                if isinstance(error, GroupBrokenError):  # else the step is not to blame, and may be computed again
                    self._server.send(_failure(message, str(error)))
                return 1
            self._server.send(answer)


def _run_step(step: Step, queue_us: int, memory: SlotMemory, runner: Runner) -> StepDone | StepFailed:
    """Run one step. Whatever goes wrong is this step's failure, not the agent's; but GroupDownError is the end."""
    try:
        slot = memory.slots[step.slot]
        slot.check_header(step.seq)
        run = {Prefill: runner.run_prefill, Decode: runner.run_decode, Move: runner.run_moves}[type(step)]
        graph_us, sample_us = run(slot)
    except GroupDownError:
        raise
    except Exception as error:
        expected = isinstance(error, LLMServingError)
        logger.log(logging.WARNING if expected else logging.ERROR, "step %d failed", step.seq, exc_info=not expected)
        text = str(error) if expected else f"{type(error).__name__}: {error}"
        return _failure(step, text)
    return StepDone(seq=step.seq, slot=step.slot, queue_us=queue_us, graph_us=graph_us, sample_us=sample_us)


def _failure(step: Step, text: str) -> StepFailed:
    return StepFailed(seq=step.seq, slot=step.slot, error=text[:MAX_ERROR_CHARS])
