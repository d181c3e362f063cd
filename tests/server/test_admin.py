"""Tests the routes for health, metrics, server facts, the tokenizer, the web pages and the log."""

import asyncio
import re
import socket
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llm_serving.engine.detokenizer import IncrementalDetokenizer
from llm_serving.errors import (
    AgentLostError,
    AgentLostTwiceError,
    ContextLengthError,
    EngineFailedError,
    NotFiniteError,
    QueueFullError,
)
from llm_serving.request import Blocked, FinishReason, RequestOutput, RequestTimings
from llm_serving.scheduler.figures import Figures
from llm_serving.scheduler.output import ScheduledStep, StepKind, StepResult
from llm_serving.server import pages
from llm_serving.server.generation.sampling import choice_seed
from llm_serving.server.state import ServerSettings
from llm_serving.telemetry.metrics import Metrics
from llm_serving.telemetry.receipt import BlockReason
from llm_serving.version import __version__
from support.fake_engine import MODEL_NAME, FakeEngine, Submitted, make_status
from support.http_server import running
from support.small_configs import small_config
from support.small_tokenizers import open_tokenizer, write_byte_level_folder
from support.time_limits import time_limit


def test_live_responds_while_the_engine_runs(server, engine):
    engine.current = make_status(state="recovering")
    assert server.http.get("/health/live").json() == {"status": "live"}
    engine.current = make_status(state="stopped")
    response = server.http.get("/health/live")
    assert (response.status_code, response.json()) == (503, {"status": "stopped"})


def test_the_version_is_that_of_the_program(server):
    response = server.http.get("/version")
    assert (response.status_code, response.json()) == (200, {"version": __version__})


@pytest.mark.parametrize("path", ["/health/ready", "/health", "/ping"])
@pytest.mark.parametrize(
    ("state", "age", "probe", "status", "name", "probes"),
    [
        ("ready", 0.1, False, 200, "ready", 0),
        ("ready", 60.0, True, 200, "ready", 1),
        ("ready", None, True, 200, "ready", 1),
        ("ready", 60.0, False, 503, "agents do not answer", 1),
        ("starting", None, True, 503, "starting", 0),
        ("recovering", 0.1, True, 503, "recovering", 0),
        ("stopped", 0.1, True, 503, "stopped", 0),
    ],
)
def test_ready_reports_whether_requests_are_served(server, engine, path, state, age, probe, status, name, probes):
    engine.current, engine.probe_answer = make_status(state=state, last_step_age_s=age), probe
    response = server.http.get(path)
    assert (response.status_code, response.json()) == (status, {"status": name, "ready": status == 200})
    assert engine.num_probes == probes


@pytest.mark.parametrize("path", ["/health/ready", "/v2/health/ready", f"/v2/models/{MODEL_NAME}/ready"])
def test_the_wait_for_slow_agents_ends_if_the_client_leaves(server, engine, monkeypatch, path):
    asked, left = threading.Event(), threading.Event()

    async def probe(timeout_s):
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    engine.current = make_status(state="ready", last_step_age_s=60.0)
    monkeypatch.setattr(engine, "probe", probe)
    url = server.http.base_url
    with socket.create_connection((url.host, url.port)) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert asked.wait(time_limit(20))
        assert not left.is_set()
    assert left.wait(time_limit(20))


@pytest.mark.parametrize("state", ["starting", "recovering", "stopped"])
def test_requests_are_refused_while_the_engine_is_not_ready(server, engine, state):
    engine.current = make_status(state=state)
    for path, body in (("/v1/completions", {"prompt": "a", "stream": True}), ("/generate", {"inputs": "a"})):
        response = server.post(path, body)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"]["code"] == state
        assert response.json()["error"]["type"] == "server_error"
    assert server.http.get("/v1/models").status_code == 200
    assert server.post("/tokenize", {"prompt": "a"}).status_code == 200
    assert engine.submitted == []


HIDDEN = "process 77, /var/lib/secret/model.bin"
"""Facts of the server that errors of the server itself must not show to clients."""


def shows_hidden(text):
    return any(part in text for part in ("process 77", "/var/lib", "secret", "model.bin", "Traceback"))


