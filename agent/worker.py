"""The agent's device thread: loads and compiles the model, then runs queued messages one after the other."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping

from agent.model_runner import ModelRunner, RowCheckError, StartReport
from agent.server import AgentServer
from agent.task_queue import TaskQueue
from llm_serving.errors import GroupBrokenError, GroupDownError, LLMServingError
from llm_serving.ipc.messages import (
    Decode,
    Failed,
    Move,
    ProfileStart,
    ProfileStop,
    Progress,
    Ready,
    Shutdown,
    Step,
    StepDone,
    StepFailed,
    Unhealthy,
)
from llm_serving.ipc.shm import SlotMemory

logger = logging.getLogger("agent.worker")

MAX_ERROR_CHARS = 8000


class Worker:
    """Loads the model and runs the queued messages, in the process's main thread. Only this thread uses the device."""

    def __init__(
        self,
        make_runner: Callable[[StartReport], ModelRunner],
        queue: TaskQueue,
        server: AgentServer,
        facts: Mapping[str, str],
    ) -> None:
        """``facts`` about the process extend the summary that the agent sends when it is ready."""
        self._make_runner = make_runner
        self._queue = queue
        self._server = server
        self._facts = facts

    def run(self) -> int:
        """Runs until shutdown and returns the process's exit code. Reports a failed start to the server."""
        memory = self._server.wait_until_connected()
        try:
            runner = self._start()
        except Exception as error:
            logger.exception("the agent could not start")
            failed = Failed(error=str(error)[:MAX_ERROR_CHARS], traceback=traceback.format_exc()[-MAX_ERROR_CHARS:])
            self._server.send(failed)
            return 1
        self._server.send(Ready(summary={**runner.summary(), **self._facts}))
        return self._serve(memory, runner)

    def _start(self) -> ModelRunner:
        runner = self._make_runner(
            lambda stage, done, total: self._server.send(Progress(stage=stage, done=done, total=total))
        )
        runner.load()
        runner.compile()
        runner.warm_up()
        return runner

    def _serve(self, memory: SlotMemory, runner: ModelRunner) -> int:
        """Runs messages. Returns 0 after Shutdown and 1 if the group failed."""
        while True:
            message, queue_us = self._queue.get()
            if isinstance(message, Shutdown):
                return 0
            if isinstance(message, ProfileStart):
                self._server.send(runner.profiling.start(message.seq, message.folder))
                continue
            if isinstance(message, ProfileStop):
                self._server.send(runner.profiling.stop(message.seq))
                continue
            try:
                result = _run_step(message, queue_us, memory, runner)
            except GroupDownError as error:
                logger.error("step %d: %s; this agent ends with its group", message.seq, error)
                # any other error was not caused by the step, which may run again
                if isinstance(error, GroupBrokenError):
                    self._server.send(_failure(message, str(error)))
                return 1
            except RowCheckError as error:
                logger.error("step %d failed a self-check: %s", message.seq, error)
                self._server.send(Unhealthy(seq=message.seq, slot=message.slot, error=str(error)))
                continue
            self._server.send(result)


def _run_step(step: Step, queue_us: int, memory: SlotMemory, runner: ModelRunner) -> StepDone | StepFailed:
    """Runs one step. Returns the result, or StepFailed for any error except GroupDownError, which is raised."""
    try:
        slot = memory.slots[step.slot]
        slot.check_header(step.seq)
        if isinstance(step, Move):
            cost = runner.run_moves(slot)
        else:
            cost = runner.run_step(slot, is_decode=isinstance(step, Decode))
        kind = type(step).__name__.lower()
        runner.profiling.add_step(kind, slot.num_tokens, slot.num_seqs, (queue_us, cost.graph_us, cost.sample_us))
    except (GroupDownError, RowCheckError):
        raise
    except Exception as error:
        expected = isinstance(error, LLMServingError)
        logger.log(logging.WARNING if expected else logging.ERROR, "step %d failed", step.seq, exc_info=not expected)
        text = str(error) if expected else f"{type(error).__name__}: {error}"
        return _failure(step, text)
    return StepDone(seq=step.seq, slot=step.slot, queue_us=queue_us, **cost._asdict())


def _failure(step: Step, text: str) -> StepFailed:
    return StepFailed(seq=step.seq, slot=step.slot, error=text[:MAX_ERROR_CHARS])
