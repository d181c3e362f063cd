"""Exports spans of OpenTelemetry traces with OTLP over HTTP, in a separate thread.

The event loop puts spans into a bounded queue, and never waits. If the queue is full or the collector does not answer,
spans are dropped and counted. This module imports OpenTelemetry only if traces are on.
"""

from __future__ import annotations

import importlib.util
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from llm_serving.errors import ConfigError
from llm_serving.tracing.trace import HttpTrace, SpanRecord, new_id, parse_traceparent

MAX_WAITING = 4096
"""Maximum number of batches of spans that wait for the exporter."""
MAX_BATCH_SPANS = 512
"""Maximum number of spans in one message to the collector."""
EXPORT_TIMEOUT_S = 5.0
"""Maximum seconds to export one batch, including further attempts."""
PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def check_packages() -> None:
    """Raises ConfigError if the packages that export spans are not installed."""
    try:
        missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    except ModuleNotFoundError as error:
        missing = [str(error.name)]
    if missing:
        raise ConfigError(
            f"telemetry_config.traces_endpoint needs the Python package {missing[0]}, which is not installed; run "
            "pip install 'llm-serving[tracing]', or remove the setting"
        )


class Tracing:
    """Decides which HTTP requests are traced, and exports their spans."""

    def __init__(
        self,
        endpoint: str,
        sample_ratio: float,
        model: str,
        version: str,
        counted: Callable[[str, int], None],
        *,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """``counted`` is called with ``exported`` or ``dropped`` and a number of spans, by any thread.

        Raises ConfigError if a package is missing.
        """
        check_packages()
        self._model = model
        self._threshold = round(sample_ratio * (1 << 64))
        self._counted = counted
        self._queue: queue.Queue[Sequence[SpanRecord] | None] = queue.Queue(max_waiting)
        self._exporter = _Exporter(endpoint, version)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def begin(self, traceparent: str | None, method: str, path: str, began: float) -> HttpTrace | None:
        """Returns the trace of an HTTP request that arrived at ``began`` (``time.monotonic``), or None.

        A valid ``traceparent`` decides whether the request is traced. Without one, the sample ratio decides.
        """
        parent = None if traceparent is None else parse_traceparent(traceparent)
        trace_id = new_id(128) if parent is None else parent.trace_id
        # OpenTelemetry's TraceIdRatioBased uses the same bits of the id, so all services make the same decision.
        is_sampled = (trace_id & ((1 << 64) - 1)) < self._threshold if parent is None else parent.is_sampled
        if not is_sampled:
            return None
        began_ns = time.time_ns() - round((time.monotonic() - began) * 1e9)
        return HttpTrace(self.put, self._model, trace_id, parent, method, path, began, began_ns)

    def put(self, spans: Sequence[SpanRecord]) -> None:
        """Adds spans to the queue for the export. If the queue is full, drops and counts the spans. Does not block."""
        try:
            self._queue.put_nowait(spans)
        except queue.Full:
            self._counted("dropped", len(spans))

    def close(self, timeout_s: float = 2.0) -> None:
        """Exports the waiting spans, for at most ``timeout_s`` seconds. Drops and counts the remaining spans."""
        end = time.monotonic() + timeout_s
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            pass
        else:
            self._thread.join(max(0.0, end - time.monotonic()))
        self._closing.set()
        self._exporter.shutdown()
        self._thread.join(1.0)

    def _run(self) -> None:
        is_open = True
        while is_open and not self._closing.is_set():
            batch = self._queue.get()
            spans: list[SpanRecord] = []
            while True:
                if batch is None:
                    is_open = False
                    break
                spans += batch
                if len(spans) >= MAX_BATCH_SPANS:
                    break
                try:
                    batch = self._queue.get_nowait()
                except queue.Empty:
                    break
            if spans:
                self._counted("exported" if self._exporter.export(spans) else "dropped", len(spans))
        while not self._queue.empty():
            self._counted("dropped", len(self._queue.get_nowait() or ()))


class _Exporter:
    """Turns ``SpanRecord`` objects into spans of OpenTelemetry's SDK and sends them."""

    def __init__(self, endpoint: str, version: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        # OpenTelemetry logs an error for each failed export. Without a collector, these errors would fill standard
        # error. They are not needed, because the metric of dropped spans shows the failures.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._exporter: Any = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
        self._resource = Resource.create({"service.name": "llm-serving", "service.version": version})
        self._scope = InstrumentationScope("llm_serving", version)

    def export(self, spans: Sequence[SpanRecord]) -> bool:
        """Sends spans. Returns False if the collector did not accept them."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            return self._exporter.export([self._span(one) for one in spans]) is SpanExportResult.SUCCESS
        except Exception:  # whatever the network does, the thread must go on
            return False

    def shutdown(self) -> None:
        """Ends a running attempt to send spans."""
        self._exporter.shutdown()

    def _span(self, record: SpanRecord) -> Any:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        flags = TraceFlags(TraceFlags.SAMPLED)
        parent = None
        if record.parent_id is not None:
            parent = SpanContext(record.trace_id, record.parent_id, record.is_server, flags)
        return ReadableSpan(
            name=record.name,
            context=SpanContext(record.trace_id, record.span_id, False, flags),
            parent=parent,
            resource=self._resource,
            attributes=dict(record.attributes),
            kind=SpanKind.SERVER if record.is_server else SpanKind.INTERNAL,
            instrumentation_scope=self._scope,
            status=Status(StatusCode.ERROR, record.error) if record.error else Status(StatusCode.UNSET),
            start_time=record.start_ns,
            end_time=record.end_ns,
        )
