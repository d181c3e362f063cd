"""Tests the load client against a scripted server in this process.

The client must count requests and tokens exactly, and must name the kind of every failure.
"""

import json
import socket
import threading
import time
from dataclasses import replace

import pytest

from performance.load.client import LoadRun, run_load
from performance.load.endpoint import Endpoint, parse_endpoint
from performance.load.options import LoadOptions
from performance.load.statistics import measure
from performance.program import ServerUnreachableError, UsageError
from support.fake_openai_server import Reply, fake_openai_server
from support.time_limits import time_limit


def options_for(port: int, **changes: object) -> LoadOptions:
    options = LoadOptions(Endpoint("127.0.0.1", port), rate=200.0, duration=0.15, output_len=(3, 6), timeout_s=5.0)
    return replace(options, **changes)


def failures(run: LoadRun) -> dict[str, int]:
    return measure(run).failures


def test_every_request_is_sent_once_and_its_tokens_are_counted() -> None:
    with fake_openai_server(lambda _, body: Reply(tokens=body["max_tokens"])) as server:
        run = run_load(options_for(server.port))
    figures = measure(run)
    assert (figures.requests, figures.failed, len(server.requests)) == (30, 0, 30)
    assert figures.output_tokens == sum(body["max_tokens"] for body in server.requests)
    assert figures.prompt_tokens == 7 * 30
    assert [record.index for record in run.records] == list(range(30))
    assert {record.finish_reason for record in run.records} == {"length"}
    assert {record.request_id for record in run.records} == {f"engine-{number}" for number in range(30)}
    assert {body["model"] for body in server.requests} == {"fake-model"}
    asked = [request.text or "" for request in run.options.workload(30, 0)]
    assert sorted(body["prompt"] for body in server.requests) == sorted(asked), "in any order: connections overtake"


def test_measured_times_match_the_servers_delays() -> None:
    reply = Reply(tokens=5, first_s=0.06, gap_s=0.03)
    with fake_openai_server(lambda *_: reply) as server:
        figures = measure(run_load(options_for(server.port, rate=20.0, duration=0.3, arrivals="uniform")))
    assert figures.requests == 6
    assert figures.ttft_ms.min >= 60
    assert figures.ttft_ms.p50 < time_limit(120)
    assert 29 <= figures.tpot_ms.p50 < time_limit(60)
    assert figures.tbt_ms.count == 6 * 4
    assert 0.178 <= figures.e2e_s.min <= figures.e2e_s.p50 < time_limit(0.36)
    assert figures.normalized_latency_ms.min == pytest.approx(figures.e2e_s.min * 1000 / 5)


def test_connections_are_reused() -> None:
    with fake_openai_server(lambda *_: Reply(tokens=1)) as server:
        run = run_load(options_for(server.port, rate=20.0, arrivals="uniform", duration=0.5))
        assert len(server.requests) == 10
        # Requests that run at the same time need as many connections. Usually that is one, because the next request
        # comes after 50 ms. Three connections ask for the name of the model and for metrics.
        at_once = max(sum(each.sent <= other.sent <= each.end for each in run.records) for other in run.records)
        assert server.connections <= 3 + 2 + at_once


def test_the_load_does_not_wait_for_responses() -> None:
    """In an open loop, all twenty requests run together, because each request takes longer than the time of all
    arrivals.
    """
    response_s = time_limit(0.5)
    with fake_openai_server(lambda *_: Reply(tokens=1, first_s=response_s)) as server:
        run = run_load(options_for(server.port, rate=100.0, duration=0.2, timeout_s=60.0))
    assert max(record.sent for record in run.records) < min(record.end for record in run.records)
    assert run.total_time_s < 3 * response_s


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (Reply("status", status=429), "http 429"),
        (Reply("status", status=500), "http 500"),
        (Reply("drop", tokens=2), "disconnected"),
        (Reply("drop", tokens=0), "disconnected"),
        (Reply("error", tokens=1), "error in stream"),
        (Reply("no_finish", tokens=3), "incomplete"),
        (Reply("garbage", tokens=1), "bad stream"),
        (Reply(finish_reason="abort"), "ended by abort"),
        (Reply(tokens=0), "empty answer"),
    ],
)
def test_every_failure_has_its_kind(reply: Reply, kind: str) -> None:
    """Every third request fails. The load client reports the kind of these failures, and all other requests succeed."""
    with fake_openai_server(lambda number, _: reply if number % 3 == 0 else Reply()) as server:
        figures = measure(run_load(options_for(server.port)))
    assert figures.failures == {kind: 10}
    assert (figures.requests, figures.completed, figures.ttft_ms.count) == (30, 20, 20)


def test_details_of_failures_are_kept() -> None:
    with fake_openai_server(lambda *_: Reply("status")) as server:
        run = run_load(options_for(server.port, rate=100.0, duration=0.02))
    assert [(record.http_status, record.detail) for record in run.records] == [(429, "come back later")] * 2


