"""The spans of one HTTP request: one for the request, one for each sequence, and the phases of each sequence.

This module does not import OpenTelemetry. It collects times while a request runs, and creates ``SpanRecord`` objects at
the end. Requests that are not traced have no ``HttpTrace`` and cost nothing.

    POST /v1/chat/completions            the HTTP request
        chat MODEL                       one sequence, with token counts
            queue, prefill, decode       phases: the scheduler's queue, and the computation
                agent step, agent steps  one step of the agent, or several consecutive steps, see ``tracing/steps.py``

Attributes follow the semantic conventions of OpenTelemetry for HTTP and GenAI. This project defines the attributes that
begin with ``llm_serving.``. Attributes contain no text of prompts or outputs.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from llm_serving.request import FinishReason, Request, RequestOutput, RequestTimings
from llm_serving.tracing.steps import StepGroup, StepGroups

TRACE = "llm_serving.trace"
"""Key of the ASGI scope whose value is the ``HttpTrace`` of the request, or None."""
PROVIDER = "llm-serving"
"""Value of ``gen_ai.provider.name``."""

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_OPERATIONS = {"/v1/chat/completions": "chat", "/chat": "chat"}
_RANDOM = random.SystemRandom()

Value = str | int | float | tuple[str, ...]
Attributes = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """A span that has ended. Times are Unix time in nanoseconds."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int | None
    start_ns: int
    end_ns: int
    attributes: Attributes
    is_server: bool = False
    """True for the span of an HTTP request, whose parent is the client's span."""
    error: str = ""
    """The reason why the request failed. Empty if the request did not fail."""


Sink = Callable[[Sequence[SpanRecord]], None]


@dataclass(frozen=True, slots=True)
class TraceParent:
    """The client's span, from the header ``traceparent``."""

    trace_id: int
    span_id: int
    is_sampled: bool


def parse_traceparent(value: str) -> TraceParent | None:
    """Returns the client's span, or None if ``value`` is not a valid ``traceparent`` (W3C Trace Context)."""
    match = _TRACEPARENT.fullmatch(value)
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    if not trace_id or not span_id:
        return None
    return TraceParent(trace_id, span_id, bool(int(match[4], 16) & 1))


def new_id(bits: int) -> int:
    """Returns a random id that is not 0."""
    return _RANDOM.getrandbits(bits) or 1


class HttpTrace:
    """The trace of one HTTP request."""

    __slots__ = ("_began", "_began_ns", "_method", "_parent", "_path", "_sink", "model", "route", "span_id", "status",
                 "trace_id")  # fmt: skip

    def __init__(
        self, sink: Sink, model: str, trace_id: int, parent: TraceParent | None, method: str, path: str, began: float,
        began_ns: int,
    ) -> None:  # fmt: skip
        """``began`` is the arrival of the request on the engine's clock, in seconds. ``began_ns`` is its Unix time."""
        self.model = model
        self.trace_id = trace_id
        self.span_id = new_id(64)
        self.route = ""
        self.status = 0
        """HTTP status of the response, or 0 before the response."""
        self._sink = sink
        self._parent = parent
        self._method, self._path = method, path
        self._began, self._began_ns = began, began_ns

    def sequence(self) -> SequenceTrace:
        """Creates the trace of a further sequence of the request."""
        return SequenceTrace(self)

    @property
    def operation(self) -> str:
        """Value of ``gen_ai.operation.name``."""
        return _OPERATIONS.get(self._path, "text_completion")

    def at(self, seconds: float) -> int:
        """Converts a time of the engine's clock (seconds) to Unix time in nanoseconds."""
        return self._began_ns + max(0, round((seconds - self._began) * 1e9))

    def emit(self, spans: Sequence[SpanRecord]) -> None:
        """Passes spans to the exporter. This method does not block."""
        self._sink(spans)

    def end(self, now: float) -> None:
        """Emits the span of the HTTP request."""
        attributes: dict[str, Value] = {
            "http.request.method": self._method,
            "http.route": self.route,
            "http.response.status_code": self.status,
        }
        error = str(self.status) if self.status >= 500 else ""
        if error:
            attributes["error.type"] = error
        parent = None if self._parent is None else self._parent.span_id
        name = f"{self._method} {self.route}".strip()
        self.emit([SpanRecord(name, self.trace_id, self.span_id, parent, self._began_ns, self.at(now), attributes,
                              is_server=True, error=error)])  # fmt: skip