@pytest.mark.parametrize(
    ("error", "status", "code", "kind"),
    [
        (QueueFullError("1024 requests wait"), 429, "queue_full", "rate_limit_error"),
        (ContextLengthError("needs 9 blocks of 8"), 400, "context_length_exceeded", "invalid_request_error"),
        (AgentLostError(f"agent 0, {HIDDEN}: gone"), 503, "agent_lost", "server_error"),
        (AgentLostTwiceError(HIDDEN), 500, "agent_lost_twice", "server_error"),
        (NotFiniteError(HIDDEN), 500, "logits_not_finite", "server_error"),
        (EngineFailedError(HIDDEN), 500, "engine_error", "server_error"),
        (ZeroDivisionError(HIDDEN), 500, "internal_error", "server_error"),
        (FileNotFoundError(2, "No such file", "/var/lib/secret/model.bin"), 500, "internal_error", "server_error"),
    ],
)
@pytest.mark.parametrize("more", [{}, {"stream": True}, {"n": 2}, {"n": 2, "stream": True}])
def test_errors_of_the_engine(server, engine, error, status, code, kind, more, record_property):
    engine.refuse = error
    response = server.post("/v1/completions", {"prompt": "a", **more})
    body = response.json()["error"]
    assert (response.status_code, body["code"], body["type"]) == (status, code, kind)
    if shows_hidden(str(error)):
        record_property("revealing_errors", f"{shows_hidden(response.text):d} of 1")
    assert not shows_hidden(response.text)
    assert ("retry-after" in response.headers) == (status in (429, 503))
    assert len(server.log.named("internal_error")) == (code == "internal_error")
    failed = server.log.named("request_failed")
    assert [(one["message"], one["code"]) for one in failed] == [(str(error), code)] * (
        code in ("agent_lost", "agent_lost_twice", "logits_not_finite", "engine_error")
    )
    logged = [*failed, *server.log.named("internal_error")]
    assert all(one["request_id"] == response.headers["x-request-id"] for one in logged)


def test_a_refusal_of_one_answer_ends_the_others(server, engine, record_property):
    engine.refuse, engine.refuse_after = QueueFullError("full"), 2
    engine.delay_s = 5
    response = server.post("/v1/completions", {"prompt": "a", "n": 3})
    assert response.status_code == 429
    record_property("admitted_parts", f"{sum(not request.aborted for request in engine.submitted)} of 1")
    assert [request.aborted for request in engine.submitted] == [True, True]
    [refused] = server.log.named("request_refused")
    assert (refused["code"], refused["message"]) == ("queue_full", "full")


@pytest.mark.parametrize("path", ["/v1/completions", "/generate_stream"])
def test_a_crash_in_a_stream_is_an_error_event_without_details(server, engine, path, record_property):
    engine.crash = ZeroDivisionError(HIDDEN)
    events = server.events(path, {"prompt": "a", "stream": True} if path.startswith("/v1") else {"inputs": "a"})
    error = next(event["error"] for event in events if "error" in event)
    record_property("revealing_errors", f"{shows_hidden(str(events)):d} of 1")
    assert (error["code"], shows_hidden(str(events))) == ("internal_error", False)
    [logged] = server.log.named("internal_error")
    assert (logged["message"], logged["where"]) == (f"ZeroDivisionError: {HIDDEN}", path)
    assert "Traceback" in logged["traceback"]


def test_server_info(server):
    info = server.http.get("/server_info").json()
    assert info["model"]["name"] == MODEL_NAME
    assert (info["model"]["max_model_len"], info["model"]["max_prompt_tokens"]) == (128, 100)
    assert info["model"]["chat_template"] is True
    assert info["engine"]["state"] == "ready"
    assert info["engine"]["agents"] == [{"rank": 0, "state": "ready"}]
    assert info["limits"]["sequences"] == 256


