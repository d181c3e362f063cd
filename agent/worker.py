"""The agent's device thread: loads and compiles the model, then runs queued messages one after the other."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping
from functools import partial

from agent.model_runner import ModelRunner, StartReport
from agent.row_check import RowCheckError
from agent.server import AgentServer
from agent.step_cost import StepCost
from agent.task_queue import Idle, StepComputed, TaskQueue
from llm_serving.errors import GroupBrokenError, GroupDownError, LLMServingError, SamplingFailedError
from llm_serving.ipc.messages import (
    AdapterLoad,
    AdapterLoaded,
    Decode,
    Failed,
    Move,
    ProfileStart,
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
"""Maximum length of an error and of its traceback in a message to the server."""


class Worker:
    """Loads the model and runs the queued messages, in the process's main thread. Only this thread uses the device."""

    def __init__(
        self,
        make_runner: Callable[[StartReport], ModelRunner],
        queue: TaskQueue,
        server: AgentServer,
        facts: Mapping[str, str],
    ) -> None:
        """``facts`` describes the process. The agent adds it to the summary that it sends when it is ready."""
        self._make_runner = make_runner
        self._queue = queue
        self._server = server
        self._facts = facts
        self._is_down = False

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
        runner.wait_for_masks = self._server.masks.wait
        runner.host_pool = self._server.pool
        runner.tiles = self._server.tiles
        runner.hand_over_pool = self._server.hand_over
        runner.load()
        runner.compile()
        runner.warm_up()
        return runner

    def _serve(self, memory: SlotMemory, runner: ModelRunner) -> int:
        """Runs queued messages until the agent ends. Returns 0 after Shutdown, or 1 if the group failed."""
        ahead = runner.ahead
        if ahead is not None:
            ahead.on_computed = self._queue.step_computed
        pages = runner.later_pages
        while not self._is_down:
            message, queue_us = self._queue.get(pages.wait_s)
            if isinstance(message, Step):
                self._run_step(message, queue_us, memory, runner)
                if pages.wait_s is not None:
                    pages.allocate_busy()
                continue
            if isinstance(message, Idle):
                pages.allocate_idle()
                continue
            if isinstance(message, StepComputed):
                assert ahead is not None, "only a device that runs ahead computes steps later"
                ahead.finish_computed()
                continue
            if ahead is not None:
                ahead.finish_all()
            if isinstance(message, Shutdown):
                return 0
            if isinstance(message, AdapterLoad):
                self._load_adapter(message, runner)
            elif isinstance(message, ProfileStart):
                self._server.send(runner.profiling.start(message.seq, message.folder))
            else:
                self._server.send(runner.profiling.stop(message.seq))
        return 1

    def _load_adapter(self, message: AdapterLoad, runner: ModelRunner) -> None:
        """Loads a LoRA adapter and replies to the server. If the adapter cannot be loaded, the agent continues to
        serve.
        """
        error = ""
        try:
            runner.load_adapter(message.adapter_slot, message.shm_name, message.num_bytes)
        except (LLMServingError, OSError, MemoryError) as problem:
            logger.warning("an adapter could not be loaded: %s", problem)
            error = str(problem)[:MAX_ERROR_CHARS] or type(problem).__name__
        self._server.send(AdapterLoaded(seq=message.seq, adapter_slot=message.adapter_slot, error=error))

    def _run_step(self, step: Step, queue_us: int, memory: SlotMemory, runner: ModelRunner) -> None:
        """Runs one step. If the device runs ahead, only launches the step, and ``runner.ahead`` finishes it later.

        Two kinds of steps always run to their end here: move steps, and decode steps with a row check.
        """
        outcome: StepCost | Exception
        try:
            slot = memory.slots[step.slot]
            slot.check_header(step.seq)
            is_decode = isinstance(step, Decode)
            if isinstance(step, Move):
                outcome = runner.run_moves(slot)
            elif runner.ahead is None or (is_decode and slot.checked_row):
                outcome = runner.run_step(slot, is_decode=is_decode)
            else:
                done = partial(self._finish, step, queue_us, memory, runner)
                runner.ahead.start(slot, is_decode=is_decode, done=done)
                return
        except Exception as error:
            outcome = error
        self._finish(step, queue_us, memory, runner, outcome)

    def _finish(
        self, step: Step, queue_us: int, memory: SlotMemory, runner: ModelRunner, outcome: StepCost | Exception
    ) -> None:
        """Reports the end of a step to the server: its cost, or its error.

        After a GroupDownError the agent ends. After a RowCheckError the agent reports that it is unhealthy. Any other
        error only fails this step. With a SamplingFailedError, the server knows that the group can continue.
        """
        only_sampling = isinstance(outcome, SamplingFailedError)
        if isinstance(outcome, SamplingFailedError):
            outcome = outcome.cause
        if isinstance(outcome, GroupDownError):
            logger.error("step %d: %s; this agent ends with its group", step.seq, outcome)
            # A GroupBrokenError means that the step failed in this agent. Any other GroupDownError means that another
            # agent failed, and the server may send the step again.
            if isinstance(outcome, GroupBrokenError):
                self._server.send(_failure(step, str(outcome)))
            self._is_down = True
        elif isinstance(outcome, RowCheckError):
            logger.error("step %d failed a self-check: %s", step.seq, outcome)
            self._server.send(Unhealthy(seq=step.seq, slot=step.slot, error=str(outcome)))
        elif isinstance(outcome, Exception):
            expected = isinstance(outcome, LLMServingError)
            level = logging.WARNING if expected else logging.ERROR
            logger.log(level, "step %d failed", step.seq, exc_info=None if expected else outcome)
            text = str(outcome) if expected else f"{type(outcome).__name__}: {outcome}"
            self._server.send(_failure(step, text, only_sampling=only_sampling))
        else:
            slot, kind = memory.slots[step.slot], type(step).__name__.lower()
            times = (queue_us, outcome.graph_us, outcome.sample_us)
            runner.profiling.add_step(kind, slot.num_tokens, slot.num_seqs, times)
            self._server.send(StepDone(seq=step.seq, slot=step.slot, queue_us=queue_us, **outcome._asdict()))


def _failure(step: Step, text: str, *, only_sampling: bool = False) -> StepFailed:
    return StepFailed(seq=step.seq, slot=step.slot, error=text[:MAX_ERROR_CHARS], only_sampling=only_sampling)