@dataclass(slots=True)
class SequenceTrace:
    """The trace of one sequence. The engine thread adds steps. After the last step, the event loop calls ``end``."""

    http: HttpTrace
    num_token_steps: int = 0
    """Number of steps that returned a token of the sequence."""
    prefill: StepGroups = field(default_factory=StepGroups)
    """The steps up to the first token."""
    decode: StepGroups = field(default_factory=StepGroups)

    def step(self, step: StepGroup, *, has_token: bool) -> None:
        """Records a step that computed tokens of the sequence. ``has_token`` is True if it returned an output token."""
        (self.decode if self.num_token_steps else self.prefill).add(step)
        self.num_token_steps += has_token

    def end(self, request: Request, output: RequestOutput, timings: RequestTimings) -> None:
        """Emits the spans of a sequence that has ended. ``output`` is its last piece."""
        http, arrival = self.http, request.arrival_time
        span_id = new_id(64)
        queued = arrival + timings.tokenise
        started = queued + timings.queue
        # Prefer ``finish_time``, because it is not rounded. With the rounded times, the span of the last step could end
        # after the span of its phase.
        finish = request.finish_time
        engine_end = max(started, arrival + timings.e2e - timings.delivery if finish is None else finish)
        spans = self._phase("queue", span_id, queued, started, {})
        if timings.num_chunks or request.first_token_time is not None:
            first = engine_end if request.first_token_time is None else max(started, request.first_token_time)
            prefill = {
                "gen_ai.usage.input_tokens": output.num_prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": timings.num_cached_tokens,
                "llm_serving.prefill.chunks": timings.num_chunks,
            }
            spans += self._phase("prefill", span_id, started, first, prefill, self.prefill)
            if request.first_token_time is not None:
                decode = {
                    "gen_ai.usage.output_tokens": output.num_output_tokens,
                    "llm_serving.decode.steps": max(0, self.num_token_steps - 1),
                    "llm_serving.preempted.seconds": timings.preempted + timings.swapped,
                    "llm_serving.restarted.seconds": timings.restarted,
                }
                spans += self._phase("decode", span_id, first, engine_end, decode, self.decode)
        name, attributes = f"{http.operation} {http.model}", self._attributes(request, output, timings)
        error = str(attributes.get("error.type", ""))
        start, end = http.at(arrival), http.at(max(engine_end, arrival + timings.e2e))
        whole = SpanRecord(name, http.trace_id, span_id, http.span_id, start, end, attributes, error=error)
        http.emit([whole, *spans])

    def _phase(self, name: str, parent: int, start: float, end: float, attributes: Attributes,
               steps: StepGroups | None = None) -> list[SpanRecord]:  # fmt: skip
        """Returns the span of a phase, followed by the spans of its steps."""
        phase = self._span(name, parent, start, end, attributes)
        groups = () if steps is None else steps.all()
        return [phase, *(self._step_span(one, phase.span_id) for one in groups)]

    def _step_span(self, group: StepGroup, parent: int) -> SpanRecord:
        name = "agent step" if group.steps == 1 else "agent steps"
        return self._span(name, parent, group.start, group.end, group.attributes())

    def _span(self, name: str, parent: int, start: float, end: float, attributes: Attributes) -> SpanRecord:
        http = self.http
        return SpanRecord(name, http.trace_id, new_id(64), parent, http.at(start), http.at(end), attributes)

    def _attributes(self, request: Request, output: RequestOutput, timings: RequestTimings) -> dict[str, Value]:
        sampling, reason = request.sampling, output.finish_reason
        attributes: dict[str, Value] = {
            "gen_ai.operation.name": self.http.operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self.http.model,
            "gen_ai.response.model": self.http.model,
            "gen_ai.response.id": request.request_id,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": float(sampling.temperature),
            "gen_ai.request.top_p": float(sampling.top_p),
            "gen_ai.response.finish_reasons": ("error" if reason is None else reason.value,),
            "gen_ai.usage.input_tokens": output.num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": timings.num_cached_tokens,
            "gen_ai.usage.output_tokens": output.num_output_tokens,
            "llm_serving.preemptions": timings.num_preemptions,
        }
        for one in timings.blocked:
            attributes[f"llm_serving.blocked.{one.reason.value}.seconds"] = one.seconds
        if request.replica is not None:
            attributes["llm_serving.replica"] = request.replica
        if timings.ttft is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = timings.ttft
        if reason in (FinishReason.ERROR, FinishReason.ABORT):
            attributes["error.type"] = reason.value
        return attributes
