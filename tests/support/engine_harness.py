"""An engine core that a test calls step by step. Executor, detokenizer, log and metrics are fakes."""

from __future__ import annotations

from llm_serving.engine.commands import Add
from llm_serving.engine.core import EngineCore
from llm_serving.engine.outputs import EngineOutput, merge_outputs
from llm_serving.engine.request_log import RequestLog
from llm_serving.request import Request, RequestOutput
from llm_serving.scheduler.scheduler import Scheduler
from support.fakes import (
    FakeDetokenizer,
    FakeExecutor,
    RecordingLog,
    RecordingMetrics,
    make_limits,
    make_request,
)


class Engine:
    """An EngineCore with a fake executor, log and metrics. Its clock advances by a millisecond in each step."""

    def __init__(self, *, ready: bool = True, state_interval_s: float = 1000.0, **limits: object) -> None:
        self.limits = make_limits(**limits)
        self.scheduler = Scheduler(self.limits)
        self.executor = FakeExecutor(self.limits, ready=ready)
        self.log = RecordingLog()
        self.metrics = RecordingMetrics()
        self.requests = RequestLog(self.log, self.metrics)
        self.deliveries: list[list[EngineOutput]] = []
        self.asked: dict[str, Request] = {}
        self.now = 100.0
        self.core = EngineCore(
            self.scheduler,
            [(self.scheduler, self.executor)],
            FakeDetokenizer,
            self.log,
            self.metrics,
            self._deliver,
            state_interval_s=state_interval_s,
            clock=lambda: self.now,
        )

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        """Delivers outputs as the event loop does, to a client that receives each output immediately."""
        self.deliveries.append(outputs)
        for output in outputs:
            if isinstance(output, RequestOutput) and output.timings is not None:
                self.requests.request_end(output, output.timings, self.asked[output.request_id])

    def request(self, name: str, *args: object, **sampling: object) -> Request:
        request = make_request(name, *args, arrival=self.now, **sampling)
        self.asked[name] = request
        self.core.submit(Add(request))
        return request

    def step(self) -> None:
        self.now += 0.001
        self.core.step()

    def finish(self) -> None:
        """Runs until the engine is idle. Checks that no error was logged and that no block is lost."""
        for _ in range(10_000):
            self.step()
            if self.scheduler.is_idle:
                break
        assert self.scheduler.is_idle
        assert self.log.named("error") == []
        assert self.scheduler.figures.free_blocks == self.scheduler.figures.total_blocks

    def outputs(self, name: str) -> list[RequestOutput]:
        return [
            output
            for delivery in self.deliveries
            for output in delivery
            if isinstance(output, RequestOutput) and output.request_id == name
        ]

    def whole(self, name: str) -> RequestOutput:
        return merge_outputs(self.outputs(name))


def text_of(tokens: list[int]) -> str:
    return "".join(FakeDetokenizer.letter(token) for token in tokens)