@pytest.mark.parametrize("header", [None, "Via", "X-Forwarded-For", "X-Request-Start"])
def test_server_info_shows_processes_only_on_this_machine(server, engine, header, record_property):
    public = {"rank": 0, "state": "ready", "restarts": 0, "steps": 5}
    secret = {"pid": 77, "address": "127.0.0.1:1234", "summary": {"log": "/var/log/secret"}}
    engine.current = make_status(agents=[public | secret])
    response = server.http.get("/server_info", headers={} if header is None else {header: "1.1 proxy"})
    info = response.json()
    if header is not None:
        record_property("revealing_errors", f"{'/var/log/secret' in response.text:d} of 1")
    assert info["engine"]["agents"] == [public | secret if header is None else public]


def test_tokenize_and_back(server, tokenizer):
    ids = tokenizer.encode("Once upon a time")
    answer = server.post("/tokenize", {"prompt": "Once upon a time"}).json()
    assert answer == {"tokens": ids, "count": len(ids), "max_model_len": 128}
    bare = server.post("/tokenize", {"prompt": "Once upon a time", "add_special_tokens": False}).json()
    assert bare["tokens"] == ids[1:]
    assert server.post("/detokenize", {"tokens": ids}).json()["text"] == "Once upon a time"
    shown = server.post("/detokenize", {"tokens": ids, "skip_special_tokens": False}).json()
    assert shown == {"text": "<s> Once upon a time", "prompt": "<s> Once upon a time"}
    assert server.post("/detokenize", {"tokens": []}).json()["text"] == ""
    messages = [{"role": "user", "content": "hi"}]
    chat = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert chat == tokenizer.encode(tokenizer.chat_template.render(messages), add_special_tokens=False)
    closed = server.post("/tokenize", {"messages": messages, "add_generation_prompt": False}).json()["tokens"]
    assert closed == chat[:-1]


def test_a_long_text_is_tokenised_in_a_thread(server, tokenizer):
    text = "time " * 1000
    assert server.post("/v1/completions", {"prompt": text}).status_code == 400
    answer = server.post("/tokenize", {"prompt": text[:1000]}).json()
    assert answer["tokens"] == tokenizer.encode(text[:1000])


def test_a_model_without_chat_template_refuses_chats(tmp_path):
    engine = FakeEngine(open_tokenizer(write_byte_level_folder(tmp_path)))
    with running(engine) as server:
        response = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "no_chat_template"
        assert "use /v1/completions" in response.json()["error"]["message"]
        assert server.http.get("/server_info").json()["model"]["chat_template"] is False
        assert server.post("/v1/completions", {"prompt": "the"}).status_code == 200


def test_arrivals_are_logged_without_the_prompt(server, engine):
    server.post("/v1/completions", {"prompt": ["Once", "a"], "max_tokens": 3, "stream": True})
    arrivals = server.log.named("request_arrival")
    assert [arrival["request_id"] for arrival in arrivals] == [request.request_id for request in engine.submitted]
    assert arrivals[0] == {
        "request_id": engine.submitted[0].request_id,
        "api": "completions",
        "prompt_tokens": 4,
        "max_tokens": 3,
        "stream": True,
    }


def test_prompts_are_logged_when_asked(tokenizer):
    with running(FakeEngine(tokenizer), log_prompts=True) as server:
        server.post("/generate", {"inputs": "Once"})
        assert server.log.named("request_arrival")[0]["prompt"] == "Once"


def test_metrics(server, engine):
    server.post("/v1/completions", {"prompt": "a"})
    server.post("/v1/completions", {"prompt": "a", "temperature": 9})
    server.http.get("/nowhere")
    text = server.http.get("/metrics").text
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    route = ("route", "/v1/completions")
    assert samples["llm_serving_http_responses_total", (route, ("status", "200"))] >= 1
    assert samples["llm_serving_http_responses_total", (route, ("status", "400"))] >= 1
    assert samples["llm_serving_http_responses_total", (("route", "unmatched"), ("status", "404"))] >= 1
    assert samples["llm_serving_kv_blocks_used", ()] == 10
    assert samples["llm_serving_kv_usage_ratio", ()] == 0.1
    assert samples["llm_serving_engine_state", (("state", "ready"),)] == 1
    assert samples["llm_serving_engine_state", (("state", "stopped"),)] == 0


