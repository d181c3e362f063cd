"""Tests traces: the client's trace header, the choice of traced requests, and the export to a collector that may be
down.
"""

import socket
import threading
import time
from collections import Counter

import pytest

from llm_serving.errors import ConfigError
from llm_serving.tracing import export
from llm_serving.tracing.export import Tracing
from llm_serving.tracing.trace import SpanRecord, TraceParent, parse_traceparent
from support.otlp_receiver import otlp_receiver
from support.time_limits import time_limit

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Counts:
    def __init__(self):
        self.totals, self._lock = Counter(), threading.Lock()

    def __call__(self, result, number):
        with self._lock:
            self.totals[result] += number

    def wait_for(self, result, number):
        end = time.monotonic() + time_limit(30)
        while self.totals[result] < number:
            assert time.monotonic() < end, self.totals
            time.sleep(0.01)


def record(name):
    return SpanRecord(name, 5, 6, None, 1000, 2000, {"llm_serving.replica": 0})


@pytest.mark.parametrize(("flags", "is_sampled"), [("01", True), ("00", False), ("03", True)])
def test_a_traceparent_is_read(flags, is_sampled):
    assert parse_traceparent(f"00-{TRACE}-{SPAN}-{flags}") == TraceParent(int(TRACE, 16), int(SPAN, 16), is_sampled)


def test_a_later_version_may_have_more_fields():
    assert parse_traceparent(f"01-{TRACE}-{SPAN}-01-more") is not None


@pytest.mark.parametrize(
    "value",
    [
        "", "x", f"ff-{TRACE}-{SPAN}-01", f"00-{TRACE.upper()}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE}-{SPAN}", f"00-{TRACE}-{SPAN}-01-more", f"00-{TRACE}-{SPAN}-01\n",
    ],
)  # fmt: skip
def test_a_wrong_traceparent_is_ignored(value):
    assert parse_traceparent(value) is None


@pytest.fixture
def make_tracing():
    opened = []

    def make(endpoint, ratio=1.0, **more):
        counts = Counts()
        opened.append(Tracing(endpoint, ratio, "llama", "1", counts, **more))
        return opened[-1], counts

    yield make
    for each in opened:
        each.close(0.1)


def test_the_flag_of_the_client_decides_and_otherwise_the_ratio(make_tracing):
    with otlp_receiver() as receiver:
        for ratio, expected in ((0.0, 0), (1.0, 50)):
            tracing, _ = make_tracing(receiver.url, ratio)
            assert sum(tracing.begin(None, "POST", "/chat", 0.0) is not None for _ in range(50)) == expected
            assert tracing.begin(f"00-{TRACE}-{SPAN}-01", "POST", "/chat", 0.0).trace_id == int(TRACE, 16)
            assert tracing.begin(f"00-{TRACE}-{SPAN}-00", "POST", "/chat", 0.0) is None
        half, _ = make_tracing(receiver.url, 0.5)
        assert 300 < sum(half.begin(None, "POST", "/chat", 0.0) is not None for _ in range(1000)) < 700


def test_close_exports_the_waiting_spans(make_tracing):
    with otlp_receiver() as receiver:
        tracing, counts = make_tracing(receiver.url)
        for number in range(20):
            tracing.put([record(str(number))])
        tracing.close(time_limit(10))
        assert {span.name for span in receiver.spans} == {str(number) for number in range(20)}
        assert counts.totals == {"exported": 20}


def test_a_slow_collector_costs_spans_and_not_time(make_tracing):
    with otlp_receiver() as receiver:
        receiver.answer.clear()
        tracing, counts = make_tracing(receiver.url, max_waiting=4)
        tracing.put([record("first")])
        for number in range(100):
            tracing.put([record(str(number))])  # would never return if ``put`` waited for the collector
        assert counts.totals["exported"] == 0
        assert counts.totals["dropped"] >= 90
        receiver.answer.set()
        tracing.close(time_limit(10))
        assert counts.totals["exported"] + counts.totals["dropped"] == 101


def test_without_a_collector_spans_are_dropped_and_counted(make_tracing, monkeypatch):
    monkeypatch.setattr(export, "EXPORT_TIMEOUT_S", 0.2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tracing, counts = make_tracing(f"http://127.0.0.1:{port}/v1/traces")
    tracing.put([record("a"), record("b")])
    counts.wait_for("dropped", 2)
    tracing.put([record("c")])
    counts.wait_for("dropped", 3)
    assert counts.totals["exported"] == 0


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(export, "PACKAGES", ("no_such_package.sdk",))
    with pytest.raises(ConfigError, match=r"no_such_package.*llm-serving\[tracing\]"):
        export.check_packages()
