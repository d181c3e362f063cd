"""Simulates the server on a virtual clock: drives the real scheduler as the engine thread does.

Three things happen in parallel, as in a real server. HTTP accepts requests and delivers pieces of output. The engine
thread is a loop that first processes events and then sends steps. Each agent runs one step at a time. With several
replicas, the real router distributes the requests, and each replica has one agent. The order of events follows
``engine/core.py`` and ``agent/worker.py``. The durations come from ``HostModel`` and the device's cost model. The code
never reads a real clock, so a run depends only on its inputs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from llm_serving.errors import ContextLengthError, QueueFullError
from llm_serving.ipc.shm import NUM_SLOTS
from llm_serving.request import FinishReason, Request
from llm_serving.routing.placement import Routing
from llm_serving.routing.pools import PromptPools
from llm_serving.routing.prefill_split import PrefillSplit
from llm_serving.routing.router import Router
from llm_serving.routing.sources import RequestFront, StepSource, replica_sources
from llm_serving.sampling_params import SamplingParams
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepKind
from llm_serving.scheduler.scheduler import Scheduler
from llm_serving.telemetry.receipt import Receipt
from performance.load.stream import RequestRecord
from performance.simulation.agent import VirtualAgent
from performance.simulation.device import CostModel
from performance.simulation.host import HostModel
from performance.simulation.spread import Spread
from performance.simulation.workload import SimulatedRequest, Source

__all__ = ["Outcome", "VirtualServer"]

TOKEN = 7
"""The token id that the simulated device samples. This token never ends a request."""
END_TOKEN = 2
"""Token id that ends an output."""
MAX_ITERATIONS = 1000
"""Maximum number of loop iterations at the same virtual time. After more iterations, ``run`` reports that the
simulation does not advance.
"""
WASTE_SAMPLES = 8
"""The empty fraction of the KV blocks is measured once per this number of decode steps."""


@dataclass(slots=True)
class Outcome:
    """The result of a simulated run. Times are virtual seconds since the start."""

    records: list[RequestRecord]
    """Records of the requests in order of arrival."""
    preemptions: int = 0
    swaps: int = 0
    """Preemptions that swapped blocks to the host."""
    prefix_hit_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    prefix_query_tokens: int = 0
    """Prompt tokens that were looked up in the prefix cache."""
    kv_waste: float = 0.0
    """Mean fraction of the token positions in running sequences' blocks that hold no token."""
    peak_running: int = 0
    peak_waiting: int = 0
    device_busy_s: float = 0.0
    """Seconds in which devices ran steps, summed over all devices."""
    num_replicas: int = 1
    placed: list[dict[str, int]] = field(default_factory=list)
    """For each replica: the number of requests that the router placed there, by reason. Empty for a single replica."""
    steps: dict[str, int] = field(default_factory=dict)
    """Number of steps by kind of step."""
    step_s: dict[str, float] = field(default_factory=dict)
    """Seconds on the device by kind of step."""
    hand_overs: dict[str, float] = field(default_factory=dict)
    """Figures of hand-overs between replicas with roles. Empty without roles."""

    @property
    def prefix_hit_share(self) -> float:
        """Fraction of the prompt tokens that the prefix cache found, 0 to 1."""
        return self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else 0.0


@dataclass(slots=True)
class _Replica:
    """A replica of the model: ``source`` schedules its steps, and ``agent`` runs them."""

    source: StepSource
    agent: VirtualAgent
    num_in_flight: int = 0


