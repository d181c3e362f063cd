"""Tests that a real server exports the traces of its requests to a collector."""

import json
import re
import urllib.request

import pytest

from support.otlp_receiver import otlp_receiver
from support.server_process import running_server
from support.time_limits import time_limit

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SERVER, INTERNAL = 2, 1


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    with otlp_receiver() as receiver:
        overrides = [f"telemetry_config.traces_endpoint={receiver.url}", "telemetry_config.trace_sample_ratio=0"]
        # The tests count steps, and drafts make fewer of them.
        overrides += ["scheduler_config.max_num_batched_tokens=64", "speculative_config.method=off"]
        with running_server(tmp_path_factory.mktemp("traced"), overrides) as server:
            yield server, receiver


def post(server, path, body, **headers):
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
    )
    with urllib.request.urlopen(request, timeout=time_limit(60)) as reply:
        return reply.read().decode()


def complete(traced, trace_id, sampled="01", **more):
    """Sends a request and returns the spans of its trace by name."""
    server, receiver = traced
    body = {"prompt": "zebra crossing", "max_tokens": 4, "ignore_eos": True, **more}
    post(server, "/v1/completions", body, traceparent=f"00-{trace_id}-{SPAN}-{sampled}")

    def of_trace(spans):
        return {span.name: span for span in spans if span.trace_id == trace_id}

    return of_trace(receiver.wait_for(lambda spans: "POST /v1/completions" in of_trace(spans)))


def steps_of(traced, trace_id):
    """Returns the spans of the agent's steps in a trace whose spans have all arrived, by the ends of the steps."""
    _, receiver = traced
    names = ("agent step", "agent steps")
    found = [span for span in receiver.spans if span.trace_id == trace_id and span.name in names]
    return sorted(found, key=lambda span: span.end)


@pytest.mark.parametrize("stream", [False, True])
def test_the_spans_of_a_request(traced, stream):
    trace_id = TRACE[:-1] + str(int(stream))
    spans = complete(traced, trace_id, stream=stream)
    [model] = [name.removeprefix("text_completion ") for name in spans if name.startswith("text_completion ")]
    http, sequence = spans["POST /v1/completions"], spans[f"text_completion {model}"]
    assert (http.parent_id, http.kind, http.service) == (SPAN, SERVER, "llm-serving")
    assert (sequence.parent_id, sequence.kind) == (http.span_id, INTERNAL)
    assert http.attributes == {
        "http.request.method": "POST", "http.route": "/v1/completions", "http.response.status_code": 200,
    }  # fmt: skip
    attributes = sequence.attributes
    assert attributes["gen_ai.operation.name"] == "text_completion"
    assert attributes["gen_ai.provider.name"] == "llm-serving"
    assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == model
    assert attributes["gen_ai.request.max_tokens"] == attributes["gen_ai.usage.output_tokens"] == 4
    assert attributes["gen_ai.usage.input_tokens"] > 0
    assert attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert attributes["gen_ai.response.time_to_first_chunk"] > 0
    assert not http.is_error
    queue, prefill, decode = (spans[name] for name in ("queue", "prefill", "decode"))
    assert {span.parent_id for span in (queue, prefill, decode)} == {sequence.span_id}
    times = [http.start, queue.start, queue.end, prefill.end, decode.end, sequence.end]
    assert times == sorted(times)
    assert abs(prefill.start - queue.end) < 10_000
    assert abs(decode.start - prefill.end) < 10_000
    assert decode.attributes["gen_ai.usage.output_tokens"] == 4
    assert prefill.attributes["gen_ai.usage.input_tokens"] == attributes["gen_ai.usage.input_tokens"]
    steps = steps_of(traced, trace_id)
    assert [span.parent_id for span in steps] == [prefill.span_id, *[decode.span_id] * 3]
    for span in steps:
        step = span.attributes
        assert (step["llm_serving.step.count"], step["llm_serving.step.sequences"]) == (1, 1)
        assert step["llm_serving.step.graph_seconds"] > 0
    assert [span.attributes["llm_serving.step.kind"] for span in steps] == ["prefill", *["decode"] * 3]
    ends = [prefill.start, *(span.end for span in steps), sequence.end]
    assert ends == sorted(ends)


def test_each_chunk_of_a_prompt_has_a_span(traced):
    trace_id = "5" * 32
    spans = complete(traced, trace_id, prompt=[5] * 150)
    steps = [span for span in steps_of(traced, trace_id) if span.parent_id == spans["prefill"].span_id]
    assert len(steps) == spans["prefill"].attributes["llm_serving.prefill.chunks"] == 3
    assert [span.attributes["llm_serving.step.request_tokens"] for span in steps] == [64, 64, 22]


def test_a_long_answer_has_a_bounded_number_of_spans(traced):
    trace_id = "6" * 32
    spans = complete(traced, trace_id, max_tokens=200)
    steps = [span for span in steps_of(traced, trace_id) if span.parent_id == spans["decode"].span_id]
    assert len(steps) <= 32
    assert sum(span.attributes["llm_serving.step.count"] for span in steps) == 199
    assert {span.name for span in steps} == {"agent steps"}


def test_each_sequence_of_a_request_has_a_span(traced):
    trace_id = "1" * 32
    complete(traced, trace_id, n=3)
    _, receiver = traced

    def sequences(spans):
        return [span for span in spans if span.trace_id == trace_id and span.name.startswith("text_completion ")]

    found = sequences(receiver.wait_for(lambda spans: len(sequences(spans)) == 3))
    assert len({span.attributes["gen_ai.response.id"] for span in found}) == 3


def test_a_refused_request_has_a_span_with_its_status(traced):
    server, receiver = traced
    trace_id = "2" * 32
    with pytest.raises(urllib.error.HTTPError, match="400"):
        post(server, "/v1/completions", {"prompt": 7.5}, traceparent=f"00-{trace_id}-{SPAN}-01")
    spans = receiver.wait_for(lambda spans: any(span.trace_id == trace_id for span in spans))
    [span] = [span for span in spans if span.trace_id == trace_id]
    assert span.attributes["http.response.status_code"] == 400


def test_no_text_and_no_unsampled_request_is_exported(traced):
    server, receiver = traced
    body = {"prompt": "zebra crossing", "max_tokens": 2, "ignore_eos": True}
    post(server, "/v1/completions", body)
    post(server, "/v1/completions", body, traceparent=f"00-{'3' * 32}-{SPAN}-00")
    complete(traced, "4" * 32)  # sent last, so its spans arrive last
    assert b"zebra" not in receiver.raw
    assert {span.trace_id for span in receiver.spans} <= {
        TRACE[:-1] + "0", TRACE[:-1] + "1", "1" * 32, "2" * 32, "4" * 32, "5" * 32, "6" * 32,
    }  # fmt: skip
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=time_limit(20)) as reply:
        metrics = reply.read().decode()
    [exported] = re.findall(r'^llm_serving_trace_spans_total\{result="exported"\} (\S+)$', metrics, re.MULTILINE)
    assert float(exported) > 0
