"""Runs an executor over a stub agent that sleeps in a step. The program stops itself meanwhile.

    python -m support.paused_executor FOLDER

There are two steps, in which the agent waits for this process. When the executor has seen the agent asleep, the program
stops itself (SIGSTOP). The test must continue it (SIGCONT). In the second step, the agent is stopped, too, as on a
paused machine. After the pause, the executor checks its agent a few times. Then the program lets the agent continue. It
prints ``result`` for a step that ends, and otherwise the reason of the loss.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

from llm_serving.executor import pauses, vitals
from llm_serving.executor.agent_executor import AgentExecutor
from llm_serving.executor.agent_process import AgentProgram, bind_agent_ports
from llm_serving.executor.base import AgentLost, AgentReady, ExecutorEvent
from llm_serving.executor.vitals import Vitals
from llm_serving.scheduler.output import StepResult
from support.executor_steps import events_until, prefill
from support.small_configs import small_config
from support.stub_agent import AWAIT, AWAITED

STEP_TIMEOUT_S = 3
GRACE_S = 0.5
LOOKS_BEFORE_CONTINUE = 3
_look = Vitals.look


class Steps:
    """Runs steps, and counts how often the executor checks its agent (``Vitals.look``)."""

    def __init__(self, executor: AgentExecutor, awaited: Path) -> None:
        self._executor = executor
        self._awaited = awaited
        self._pauses_agent = self._was_paused = False
        self._num_looks = 0
        """Number of the executor's checks since the pause. 0 before the pause."""

    def run(self, number: int, *, pauses_agent: bool) -> bool:
        """Runs a step and prints its outcome. Returns False if the agent was lost."""
        self._pauses_agent, self._was_paused, self._num_looks = pauses_agent, False, 0
        self._executor.submit(prefill(number, AWAIT))
        events: list[ExecutorEvent] = []
        while not events:
            events = [one for one in self._executor.poll(0.5) if isinstance(one, StepResult | AgentLost)]
        [event] = events
        is_completed = isinstance(event, StepResult) and event.error is None
        print("result" if is_completed else event, flush=True)
        return is_completed

    def look(self, watch: Vitals, *times: Any) -> object:
        """Replaces ``Vitals.look``: calls it, counts the calls after the pause, and pauses when the agent sleeps."""
        reason = _look(watch, *times)
        self._num_looks += self._was_paused
        if self._num_looks >= LOOKS_BEFORE_CONTINUE:
            self._continue_agent()
        if watch._asleep_since is not None and not self._was_paused:
            self._was_paused = True
            if self._pauses_agent:
                self._signal_agent(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
        return reason

    def _continue_agent(self) -> None:
        self._signal_agent(signal.SIGCONT)
        with contextlib.suppress(OSError):  # the agent no longer waits for the pipe
            os.close(os.open(self._awaited, os.O_WRONLY | os.O_NONBLOCK))

    def _signal_agent(self, number: int) -> None:
        pid = self._executor.agents()[0]["pid"]
        assert isinstance(pid, int)
        os.kill(pid, number)


def main() -> None:
    folder = Path(sys.argv[1])
    vitals.LOOK_EVERY_S, vitals.GRACE_S, pauses.COUNTED_S = 0.01, GRACE_S, 0.05
    # A confined agent could not read the pipe.
    settings = ["serving_config.confine_agents=off", f"serving_config.step_timeout_s={STEP_TIMEOUT_S}"]
    config = small_config(folder, settings)
    assert Path(config.log_config.path).parent == folder
    with bind_agent_ports("127.0.0.1", [0]) as listeners:
        executor = AgentExecutor(config, listeners, folder, program=AgentProgram("support.stub_agent"))
        awaited = folder / AWAITED
        os.mkfifo(awaited)
        steps = Steps(executor, awaited)
        Vitals.look = lambda *arguments: steps.look(*arguments)  # type: ignore[method-assign,assignment]
        try:
            executor.start()
            events_until(executor, AgentReady)
            if steps.run(0, pauses_agent=False):
                vitals.GRACE_S = vitals.STOPPED_S = 3600.0  # only the timeout of the step can lose the agent
                steps.run(1, pauses_agent=True)
        finally:
            executor.close()


if __name__ == "__main__":
    main()