class VirtualServer:
    """Simulates a server that serves one workload. An instance is used once."""

    def __init__(
        self,
        limits: SchedulerLimits,
        device: CostModel,
        source: Source,
        host: HostModel | None = None,
        spread: Spread | None = None,
        seed: int = 0,
        num_replicas: int = 1,
        routing: Routing = Routing.PREFIX,
        split: PrefillSplit | None = None,
        pools: PromptPools | None = None,
    ) -> None:
        schedulers = self._schedulers = [Scheduler(limits) for _ in range(num_replicas)]
        self._router = Router(schedulers, routing, split, pools) if num_replicas > 1 else None
        self.scheduler: RequestFront = self._router or schedulers[0]
        self._limits = limits
        self._source = source
        self._host = host or HostModel()
        sources: Sequence[StepSource] = schedulers if self._router is None else replica_sources(self._router)
        self._replicas = [
            _Replica(
                each,
                VirtualAgent(
                    device,
                    limits.policy.value,
                    self._sample,
                    spread,
                    seed + index,
                    result_delay_s=self._host.from_agent_s,
                ),
            )
            for index, each in enumerate(sources)
        ]
        if self._router is not None:
            for index in range(num_replicas):
                self._router.agent_ready(index)
        self._records: dict[str, RequestRecord] = {}
        self._ends: dict[str, int] = {}
        self._arriving: deque[tuple[float, int]] = deque()
        self._free_at = 0.0
        self._has_interrupted = False
        """True if the arrival of the next request has already delayed the running steps."""
        self._num_decodes = 0
        self._waste_sum = 0.0
        self._waste_count = 0
        self._outcome = Outcome([])

    def put_before(self, recorder: Callable[[Scheduler], Any]) -> Any:
        """Inserts a flight recorder between this server and its scheduler, and returns the recorder. The server must
        have only one replica.
        """
        [replica] = self._replicas
        if not isinstance(self.scheduler, Scheduler):
            raise TypeError("another object is already in front of the scheduler")
        recording = recorder(self.scheduler)
        self.scheduler = replica.source = recording
        return recording

    def run(self) -> Outcome:
        """Runs until every request has ended. Raises AssertionError if the scheduler stops before that."""
        iterations, last = 0, -1.0
        while (wake := self._next_event()) is not None:
            now = max(wake, self._free_at)
            iterations, last = iterations + 1 if now == last else 0, now
            if iterations > MAX_ITERATIONS:
                raise AssertionError(f"virtual time stays at {now}: {iterations} loop iterations had no effect")
            self._step(now)
        if not self.scheduler.is_idle:
            figures = self.scheduler.figures
            raise AssertionError(f"the scheduler is stuck, {figures.running} running, {figures.waiting} waiting")
        self.scheduler.check_integrity()
        return self._finish()

    def _finish(self) -> Outcome:
        outcome, figures = self._outcome, self.scheduler.figures
        outcome.records = list(self._records.values())
        outcome.preemptions, outcome.swaps = figures.preemptions, figures.swaps
        outcome.prefix_hit_tokens = figures.prefix_hit_tokens
        outcome.prefix_query_tokens = figures.prefix_query_tokens
        outcome.kv_waste = self._waste_sum / self._waste_count if self._waste_count else 0.0
        outcome.num_replicas = len(self._replicas)
        for replica in self._replicas:
            agent = replica.agent
            outcome.device_busy_s += agent.busy_s
            for kind, number in agent.num_steps.items():
                outcome.steps[kind] = outcome.steps.get(kind, 0) + number
                outcome.step_s[kind] = outcome.step_s.get(kind, 0.0) + agent.kind_s[kind]
        if self._router is not None:
            outcome.placed = [
                {why.value: number for why, number in replica.num_placed.items() if number}
                for replica in self._router.replicas
            ]
            if self._router.split is not None:
                outcome.hand_overs = self._router.split.as_json()
        return outcome

    def _next_event(self) -> float | None:
        """Returns the time at which the engine thread wakes next, or None if no event is left.

        The thread wakes for a new request, for a result, or when a batch has waited long enough.
        """
        due = self._source.next_due()
        if due is not None and not self._has_interrupted and min(self._other_events(), default=due) >= due:
            self._interrupt(due)  # it is now certain which steps run at this time
        times = [] if due is None else [due + self._host.accept_s]
        return min([*times, *self._other_events()], default=None)

    def _other_events(self) -> list[float]:
        """Returns the times of the next results and of the schedulers' next wake-ups, of all replicas."""
        times: list[float] = []
        for replica in self._replicas:
            moments = (replica.agent.next_result(), replica.source.next_wakeup(self._free_at))
            times += [moment for moment in moments if moment is not None]
        return times

    def _interrupt(self, moment: float) -> None:
        """Delays the running steps, because the next request uses the device's cores."""
        self._has_interrupted = True
        if self._host.interrupt_s:
            for replica in self._replicas:
                replica.agent.interrupt(moment, self._host.interrupt_s)

    def _step(self, now: float) -> None:
        """Runs one iteration of the engine's loop, starting at ``now``."""
        clock = self._take_requests(now)
        clock = self._take_results(now, clock)
        self._free_at = self._send_steps(now, clock)

    def _take_requests(self, now: float) -> float:
        host, clock = self._host, now
        while (due := self._source.next_due()) is not None and due + host.accept_s <= now:
            if not self._has_interrupted:
                self._interrupt(now)
            self._has_interrupted = False
            index = self._source.pop()
            clock += host.request_s
            self._add(index, self._source.requests[index], due, clock)
        return clock

    def _add(self, index: int, wanted: SimulatedRequest, due: float, clock: float) -> None:
        name = f"sim-{index}"
        record = self._records[name] = RequestRecord(index, due, due, http_status=200, request_id=name)
        record.prompt_tokens, record.tokens_known = len(wanted.prompt_token_ids), True
        if wanted.output_tokens is not None and wanted.output_tokens < wanted.max_tokens:
            self._ends[name] = wanted.output_tokens
        sampling = SamplingParams(max_tokens=wanted.max_tokens, temperature=0.0)
        request = Request(
            name,
            wanted.prompt_token_ids,
            sampling,
            due,
            frozenset((END_TOKEN,)),
            priority=wanted.priority,
            tenant=wanted.tenant,
            ttft_objective=wanted.ttft_objective,
            tbt_objective=wanted.tbt_objective,
            receipt=Receipt(due + self._host.accept_s),
        )
        try:
            self.scheduler.add_request(request)
        except (QueueFullError, ContextLengthError) as error:
            record.http_status = 429 if isinstance(error, QueueFullError) else 400
            self._fail(record, f"http {record.http_status}", str(error), clock + self._host.deliver_s)

    def _take_results(self, now: float, clock: float) -> float:
        host = self._host
        for replica in self._replicas:
            for _, result in replica.agent.run_until(now):
                updates = replica.source.update(result, now)
                clock += host.result_s + host.result_seq_s * len(result.sampled_ids)
                replica.num_in_flight -= 1
                self._deliver(updates, clock)
        return clock

    def _send_steps(self, now: float, clock: float) -> float:
        host, scheduler, outcome = self._host, self.scheduler, self._outcome
        for replica in self._replicas:
            clock = self._send_to(replica, now, clock)
        while self._router is not None and (placed := self._router.take_placed(now)):
            for index in placed:
                clock = self._send_to(self._replicas[index], now, clock)
        for update in scheduler.take_ended():
            self._end(self._records[update.request.request_id], update.request, update, clock + host.deliver_s)
        counts = [one.counts() for one in self._schedulers]
        num_unplaced = 0 if self._router is None else self._router.num_unplaced
        outcome.peak_running = max(outcome.peak_running, sum(count[0] for count in counts))
        outcome.peak_waiting = max(outcome.peak_waiting, num_unplaced + sum(count[1] for count in counts))
        return clock

    def _send_to(self, replica: _Replica, now: float, clock: float) -> float:
        host = self._host
        while replica.num_in_flight < NUM_SLOTS and (step := replica.source.schedule(now)) is not None:
            clock += host.send_s + host.send_seq_s * len(step.rows)
            replica.num_in_flight += 1
            replica.agent.submit(step, clock + host.to_agent_s)
            if step.kind is StepKind.DECODE:
                self._measure_waste(step)
        return clock

    def _deliver(self, updates: list[RequestUpdate], clock: float) -> None:
        """Records when the clients get the pieces of output of a step. Pieces are delivered one after the other."""
        records, arrival, piece_s = self._records, clock + self._host.deliver_s, self._host.deliver_piece_s
        for update in updates:
            request = update.request
            record = records[request.request_id]
            record.piece_times.append(arrival)
            if request.is_finished:
                self._end(record, request, update, arrival)
            arrival += piece_s

    def _end(self, record: RequestRecord, request: Request, update: RequestUpdate, now: float) -> None:
        record.output_tokens = len(request.output_token_ids)
        record.finish_reason = request.finish_reason.value if request.finish_reason is not None else None
        if request.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            self._fail(record, f"ended by {record.finish_reason}", update.error or "", now)
            return
        record.end = now
        self._source.finished(now)

    def _fail(self, record: RequestRecord, failure: str, detail: str, now: float) -> None:
        record.failure, record.detail, record.end = failure, detail, now
        self._source.finished(now)

    def _measure_waste(self, step: ScheduledStep) -> None:
        """Measures which fraction of the token positions in a decode step's blocks is empty, and adds it to the mean.

        Only every ``WASTE_SAMPLES``-th step is measured.
        """
        self._num_decodes += 1
        if self._num_decodes % WASTE_SAMPLES:
            return
        held = self._limits.block_size * sum(len(table) for table in step.block_tables)
        self._waste_sum += 1.0 - (sum(step.starts) + len(step.token_ids)) / held
        self._waste_count += 1

    def _sample(self, step: ScheduledStep) -> list[int]:
        """Returns a token for each sequence of a step, or -1 if the sequence does not sample.

        A sequence gets the end token at the output length that the workload prescribes.
        """
        if not self._ends:
            return [TOKEN if samples else -1 for samples in step.do_sample]
        ends = self._ends
        return [
            (END_TOKEN if position + 1 == ends.get(request.request_id) else TOKEN) if samples else -1
            for request, position, samples in zip(step.requests, step.sample_positions, step.do_sample, strict=True)
        ]
