"""Tests the page for operators in a browser: figures, percentiles, requests, and why a request was slow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llm_serving.flight.one_request import find_timeline
from llm_serving.scheduler.figures import Figures
from support.access_keys import access_for, bearer, secret_of
from support.axe import findings
from support.chat_page import ChatPage
from support.fake_engine import make_status
from support.http_server import HttpServer, running
from support.recorded_request import record_requests

pytestmark = pytest.mark.page


@pytest.fixture
def operator(page: ChatPage) -> ChatPage:
    """Opens the page for operators after two requests."""
    blocks = {"total_blocks": 100, "free_blocks": 75, "prefix_hit_tokens": 30, "prefix_query_tokens": 40}
    page.engine.current = make_status(figures=Figures(running=3, waiting=2, swapped=1, preemptions=4, **blocks))
    for _ in range(2):
        page.server.post("/v1/completions", {"prompt": "a"})
    page.expected = ("/timeline", "404")  # this server has no flight recording
    page.open("/operator")
    return page


def test_the_figures_are_those_of_the_engine(operator: ChatPage) -> None:
    script = (
        "return [...document.querySelectorAll('#figures div')].map((one) => one.innerText.split('\\n').slice(0, 2))"
    )
    figures = dict(operator.run(script))
    assert figures["Running (batch)"] == "3"
    assert figures["Waiting (queue)"] == "2"
    assert figures["Swapped out"] == "1"
    assert figures["KV blocks in use"] == "25 / 100"
    assert figures["Prefix cache hits"] == "75 %"
    assert figures["Preemptions"] == "4"
    assert operator.text("#name") == "Operator: fake-llama"


def test_new_values_appear_without_a_reload(operator: ChatPage) -> None:
    operator.engine.current = make_status(figures=Figures(running=77, total_blocks=100))
    operator.wait("document.getElementById('figures').innerText.includes('77')")


def test_percentiles_are_those_of_prometheus(operator: ChatPage) -> None:
    """Ten observations are in (0.1, 0.2] and ten in (0.2, 0.4].

    Percentiles are interpolated linearly inside a bucket, as Prometheus does.
    """
    found = operator.run(
        "return import('/static/js/operator/prometheus.js').then(({ parseMetrics, histogram, quantile, total }) => {"
        ' const text = [\'x_bucket{kind="a",le="0.1"} 0\', \'x_bucket{kind="a",le="0.2"} 10\','
        ' \'x_bucket{kind="a",le="0.4"} 20\', \'x_bucket{kind="a",le="+Inf"} 20\', \'x_count{kind="a"} 20\'];'
        " const one = parseMetrics(text.join('\\n'));"
        " const both = parseMetrics(text.concat(text.map((line) => line.replace('\"a\"', '\"b\"'))).join('\\n'));"
        " return [quantile(histogram(one, 'x'), 0.5), quantile(histogram(one, 'x'), 0.75),"
        " quantile(histogram(one, 'x', one), 0.5), quantile(histogram(one, 'none'), 0.5),"
        " histogram(both, 'x', one).map((each) => each[1]), total(both, 'x_count')]; })"
    )
    assert found[:4] == [0.2, pytest.approx(0.3), None, None]
    assert found[4:] == [[0, 10, 20, 20], 40]


def test_the_percentiles_are_shown(operator: ChatPage) -> None:
    rows = operator.run(
        "return [...document.querySelectorAll('#latency tbody tr')].map((row) => row.innerText.split('\\t'))"
    )
    assert [row[0] for row in rows] == [
        "First token", "Per output token", "Whole request", "In the queue", "One step of the agents",
    ]  # fmt: skip
    assert all(len(row) == 7 for row in rows)


def test_why_a_request_was_slow(operator: ChatPage) -> None:
    request_id = operator.engine.submitted[-1].request_id
    operator.click(f"[data-request='{request_id}']")
    assert operator.text("#why-title") == f"Why was {request_id} slow?"
    assert operator.text("#why-text") == "The request spent 64 ms (50 %) waiting for the client to read the response."
    rows = operator.run(
        "return [...document.querySelectorAll('#why-parts tbody tr')].map((row) => row.innerText.split('\\t'))"
    )
    assert rows[1] == ["Queue", "2 ms", "2"]
    assert rows[4] == ["Preempted", "16 ms", "13"]
    more = operator.text("#why-more")
    assert "tried 5 times to start the request and could not, for 1.5 ms. The KV cache had too few free blocks." in more
    assert "The request waited for cmpl-other." in more
    widths = operator.run("return [...document.querySelectorAll('#why-bar span')].map((one) => one.className)")
    assert widths == ["tokenise", "queue", "prefill", "decode", "preempted", "swapped", "delivery"]
    assert operator.run("return document.activeElement.id") == "why-title"
    operator.click("#why-close")
    assert operator.run("return document.activeElement.dataset.request") == request_id


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ("queue", "The request spent 900 ms (90 %) in the queue. Every batch row was in use."),
        ("prefill", "The request spent 900 ms (90 %) in the prefill of 7 prompt tokens in 2 chunks. 3 of the tokens"),
        ("preempted", "The request lost 900 ms (90 %) to 4 preemptions: other requests took its blocks,"),
        ("restarted", "The request lost 900 ms (90 %) because an agent restarted"),
    ],
)
def test_the_sentence_names_the_largest_part(operator: ChatPage, part: str, sentence: str) -> None:
    receipt = {
        "parts_ms": {"decode": 100, part: 900}, "prompt_tokens": 7, "cached_tokens": 3, "output_tokens": 5,
        "prefill_chunks": 2, "preemptions": 4, "swaps": 0, "blocked": [{"reason": "rows", "times": 1, "ms": 5}],
    }  # fmt: skip
    script = "return import('/static/js/operator/reasons.js').then((module) => module.whySlow(receipt))"
    assert operator.run("const receipt = arguments[0]; " + script, receipt).startswith(sentence)


def test_filters_show_a_part_of_the_requests(operator: ChatPage) -> None:
    rows = "document.querySelectorAll('#requests [data-request]').length"
    assert operator.run(f"return {rows}") == 2
    operator.click("[data-filter=queued]")
    assert operator.text("#requests tbody") == "There are no requests."
    assert operator.run("return document.querySelector('[data-filter=queued]').getAttribute('aria-pressed')") == "true"
    operator.click("[data-filter=slow]")
    assert operator.run(f"return {rows}") == 1


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_axe_has_no_serious_findings(operator: ChatPage, colours: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": colours}]
    operator.browser.command("Emulation.setEmulatedMedia", features=features)
    operator.click("#requests .id")
    assert findings(operator) == []


def test_a_phone_has_no_sideways_scrolling(operator: ChatPage) -> None:
    operator.phone()
    operator.click("#requests .id")
    assert operator.run("return document.documentElement.scrollWidth") <= 375


def test_chinese(operator: ChatPage) -> None:
    operator.run("const e = document.getElementById('language'); e.value = 'zh'; e.dispatchEvent(new Event('change'))")
    assert operator.text("#name") == "运维：fake-llama"
    operator.click("#requests .id")
    assert operator.text("#why-text") == "64 ms（50 %）用于等待客户端读取响应。"


@pytest.fixture
def recorded(page: ChatPage, tmp_path: Path) -> Iterator[ChatPage]:
    """Opens the page for operators of a server with a flight recording. The recorded request was computed in chunks and
    preempted.
    """
    with running(page.engine, recordings_folder=str(tmp_path / "flight")) as server:
        request_id = server.post("/v1/completions", {"prompt": "a"}).json()["id"]
        record_requests(tmp_path / "flight", request_id)
        page.server = server
        page.open("/operator")
        page.click("#requests .id")
        page.wait("document.querySelectorAll('#timeline tbody tr').length > 0")
        yield page


TIMELINE = "return [...document.querySelectorAll('#timeline tbody tr')].map((row) => row.innerText.split('\\t'))"


def test_the_timeline_shows_phases_and_chunks_in_order(recorded: ChatPage, tmp_path: Path) -> None:
    expected = find_timeline(tmp_path / "flight", recorded.engine.submitted[-1].request_id)
    assert expected is not None
    rows = recorded.run(TIMELINE)
    names = [row[0].strip() for row in rows]
    assert len(rows) == len(expected["spans"]) + len(expected["chunks"])
    assert names.count("Preempted") == [span["phase"] for span in expected["spans"]].count("preempted") > 0
    assert names.count("Chunk of the prompt") == len(expected["chunks"]) > 1
    assert names[0] == "Queue"
    assert names.index("Prefill") < names.index("Preempted")
    chunk = expected["chunks"][0]
    detail = (
        f"{chunk['tokens']} tokens, in a step of {chunk['step_tokens']} tokens for {chunk['step_requests']} requests"
    )
    assert detail in [row[3] for row in rows]
    assert any(row[3].startswith(f"{expected['decode_steps']['count']} steps, ") for row in rows)
    phases = recorded.run("return [...document.querySelectorAll('#timeline-bar span')].map((one) => one.className)")
    assert phases == ["queue" if one["phase"] == "queued" else one["phase"] for one in expected["spans"]]
    assert recorded.text("#timeline-note") == "From the flight recorder. Times count from the arrival in the queue."


def test_the_timeline_is_in_chinese_and_accessible(recorded: ChatPage) -> None:
    assert findings(recorded) == []
    recorded.run("const e = document.getElementById('language'); e.value = 'zh'; e.dispatchEvent(new Event('change'))")
    recorded.wait("document.getElementById('timeline').innerText.includes('提示的一块')")
    assert recorded.text("#timeline-title") == "时间线"
    recorded.phone()
    assert recorded.run("return document.documentElement.scrollWidth") <= 375


def test_a_request_that_is_not_recorded_says_so(operator: ChatPage) -> None:
    operator.click("#requests .id")
    operator.wait("document.getElementById('timeline-note').innerText.includes('flight_recorder_mib is 0')")
    assert operator.run("return document.getElementById('timeline-bar').hidden")


@pytest.fixture
def guarded(page: ChatPage, tmp_path: Path) -> Iterator[HttpServer]:
    with running(page.engine, access_for(tmp_path, "alice", "root admin")) as server:
        yield server


def test_only_a_key_with_admin_sees_anything(page: ChatPage, guarded: HttpServer) -> None:
    page.expected = ("401", "403")
    guarded.http.post("/v1/completions", json={"prompt": "a"}, headers=bearer("alice"))
    page.server = guarded
    page.open("/operator")
    assert page.text("#problem") == "The server needs an API key that has the right “admin”. Enter the key above."
    page.browser.type("#key", secret_of("alice") + "\ue007")
    page.wait("document.getElementById('problem').innerText.includes('may not administrate')")
    assert page.count("#requests [data-request]") == 0
    page.run("document.getElementById('key').value = ''")
    page.browser.type("#key", secret_of("root") + "\ue007")
    page.wait("document.querySelectorAll('#requests [data-request]').length === 1")
    assert page.run("return document.getElementById('problem').hidden")