def test_metrics_of_every_agent(server, engine):
    summary = {"weight_bytes": 100, "kv_cache_bytes": 200}
    ready = {"rank": 2, "replica": 1, "state": "ready", "restarts": 3, "summary": summary}
    engine.current = make_status(agents=[ready, {"rank": 3, "replica": 1, "state": "restarting", "restarts": 3}])
    text = server.http.get("/metrics").text
    for line in (
        'llm_serving_agent_state{rank="2",replica="1",state="ready"} 1.0',
        'llm_serving_agent_state{rank="2",replica="1",state="restarting"} 0.0',
        'llm_serving_agent_state{rank="3",replica="1",state="restarting"} 1.0',
        'llm_serving_agent_restarts_total{rank="3",replica="1"} 3.0',
        'llm_serving_agent_weight_bytes{rank="2",replica="1"} 100.0',
        'llm_serving_agent_kv_cache_bytes{rank="2",replica="1"} 200.0',
    ):
        assert line in text.splitlines()
    assert 'llm_serving_agent_weight_bytes{rank="3"' not in text


def test_the_engines_metrics():
    metrics = Metrics(process=False)
    step = ScheduledStep(seq=1, kind=StepKind.PREFILL, rows=[0, 1], token_ids=[5, 6, 7])
    metrics.step(step, StepResult(seq=1, sampled_ids=[9, -1], sample_us=500), 0.25, 0.0625)
    metrics.first_token(0.1)
    timings = RequestTimings(
        queue=0.1, prefill=0.2, decode=0.25, swapped=0.25, e2e=0.9, ttft=0.3, delivery=0.1, tpot=0.2,
        blocked=(Blocked(BlockReason.ROWS, 3, 0.0625),),
    )  # fmt: skip
    output = RequestOutput("r", "", (), (), 10, 4, FinishReason.STOP)
    metrics.request_end(output, FinishReason.STOP, timings)
    metrics.host_overhead(0.0)
    metrics.host_overhead(0.003)
    metrics.request_refused("queue_full")
    metrics.preemptions(3, 1)
    metrics.objectives({"ttft": True, "both": True})
    metrics.objectives({"ttft": True, "tbt": False, "both": False})
    metrics.objectives({})
    value = metrics.registry.get_sample_value
    assert value("llm_serving_step_seconds_sum", {"kind": "prefill"}) == 0.25
    assert value("llm_serving_step_sequences_sum", {"kind": "prefill"}) == 2
    assert value("llm_serving_step_sampling_seconds_sum") == 0.0005
    assert value("llm_serving_step_detokenise_seconds_sum") == 0.0625
    assert value("llm_serving_step_tokens_total", {"kind": "prefill"}) == 3
    assert value("llm_serving_generated_tokens_total") == 1
    assert value("llm_serving_prompt_tokens_total") == 10
    assert value("llm_serving_requests_finished_total", {"reason": "stop"}) == 1
    assert value("llm_serving_requests_finished_total", {"reason": "error"}) == 0
    assert value("llm_serving_requests_refused_total", {"code": "queue_full"}) == 1
    assert value("llm_serving_time_per_output_token_seconds_sum") == pytest.approx(0.2)
    assert value("llm_serving_request_seconds_sum") == 0.9
    assert value("llm_serving_queue_seconds_sum") == 0.1
    assert value("llm_serving_engine_host_overhead_seconds_sum") == 0.003
    assert value("llm_serving_engine_host_overhead_seconds_bucket", {"le": "0.0"}) == 1
    assert value("llm_serving_engine_host_overhead_seconds_count") == 2
    assert value("llm_serving_preemptions_total", {"kind": "recompute"}) == 2
    assert value("llm_serving_preemptions_total", {"kind": "swap"}) == 1
    assert value("llm_serving_request_part_seconds_total", {"part": "swapped"}) == 0.25
    assert value("llm_serving_request_part_seconds_total", {"part": "tokenise"}) == 0
    assert value("llm_serving_queue_blocked_seconds_total", {"reason": "rows"}) == 0.0625
    counts = {
        (objective, met): value("llm_serving_request_objectives_total", {"objective": objective, "met": met})
        for objective in ("ttft", "tbt", "both")
        for met in ("true", "false")
    }
    assert counts == {
        ("ttft", "true"): 2, ("ttft", "false"): 0, ("tbt", "true"): 0, ("tbt", "false"): 1,
        ("both", "true"): 1, ("both", "false"): 1,
    }  # fmt: skip


