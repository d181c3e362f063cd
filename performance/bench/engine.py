"""Runs the engine without HTTP: scheduler, executor and a real agent process, driven by the caller's thread.

Clients, JSON and text are left out, so that a benchmark measures only the engine and the agent.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from llm_serving.cluster.remote_starter import RemoteStarter
from llm_serving.config import Config
from llm_serving.engine.commands import Add
from llm_serving.engine.core import EngineCore
from llm_serving.engine.outputs import EngineOutput
from llm_serving.engine.scheduler_limits import scheduler_limits
from llm_serving.errors import AgentStartError, LLMServingError
from llm_serving.executor.agent_executor import AgentExecutor
from llm_serving.executor.agent_process import bind_agent_ports
from llm_serving.request import Request, RequestOutput
from llm_serving.sampling_params import SamplingParams
from llm_serving.scheduler.output import ScheduledStep, StepResult
from llm_serving.scheduler.scheduler import Scheduler
from llm_serving.telemetry.log import EventLog
from llm_serving.telemetry.metrics import Metrics
from llm_serving.telemetry.status import EngineState

_REST_INTERVAL_S = 0.25
"""Seconds between two readings of the child processes' processor time."""
_REST_LIMIT_S = 60.0
"""Maximum seconds to wait until the child processes use almost no processor time."""


class BenchmarkError(LLMServingError):
    """Raised if the engine ended a request that should have completed."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Size of a step, and the seconds that the agent reported for it."""

    kind: str
    num_seqs: int
    num_tokens: int
    graph_s: float
    sample_s: float


@dataclass(slots=True)
class Times:
    """Times of requests that were submitted together, in seconds since their submission."""

    first_tokens: list[float] = field(default_factory=list)
    """Times at which a request received its first token, one for each request, ascending."""
    tokens: list[tuple[float, int]] = field(default_factory=list)
    """Pairs of a time and the number of tokens that arrived at that time. The tokens of all requests count."""
    steps: list[StepTime] = field(default_factory=list)

    @property
    def end(self) -> float:
        return self.tokens[-1][0]

    @property
    def prefilled(self) -> float:
        """Time at which the last request received its first token."""
        return max(self.first_tokens)

    @property
    def decoded_tokens(self) -> int:
        """Number of tokens that arrived after every request had received its first token."""
        return sum(count for when, count in self.tokens if when > self.prefilled)


class OfflineEngine:
    """Runs batches of requests without a server. The caller's thread does the work of the engine thread."""

    def __init__(self, config: Config, executor: AgentExecutor, log: EventLog) -> None:
        self._recorder = _Recorder()
        self._outputs: list[EngineOutput] = []
        self._number = 0
        scheduler = Scheduler(scheduler_limits(config))
        self._core = EngineCore(
            scheduler,
            [(scheduler, executor)],
            lambda request: _NoText(),
            log,
            self._recorder,
            self._outputs.extend,
        )

    def wait_ready(self) -> None:
        """Waits for the agent. Raises AgentStartError if it cannot start."""
        while self._core.state is not EngineState.READY:
            if self._core.state is EngineState.STOPPED:
                raise AgentStartError(self._core.stop_reason)
            self._core.step()

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Times:
        """Generates ``new_tokens`` greedy tokens for each prompt.

        Raises BenchmarkError if a request is rejected or ends with another number of tokens.
        """
        sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        self._recorder.steps = []
        self._outputs.clear()
        start = time.monotonic()
        for prompt in prompts:
            self._number += 1
            self._core.submit(Add(Request(f"bench-{self._number}", prompt, sampling, start)))
        times, running = Times(), len(prompts)
        while running:
            self._core.step()
            if self._outputs:
                now = time.monotonic() - start
                running -= _record(self._outputs, now, times, new_tokens)
                self._outputs.clear()
        times.steps = self._recorder.steps
        return times


def _record(outputs: Sequence[EngineOutput], now: float, times: Times, new_tokens: int) -> int:
    """Records the outputs that arrived at ``now`` and returns the number of completed requests."""
    ended = count = 0
    for output in outputs:
        if not isinstance(output, RequestOutput):
            raise BenchmarkError(f"the engine rejected a request: {output}")
        count += len(output.token_ids)
        if output.token_ids and output.num_output_tokens == len(output.token_ids):
            times.first_tokens.append(now)
        if output.finished:
            ended += 1
            if output.num_output_tokens != new_tokens:
                raise BenchmarkError(
                    f"{output.request_id} ended with {output.num_output_tokens} of {new_tokens} tokens "
                    f"({output.finish_reason}): {output.error}"
                )
    times.tokens.append((now, count))
    return ended


@contextmanager
def offline_engine(config: Config, starter: RemoteStarter | None = None) -> Iterator[OfflineEngine]:
    """Starts an engine and an agent, yields the engine, and stops both. Raises AgentStartError.

    ``starter`` starts the agent on a node. None: the agent is on this machine.
    """
    with ExitStack() as owned:
        folder = Path(owned.enter_context(tempfile.TemporaryDirectory(prefix="bench_engine_")))
        settings = config.serving_config
        listeners = owned.enter_context(bind_agent_ports(settings.agent_ip, settings.agent_ports))
        log = owned.enter_context(EventLog(str(folder / "engine.log"), "error"))
        # With a limit of 0, the benchmark ends if the agent fails. A new agent's start would distort the times.
        once = replace(config, serving_config=replace(settings, agent_restart_limit=0))
        executor = AgentExecutor(once, listeners, folder, start_group=starter)
        owned.callback(executor.close)
        if starter is not None:
            starter.pool.on_change(executor.wake)
            owned.callback(starter.pool.no_change, executor.wake)
        engine = OfflineEngine(once, executor, log)
        executor.start()
        engine.wait_ready()
        _wait_until_children_rest()
        yield engine


def _wait_until_children_rest() -> None:
    """Waits until the child processes use almost no processor time, at most ``_REST_LIMIT_S``.

    A ready agent still allocates the pages of its KV cache, while it has no step to run. This work would disturb the
    measured steps of another agent.
    """
    deadline, used = time.monotonic() + _REST_LIMIT_S, _children_cpu_s()
    while time.monotonic() < deadline:
        time.sleep(_REST_INTERVAL_S)
        before, used = used, _children_cpu_s()
        if used - before < 0.1 * _REST_INTERVAL_S:
            return


def _children_cpu_s() -> float:
    seconds = 0.0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            seconds += times.user + times.system
    return seconds


class _Recorder(Metrics):
    """Stores the times of every step. Also updates the metrics, so that the engine does the same work as in a server.
    """

    def __init__(self) -> None:
        super().__init__(process=False)
        self.steps: list[StepTime] = []

    def step(self, step: ScheduledStep, result: StepResult, seconds: float, detokenise_seconds: float) -> None:
        super().step(step, result, seconds, detokenise_seconds)
        graph_s, sample_s = result.graph_us * 1e-6, result.sample_us * 1e-6
        self.steps.append(StepTime(step.kind.value, step.num_seqs, step.num_tokens, graph_s, sample_s))


class _NoText:
    """Replaces the detokenizer and returns no text. Other engines are also measured without text."""

    def append(self, token_ids: Sequence[int], /) -> tuple[str, str | None]:
        return "", None

    def flush(self) -> str:
        return ""