def test_a_request_without_a_response_times_out() -> None:
    with fake_openai_server(lambda number, _: Reply("hang" if number == 1 else "ok")) as server:
        run = run_load(options_for(server.port, rate=100.0, duration=0.05, timeout_s=0.3))
        assert failures(run) == {"timeout": 1}
        deadline = time.monotonic() + 2
        while server.open_connections and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.open_connections == 0


def test_a_body_can_end_with_the_connection() -> None:
    with fake_openai_server(lambda *_: Reply(close=True)) as server:
        figures = measure(run_load(options_for(server.port)))
    assert (figures.failed, figures.output_tokens) == (0, 30 * 4)


def test_lines_can_end_with_carriage_returns() -> None:
    with fake_openai_server(lambda *_: Reply(crlf=True)) as server:
        figures = measure(run_load(options_for(server.port)))
    assert (figures.failed, figures.output_tokens) == (0, 30 * 4)


def test_without_reported_counts_token_ids_or_pieces_are_counted() -> None:
    with fake_openai_server(lambda *_: Reply(usage=False, token_ids=True)) as server:
        figures = measure(run_load(options_for(server.port)))
    assert (figures.output_tokens, figures.tokens_are_counted_pieces) == (30 * 8, False)
    with fake_openai_server(lambda *_: Reply(usage=False)) as server:
        figures = measure(run_load(options_for(server.port)))
    assert (figures.output_tokens, figures.tokens_are_counted_pieces) == (30 * 4, True)


def test_the_role_event_of_a_chat_is_not_the_first_token() -> None:
    with fake_openai_server(lambda *_: Reply(first_s=0.08)) as server:
        figures = measure(run_load(options_for(server.port, api="openai-chat", rate=100.0, duration=0.1)))
    assert server.paths == ["/v1/chat/completions"] * 10
    assert (figures.failed, figures.output_tokens) == (0, 40)
    assert figures.ttft_ms.min >= 80


def test_warm_up_requests_are_sent_and_not_counted() -> None:
    with fake_openai_server(lambda *_: Reply()) as server:
        figures = measure(run_load(options_for(server.port, warmup=5)))
    assert (figures.requests, len(server.requests)) == (30, 35)


def test_the_api_key_and_the_path_prefix_are_sent() -> None:
    with fake_openai_server(lambda *_: Reply()) as server:
        endpoint = parse_endpoint(f"http://127.0.0.1:{server.port}/proxy/v1/")
        run_load(options_for(0, endpoint=endpoint, api_key="secret", model="m", rate=100.0, duration=0.02))
    assert server.paths == ["/proxy/v1/completions"] * 2
    assert {headers["authorization"] for headers in server.headers} == {"Bearer secret"}


def test_two_runs_with_one_seed_send_the_same() -> None:
    sent = []
    for _ in range(2):
        with fake_openai_server(lambda *_: Reply(tokens=1)) as server:
            run = run_load(options_for(server.port))
            bodies = sorted(json.dumps(body, sort_keys=True) for body in server.requests)
            sent.append((bodies, [record.due - run.start for record in run.records]))
    assert sent[0][0] == sent[1][0]
    assert sent[0][1] == pytest.approx(sent[1][1], abs=1e-9)


def test_progress_ends_at_the_totals() -> None:
    seen = []
    with fake_openai_server(lambda number, _: Reply("drop" if number == 0 else "ok")) as server:
        run_load(options_for(server.port), seen.append)
    last = seen[-1]
    assert (last.total, last.done, last.failed, last.in_flight) == (30, 29, 1, 0)
    assert last.pieces == 30 * 4


def test_a_missing_server_is_reported_immediately() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        started = time.monotonic()
        with pytest.raises(ServerUnreachableError, match=r"no server at http://127\.0\.0\.1:\d+: connection refused"):
            run_load(options_for(unused.getsockname()[1], rate=100.0, duration=60.0))
    assert time.monotonic() - started < time_limit(2.0)


def test_a_server_that_closes_connections_is_reported() -> None:
    """The server accepts connections and closes them without a response."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(2):
                listener.accept()[0].close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(ServerUnreachableError, match=r"/v1/models: .*[Cc]onnection"):
            run_load(options_for(listener.getsockname()[1]))


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://h:1", Endpoint("h", 1)),
        ("h:1/v1", Endpoint("h", 1)),
        ("https://h/a/v1/", Endpoint("h", 443, True, "/a")),
        ("http://[::1]:8", Endpoint("::1", 8)),
    ],
)
def test_base_urls(url: str, endpoint: Endpoint) -> None:
    assert parse_endpoint(url) == endpoint


def test_an_ipv6_address_keeps_its_brackets() -> None:
    assert parse_endpoint("http://[::1]:8/x").url == "http://[::1]:8/x"


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h:99999", "http://h:x"])
def test_wrong_base_urls_are_rejected(url: str) -> None:
    with pytest.raises(UsageError):
        parse_endpoint(url)