def test_the_caches_and_the_swaps_in_the_metrics(server, engine):
    figures = Figures(
        swapped=2, reserved_tokens=16, held_tokens=12, prefix_hit_tokens=30, prefix_query_tokens=40, total_blocks=9
    )
    engine.current = make_status(figures=figures, recorder_s=0.5)
    lines = server.http.get("/metrics").text.splitlines()
    assert "llm_serving_requests_swapped 2.0" in lines
    assert "llm_serving_kv_waste_ratio 0.25" in lines
    assert "llm_serving_flight_recorder_seconds_total 0.5" in lines
    assert "llm_serving_prefix_cache_hit_tokens_total 30.0" in lines
    assert "llm_serving_prefix_cache_query_tokens_total 40.0" in lines
    assert server.http.get("/server_info").json()["engine"]["swapped"] == 2


def test_seeds_of_several_answers():
    seeds = [choice_seed(seed, i) for seed in (0, 1, 2**64 - 1) for i in range(20)]
    assert len(set(seeds)) == 60
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert choice_seed(42, 0) == 42
    assert choice_seed(0, 1) == 0xE220A8397B1DCDAF  # the first output of SplitMix64 from state 0


def test_the_settings_of_a_config(tmp_path):
    config = small_config(tmp_path, ["model_config.seq_length=[64]"])
    settings = ServerSettings.from_config(config)
    assert (settings.max_context, settings.max_prompt_tokens) == (config.max_model_len, 64)
    assert settings.vocab_size == config.shape.vocab_size
    assert settings.hosts == {"127.0.0.1"}
    assert settings.trusted_proxies == ("127.0.0.1", "::1")
    assert settings.info["dtype"] == config.model_config.model_dtype


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_use_nothing_from_outside(server, path):
    response = server.http.get(path)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    page = response.text
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", page)
    assert not any(word in page for word in ("@import", "innerHTML", "eval(", "<script>"))
    assert not re.search(r"<[^>]+\son\w+\s*=|<[^>]+\sstyle\s*=", page), "inline handlers are not in the policy"


def test_the_docs_list_every_endpoint(server):
    document = server.http.get("/openapi.json").json()
    page = server.http.get("/docs").text
    for path, operations in document["paths"].items():
        for method in operations:
            assert f"{method.upper()}</span> {path}</h2>" in page
    schemas = document["components"]["schemas"]
    assert "max_completion_tokens" in schemas["ChatRequest"]["properties"]
    assert schemas["CompletionRequest"]["required"] == ["prompt"]
    assert "prefix_text" in page


def test_the_openapi_document_is_made_once_and_not_on_the_event_loop(server, monkeypatch):
    running, make = [], pages.openapi_document
    monkeypatch.setattr(
        pages, "openapi_document", lambda *a, **b: running.append(asyncio._get_running_loop()) or make(*a, **b)
    )
    pages._document.cache_clear()
    pages._document_bytes.cache_clear()
    first = server.http.get("/openapi.json")
    assert first.headers["content-type"] == "application/json"
    assert server.http.get("/openapi.json").content == first.content
    assert server.http.get("/docs").status_code == 200
    assert running == [None], "the thread has no event loop"


def test_the_fake_engine_and_the_contract_agree(tokenizer):
    """The joined pieces of the fake engine equal the text of the real detokenizer.

    Otherwise, the other tests of this file would prove nothing about the real engine.
    """
    engine = FakeEngine(tokenizer)
    engine.say("hello to the bird")

    async def run():
        from llm_serving.sampling_params import SamplingParams

        return [piece async for piece in engine._pieces(Submitted("r", [1], SamplingParams()))]

    pieces = asyncio.run(run())
    ids = tokenizer.encode("hello to the bird", add_special_tokens=False)
    text, _ = IncrementalDetokenizer(tokenizer, prompt_token_ids=[1]).append(ids)
    assert "".join(piece.text for piece in pieces) == text
