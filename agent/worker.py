"""The agent's one device thread: loads and compiles the model, then runs queued messages one after the other."""

from __future__ import annotations

import logging
import traceback

from agent.model_runner import ModelRunner
from agent.server import AgentServer
from agent.task_queue import Step, TaskQueue
from llm_serving.config import Config
from llm_serving.errors import LLMServingError
from llm_serving.ipc.messages import (
    Failed,
    Prefill,
    Progress,
    Ready,
    Reset,
    ResetDone,
    Shutdown,
    StepDone,
    StepFailed,
)
from llm_serving.ipc.shm import SlotMemory

logger = logging.getLogger("agent.worker")

_ERROR_CHARS = 8000


class Worker:
    """Runs in the process's main thread and owns the device."""

    def __init__(self, config: Config, queue: TaskQueue) -> None:
        self._config = config
        self._queue = queue
        self.steps_run = 0

    def run(self, server: AgentServer) -> int:
        """Serve until shut down; the process's exit code. Problems at the start are reported to the server."""
        memory = server.wait_until_connected()
        try:
            runner = self._start(server)
        except Exception as error:
            logger.error("the agent could not start: %s", error)
            server.send(Failed(error=str(error)[:_ERROR_CHARS], traceback=traceback.format_exc()[-_ERROR_CHARS:]))
            return 1
        server.send(Ready(summary=runner.summary()))
        self._serve(server, memory, runner)
        return 0

    def _start(self, server: AgentServer) -> ModelRunner:
        runner = ModelRunner(
            self._config, lambda stage, done, total: server.send(Progress(stage=stage, done=done, total=total))
        )
        runner.load()
        runner.compile()
        runner.warm_up()
        return runner

    def _serve(self, server: AgentServer, memory: SlotMemory, runner: ModelRunner) -> None:
        while True:
            message, queue_us = self._queue.get()
            if isinstance(message, Shutdown):
                return
            if isinstance(message, Reset):
                runner.reset()
                server.send(ResetDone(seq=message.seq))
                continue
            server.send(self._run_step(message, queue_us, memory, runner))

    def _run_step(self, step: Step, queue_us: int, memory: SlotMemory, runner: ModelRunner) -> StepDone | StepFailed:
        """Run one step. Whatever goes wrong is this step's failure, not the agent's."""
        try:
            slot = memory.slots[step.slot]
            slot.check_header(step.seq)
            run = runner.run_prefill if isinstance(step, Prefill) else runner.run_decode
            graph_us, sample_us = run(slot)
        except Exception as error:
            level = logging.WARNING if isinstance(error, LLMServingError) else logging.ERROR
            logger.log(level, "step %d failed: %s", step.seq, error, exc_info=level == logging.ERROR)
            return StepFailed(seq=step.seq, slot=step.slot, error=f"{type(error).__name__}: {error}"[:_ERROR_CHARS])
        finally:
            self.steps_run += 1
        return StepDone(seq=step.seq, slot=step.slot, queue_us=queue_us, graph_us=graph_us, sample_us=sample_us)
