"""Prometheus metrics: counters and histograms of the engine and the HTTP edge, and the engine's status.

Names start with ``llm_serving_``. Times are seconds. Each ``Metrics`` object has its own registry, so a process may
have several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from llm_serving.ipc.drafts import REJECTED
from llm_serving.ipc.shm import NOT_FINITE
from llm_serving.request import PARTS, FinishReason, RequestOutput, RequestTimings
from llm_serving.scheduler.output import ScheduledStep, StepResult
from llm_serving.telemetry.receipt import BlockReason
from llm_serving.telemetry.status import EngineStatus
from llm_serving.telemetry.status_metrics import DroppedLinesCollector, StatusCollector
from llm_serving.telemetry.step_histogram import StepHistogram
from llm_serving.telemetry.vllm_names import VllmCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_STEP = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)

_TEXT = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)
_HOST = (0.0, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)


class Metrics:
    """All metrics of one server. The engine thread and the event loop call the methods, which do not block.

    To limit the cost, the engine calls these methods only once for each step or request, and not for each token.
    """

    def __init__(self, *, process: bool = True, vllm_model: str | None = None) -> None:
        """If ``process`` is True, the metrics include memory, CPU time and open files of this process.

        If ``vllm_model`` is not None, the exposition also has metrics under vLLM's names, with the label ``model_name``
        set to this text.
        """
        self.registry = CollectorRegistry(auto_describe=True)
        self._engine_counters()
        self._device_counters()
        self._engine_histograms()
        self._http = self._counter(
            "llm_serving_http_responses", "HTTP responses by route and status.", "route", "status"
        )
        self._stall = Gauge(
            "llm_serving_event_loop_longest_stall_seconds",
            "Longest time since the last scrape during which the event loop was blocked and served no client. Without "
            "an active request, the loop is measured only for 0.1 s after a client has sent data. In the quiet mode, a "
            "stall may be up to 0.1 s longer than this figure.",
            registry=self.registry,
        )
        self._busy_stall = Gauge(
            "llm_serving_event_loop_longest_busy_seconds",
            "Most processor time that the server's process used while the event loop was blocked, since the last "
            "scrape. If the stall is much longer, the machine was busy with other programs.",
            registry=self.registry,
        )
        self._refused_connections = self._counter(
            "llm_serving_connections_refused", "Connections refused because of serving_config.max_connections."
        )
        self._refused_access = self._counter(
            "llm_serving_access_refused", "Requests that access control refused, by reason.", "reason"
        )
        spans = self._counter(
            "llm_serving_trace_spans", "Spans of traces that were exported, or dropped (collector away).", "result"
        )
        self._dropped_events = self._counter(
            "llm_serving_kv_events_dropped",
            "Changes of the prefix cache that were not published, because kv_events_config.max_waiting_events waited.",
        )
        self._spans = {result: spans.labels(result) for result in ("exported", "dropped")}
        self.registry.register(DroppedLinesCollector())
        self._present = StatusCollector()
        self.registry.register(self._present)
        if process:
            ProcessCollector(registry=self.registry)
        self._vllm_names: CollectorRegistry | None = None
        if vllm_model is not None:
            self._vllm_names = CollectorRegistry()
            self._vllm_names.register(VllmCollector(self.registry, vllm_model))

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(name, meaning, labels, registry=self.registry)

    def _histogram(self, name: str, meaning: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(name, meaning, labels, buckets=buckets, registry=self.registry)

    def _engine_counters(self) -> None:
        counter = self._counter
        self._finished = counter("llm_serving_requests_finished", "Requests that ended, by reason.", "reason")
        self._refused = counter("llm_serving_requests_refused", "Requests that the engine refused, by code.", "code")
        self._prompt_tokens = counter("llm_serving_prompt_tokens", "Prompt tokens of requests that ended.")
        self._generated_tokens = counter("llm_serving_generated_tokens", "Tokens generated.")
        self._draft_tokens = counter("llm_serving_draft_tokens", "Drafts (guesses of tokens) that steps verified.")
        self._accepted_tokens = counter("llm_serving_accepted_draft_tokens", "Drafts that were right.")
        self._draft_seconds = counter("llm_serving_draft_model_seconds", "Time of the draft model, in all agents.")
        self._not_finite = counter(
            "llm_serving_sequences_not_finite", "Sequences that ended because their logits were NaN or infinite."
        )
        checks = counter(
            "llm_serving_self_checks",
            "Self-checks by kind and result. row: a sequence computed again, alone. canary: a fixed prompt; it is "
            "skipped if the server cannot run it. logits: no sequence of a step had finite logits.",
            "check",
            "result",
        )
        self._self_checks = {
            (check, result): checks.labels(check, result)
            for check, results in {
                "row": ("passed", "failed"),
                "canary": ("passed", "failed", "skipped"),
                "logits": ("failed",),
            }.items()
            for result in results
        }
        preemptions = counter(
            "llm_serving_preemptions",
            "Requests that lost their cache blocks, by kind: computed again, or moved to host memory.",
            "kind",
        )
        self._preemptions = {kind: preemptions.labels(kind) for kind in ("recompute", "swap")}
        parts = counter("llm_serving_request_part_seconds", "Time of requests, by the parts of their receipts.", "part")
        self._parts = {part: parts.labels(part) for part in PARTS}
        blocked = counter(
            "llm_serving_queue_blocked_seconds",
            "Time requests waited because the next in line could not start, by reason.",
            "reason",
        )
        self._blocked = {reason: blocked.labels(reason.value) for reason in BlockReason}
        objectives = counter(
            "llm_serving_request_objectives",
            "Requests with objectives that ended, by objective and whether it was met; 'both' and 'true' is goodput.",
            "objective",
            "met",
        )
        self._objectives = {
            (objective, met): objectives.labels(objective, str(met).lower())
            for objective in ("ttft", "tbt", "both")
            for met in (True, False)
        }
        for reason in FinishReason:
            self._finished.labels(reason.value)

    def _device_counters(self) -> None:
        counter = self._counter
        self._fetched_bytes = counter(
            "llm_serving_fetched_bytes", "Bytes copied from devices to choose tokens; 0 with fused operators."
        )
        self._device_draws = counter(
            "llm_serving_device_draws",
            "Tokens of sequences with a top_k that devices have drawn, and with which a step was launched ahead.",
        )
        self._wrong_draws = counter(
            "llm_serving_wrong_device_draws", "Tokens of llm_serving_device_draws that the sampler has not chosen."
        )
        self._second_launches = counter(
            "llm_serving_second_launches", "Steps that were launched again, because a device had drawn a wrong token."
        )

    def _engine_histograms(self) -> None:
        histogram = self._histogram
        self._ttft = histogram(
            "llm_serving_time_to_first_token_seconds",
            "Time from a streamed request's first byte until its first output was written to the socket.",
            _LATENCY,
        )
        self._tpot = histogram(
            "llm_serving_time_per_output_token_seconds",
            "Mean time between a request's tokens after the first.",
            _PER_TOKEN,
        )
        self._e2e = histogram(
            "llm_serving_request_seconds",
            "Time from a request's first byte to the last byte of its response.",
            _LATENCY,
        )
        self._queue = histogram(
            "llm_serving_queue_seconds", "Time from a request's arrival in the queue to its first step.", _LATENCY
        )
        self._prompt_length = histogram("llm_serving_request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._num_output_tokens = 0
        self._output_length = histogram("llm_serving_request_output_tokens", "Generated tokens of a request.", _TOKENS)
        self._step_histograms()

    def _step_histograms(self) -> None:
        self._host_overhead = self._of_steps(
            "llm_serving_engine_host_overhead_seconds",
            "Host time of a step during which the device was idle: from the arrival of a step's result until the next "
            "step was sent. 0 if another step was in flight. Not observed if there was no next step.",
            _HOST,
        ).series[""]
        self._sampling = self._of_steps(
            "llm_serving_step_sampling_seconds",
            "Time in which the agent chose the tokens of a step. With several agents, the longest one.",
            _TEXT,
        ).series[""]
        self._detokenise = self._of_steps(
            "llm_serving_step_detokenise_seconds",
            "Time in which the engine thread turned the tokens of a step into text. The device may work meanwhile.",
            _TEXT,
        ).series[""]
        kinds = ("prefill", "decode", "mixed", "move")
        text = "Time from sending a step to its result."
        step = self._of_steps("llm_serving_step_seconds", text, _STEP, "kind", kinds).series
        size = self._of_steps("llm_serving_step_sequences", "Sequences in a step.", _BATCH, "kind", kinds).series
        tokens = self._counter("llm_serving_step_tokens", "Tokens computed, by kind of step.", "kind")
        self._step = {kind: (step[kind], size[kind], tokens.labels(kind)) for kind in kinds}

    def _of_steps(
        self, name: str, meaning: str, bounds: Sequence[float], label: str = "", kinds: Sequence[str] = ("",)
    ) -> StepHistogram:
        """Returns a registered histogram, in which the threads of all engines observe values."""
        histogram = StepHistogram(name, meaning, bounds, label, kinds)
        self.registry.register(histogram)
        return histogram

    def bind(self, status: Callable[[], EngineStatus]) -> None:
        """Sets the function that returns the engine's status. Gauges are read from the status at each scrape."""
        self._present.status = status

    # The engine calls the following methods.

    def step(self, step: ScheduledStep, result: StepResult, seconds: float, detokenise_seconds: float) -> None:
        """Counts a step whose result arrived ``seconds`` after the step was sent.

        ``detokenise_seconds`` is the time that it took to convert the step's tokens to text.
        """
        duration, size, tokens = self._step[step.kind.value]
        duration.observe(seconds)
        size.observe(step.num_seqs)
        tokens.inc(step.num_tokens)
        ids = result.sampled_ids
        rejected = ids.count(REJECTED) if step.num_drafts else 0
        sampled = len(ids) - ids.count(-1) - ids.count(NOT_FINITE) - rejected
        if step.num_drafts and ids:
            self._draft_tokens.inc(step.num_drafts)
            self._accepted_tokens.inc(step.num_drafts - rejected)
        if sampled:
            self._generated_tokens.inc(sampled)
            self._sampling.observe((result.sample_us - result.draft_us) / 1e6)
            self._detokenise.observe(detokenise_seconds)
        if result.draft_us:
            self._draft_seconds.inc(result.draft_us / 1e6)
        if result.checked_row:
            self.self_check("row", "passed")
        if result.fetched_bytes:
            self._fetched_bytes.inc(result.fetched_bytes)
        if result.device_draws:
            self._device_draws.inc(result.device_draws)
            self._wrong_draws.inc(result.wrong_draws)
        if result.second_launches:
            self._second_launches.inc(result.second_launches)

    def sequences_not_finite(self, count: int) -> None:
        """Counts sequences that ended because their logits were not finite."""
        self._not_finite.inc(count)

    def self_check(self, check: str, result: str) -> None:
        """Counts a self-check (``row``, ``canary`` or ``logits``) that ended: ``passed``, ``failed`` or ``skipped``."""
        self._self_checks[check, result].inc()

    def first_token(self, seconds: float) -> None:
        """Observes the time from a request's arrival until its first output was written to the socket."""
        self._ttft.observe(seconds)

    def request_end(self, output: RequestOutput, reason: FinishReason, timings: RequestTimings) -> None:
        """Counts a request that ended and was delivered. ``output`` is its last piece, with the token counts."""
        self._finished.labels(reason.value).inc()
        self._prompt_tokens.inc(output.num_prompt_tokens)
        self._prompt_length.observe(output.num_prompt_tokens)
        self._output_length.observe(output.num_output_tokens)
        self._num_output_tokens += output.num_output_tokens
        self._queue.observe(timings.queue)
        self._e2e.observe(timings.e2e)
        if timings.tpot is not None:
            self._tpot.observe(timings.tpot)
        for part, seconds in timings.parts.items():
            self._parts[part].inc(seconds)
        for one in timings.blocked:
            self._blocked[one.reason].inc(one.seconds)

    def output_tokens(self) -> int:
        """Returns the number of generated tokens of all requests that have ended."""
        return self._num_output_tokens

    def objectives(self, met: Mapping[str, bool]) -> None:
        """Counts the objectives (``ttft``, ``tbt``, ``both``) of a request that ended, and whether each was met."""
        for objective, is_met in met.items():
            self._objectives[objective, is_met].inc()

    def host_overhead(self, seconds: float) -> None:
        """Observes the seconds that the device was idle after a step because the host had not sent the next step."""
        self._host_overhead.observe(seconds)

    def request_refused(self, code: str) -> None:
        """Counts a refused request. ``code`` is the code of its ``RequestError``."""
        self._refused.labels(code).inc()

    def preemptions(self, count: int, swaps: int) -> None:
        """Counts ``count`` further preempted requests. ``swaps`` of them were moved to host memory."""
        self._preemptions["recompute"].inc(count - swaps)
        self._preemptions["swap"].inc(swaps)

    # The HTTP edge calls the following methods.

    def http_response(self, route: str, status: int) -> None:
        """Counts a response. ``route`` is one of the server's paths, or ``unmatched``."""
        self._http.labels(route, str(status)).inc()

    def connection_refused(self) -> None:
        """Counts a connection that was refused because the maximum number of connections was reached."""
        self._refused_connections.inc()

    def access_refused(self, reason: str) -> None:
        """Counts a request that access control refused. ``reason`` is for example ``wrong_key`` or a quota."""
        self._refused_access.labels(reason).inc()

    def event_loop_stall(self, seconds: float, busy_seconds: float) -> None:
        """Sets the longest stall of the event loop since the last scrape.

        ``seconds`` is the longest time for which the loop was blocked. ``busy_seconds`` is the largest processor time
        of this process during one stall.
        """
        self._stall.set(seconds)
        self._busy_stall.set(busy_seconds)

    def kv_events_dropped(self, count: int) -> None:
        """Counts changes of the prefix cache that were not published."""
        self._dropped_events.inc(count)

    def trace_spans(self, result: str, count: int) -> None:
        """Counts spans that were ``exported`` or ``dropped``. Any thread may call this method."""
        self._spans[result].inc(count)

    def exposition(self) -> bytes:
        """Returns all metrics in the text format of Prometheus."""
        own = generate_latest(self.registry)
        return own if self._vllm_names is None else own + generate_latest(self._vllm_names)
