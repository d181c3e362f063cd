"""A collector of traces on loopback: receives OTLP over HTTP and parses the protobuf messages."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from support.time_limits import time_limit


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as the collector has parsed it. Ids are hexadecimal; times are nanoseconds."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start: int
    end: int
    attributes: dict[str, Any]
    is_error: bool
    service: str


class OtlpReceiver:
    """Keeps all received spans, and the bytes of all messages. ``hold`` makes the next replies wait."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.raw = b""
        self.answer = threading.Event()
        self.answer.set()
        self.url = ""

    def wait_for(self, enough: Callable[[list[ReceivedSpan]], bool]) -> list[ReceivedSpan]:
        """Returns the spans as soon as ``enough`` accepts them."""
        end = time.monotonic() + time_limit(30)
        while time.monotonic() < end:
            if enough(spans := list(self.spans)):
                return spans
            time.sleep(0.02)
        raise AssertionError(f"only these spans arrived: {[span.name for span in self.spans]}")

    def take(self, body: bytes) -> None:
        """Parses one message."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.raw += body
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _attributes(group.resource.attributes)["service.name"]
            for scope in group.scope_spans:
                self.spans += [_span(span, service) for span in scope.spans]


def _span(span: Any, service: str) -> ReceivedSpan:
    return ReceivedSpan(
        span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), span.kind,
        span.start_time_unix_nano, span.end_time_unix_nano, _attributes(span.attributes),
        span.status.code == 2, service,
    )  # fmt: skip


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [_value(each) for each in found.values] if kind == "array_value" else found


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """Provides a collector that listens on a free port."""
    receiver = OtlpReceiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            receiver.answer.wait(time_limit(60))
            receiver.take(body)
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        receiver.url = f"http://127.0.0.1:{http.server_address[1]}/v1/traces"
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        try:
            yield receiver
        finally:
            receiver.answer.set()
            http.shutdown()
            thread.join()
