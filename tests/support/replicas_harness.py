"""An engine core over several replicas that a test calls step by step. All objects around the engine are fakes."""

from __future__ import annotations

import random
from collections.abc import Sequence

from llm_serving.engine.commands import Abort, Add
from llm_serving.engine.core import EngineCore
from llm_serving.engine.outputs import EngineOutput, RequestRefused, merge_outputs
from llm_serving.engine.request_log import RequestLog
from llm_serving.executor.base import ExecutorEvent
from llm_serving.handover.pool import HandOverPool
from llm_serving.handover.threshold import PromptThreshold
from llm_serving.request import Request, RequestOutput
from llm_serving.routing.placement import Role, Routing
from llm_serving.routing.pools import PromptPools
from llm_serving.routing.prefill_split import PrefillSplit
from llm_serving.routing.router import Router
from llm_serving.routing.sources import replica_sources
from llm_serving.scheduler.scheduler import Scheduler
from support.fake_device import FakeDevice
from support.fakes import FakeDetokenizer, FakeExecutor, RecordingLog, RecordingMetrics, make_limits, make_request
from support.handed_memory import HandedMemory


class ReplicatedEngine:
    """Runs an engine with several replicas. Each loop iteration polls one executor, which is drawn at random."""

    def __init__(
        self,
        num_replicas: int,
        *,
        seed: int = 0,
        ready: bool = True,
        routing: Routing = Routing.PREFIX,
        roles: Sequence[Role] | None = None,
        pools: PromptPools | None = None,
        **limits: object,
    ) -> None:
        self.limits = make_limits(**limits)
        split = None
        if roles is not None:
            pool, size = HandOverPool(8, self.limits.cache_namespace), self.limits.block_size
            split = PrefillSplit(roles, pool, PromptThreshold(size, 10), size)
            memory = HandedMemory(pool.num_blocks, size)
        self.schedulers = [Scheduler(self.limits) for _ in range(num_replicas)]
        self.router = Router(self.schedulers, routing, split, pools)
        self.executors = [FakeExecutor(self.limits, ready=ready) for _ in range(num_replicas)]
        if roles is not None:
            for executor in self.executors:
                executor.device = FakeDevice(self.limits, handed=memory)
        self.log, self.metrics = RecordingLog(), RecordingMetrics()
        self.requests = RequestLog(self.log, self.metrics)
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.refused: list[EngineOutput] = []
        self.asked: dict[str, Request] = {}
        self.now = 100.0
        self.rng = random.Random(seed)
        self.core = EngineCore(
            self.router,
            list(zip(replica_sources(self.router), self.executors, strict=True)),
            FakeDetokenizer,
            self.log,
            self.metrics,
            self._deliver,
            state_interval_s=1000.0,
            clock=lambda: self.now,
            poll=self._poll,
        )

    def _poll(self, timeout_s: float | None) -> list[tuple[int, ExecutorEvent]]:
        able = [index for index, executor in enumerate(self.executors) if executor._has_work()]
        if not able:
            return []
        some = self.rng.sample(able, self.rng.randint(1, len(able)))
        return [(index, event) for index in some for event in self.executors[index].poll(0.0)]

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            if isinstance(output, RequestOutput):
                self.outputs.setdefault(output.request_id, []).append(output)
                if output.timings is not None:
                    self.requests.request_end(output, output.timings, self.asked[output.request_id])
            elif isinstance(output, RequestRefused):
                self.refused.append(output)

    def request(self, name: str, *args: object, group: str = "", **sampling: object) -> Request:
        request = make_request(name, *args, arrival=self.now, **sampling)
        request.group = group
        self.asked[name] = request
        self.core.submit(Add(request))
        return request

    def abort(self, name: str) -> None:
        self.core.submit(Abort(name))

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.now += 0.001
            self.core.step()

    def finish(self) -> None:
        """Runs until the engine is idle. Checks that no block is lost."""
        for _ in range(20_000):
            self.step()
            if self.router.is_idle:
                break
        assert self.router.is_idle
        self.step(4)  # completes the void steps that are still in flight
        self.router.check_integrity()
        assert self.log.named("error") == []
        assert self.router.figures.free_blocks == self.router.figures.total_blocks

    def whole(self, name: str) -> RequestOutput:
        return merge_outputs(self.outputs[name])
