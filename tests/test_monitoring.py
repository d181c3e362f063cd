"""Tests the Grafana dashboard and the Prometheus alerts of deploy/: their metrics exist, and Prometheus runs them."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from support.server_process import running_server
from support.small_configs import REPOSITORY
from support.time_limits import time_limit
from tools.reference.metrics import metrics_page

DASHBOARD = json.loads((REPOSITORY / "deploy/grafana/llm-serving.json").read_text())
SETTINGS = yaml.safe_load((REPOSITORY / "deploy/prometheus/prometheus.yaml").read_text())
ALERTS = [
    rule
    for group in yaml.safe_load((REPOSITORY / "deploy/prometheus/alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
PANELS = [
    (panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel.get("targets", ())
]
QUERIES = [*PANELS, *((rule["alert"], rule["expr"]) for rule in ALERTS)]
EMPTY = {"llm_serving_requests_refused_total", "llm_serving_access_refused_total"}
"""Metrics without a series until the first refusal."""
OPTIONAL = ("llm_serving_nodes", "llm_serving_hand_over", "llm_serving_kv_tier_", "llm_serving_model_")
OPTIONAL += ("llm_serving_pool_",)
"""Beginnings of the names of metrics that a server without nodes, roles, KV tiers, further models and pools of replicas
does not have.
"""

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed: apt-get install prometheus"
)


def names_of(query: str) -> set[str]:
    """Returns the names of the metrics in a query."""
    return set(re.findall(r"\b(?:llm_serving|process)_\w+", query))


def documented() -> dict[str, set[str]]:
    """Returns the labels of every series of the server by its name."""
    series: dict[str, set[str]] = {}
    for name, kind, labels in re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \|", metrics_page(), re.MULTILINE):
        found = set(re.findall(r"`(\w+)`", labels))
        if kind == "histogram":
            series |= {f"{name}_bucket": found | {"le"}, f"{name}_sum": found, f"{name}_count": found}
        else:
            series[name] = found
    return series


def test_every_metric_and_label_exists() -> None:
    series = documented()
    assert len(QUERIES) > 40
    for title, query in QUERIES:
        names = names_of(query)
        assert names <= series.keys(), f"{title}: {names - series.keys()} is not in docs/metrics.md"
        for name, selector in re.findall(r"\b((?:llm_serving|process)_\w+)\{(.*?)\}", query):
            labels = set(re.findall(r"(\w+)=~?\"", selector)) - {"instance"}
            assert labels <= series[name], f"{title}: {name} has no label {labels - series[name]}"


def test_the_dashboard_shows_queue_requests_and_replicas_of_each_pool() -> None:
    shown = {name for _, query in PANELS if "by (instance, pool)" in query for name in names_of(query)}
    parts = ("requests_waiting", "requests_running", "replicas_ready")
    assert shown == {f"llm_serving_pool_{part}" for part in parts}


def test_a_wrong_metric_is_found() -> None:
    assert not names_of("rate(llm_serving_no_such_total[5m])") <= documented().keys()


def test_the_alerts_are_documented() -> None:
    text = (REPOSITORY / "docs/observability.md").read_text()
    assert [rule["alert"] for rule in ALERTS if f"`{rule['alert']}`" not in text] == []


class Prometheus:
    """A Prometheus process that scrapes one server every second."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **parameters: str) -> Any:
        """Returns the ``data`` of a reply of the HTTP API."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=time_limit(20)) as reply:
            answer = json.load(reply)
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, query: str) -> list[dict[str, Any]]:
        """Returns the series of an instant query."""
        result: list[dict[str, Any]] = self.get("query", query=query)["result"]
        return result

    def wait_for(self, query: str) -> None:
        """Waits until a query has a result."""
        end = time.monotonic() + time_limit(60)
        while time.monotonic() < end:
            try:
                if self.query(query):
                    return
            except (urllib.error.URLError, ConnectionError):
                pass  # Prometheus does not listen yet
            time.sleep(0.2)
        raise AssertionError(f"{query} has no result")


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Provides a Prometheus with the files of deploy/. It scrapes a real server that has served requests."""
    folder = tmp_path_factory.mktemp("prometheus")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with running_server(folder, ["telemetry_config.vllm_metric_names=true"]) as server:
        settings = json.loads(json.dumps(SETTINGS))
        settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        settings["scrape_configs"][0]["static_configs"][0]["targets"] = [server.url.removeprefix("http://")]
        shutil.copy(REPOSITORY / "deploy/prometheus/alerts.yaml", folder)
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(settings))
        program = subprocess.Popen(
            ["prometheus", f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data",
             f"--web.listen-address=127.0.0.1:{port}"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            one = Prometheus(f"http://127.0.0.1:{port}")
            one.wait_for('up{job="llm-serving"} == 1')
            for stream in (True, False):
                body = {"model": "llama_tiny", "prompt": "a b", "max_tokens": 4, "stream": stream, "ignore_eos": True}
                request = urllib.request.Request(
                    f"{server.url}/v1/completions",
                    json.dumps(body).encode(),
                    {"Content-Type": "application/json", "X-TTFT-Objective-Ms": "60000"},
                )
                with urllib.request.urlopen(request, timeout=time_limit(60)) as reply:
                    reply.read()
            one.wait_for('llm_serving_requests_finished_total{reason="length"} >= 2')
            one.wait_for("count_over_time(llm_serving_steps_total[1m]) > 3")
            yield one
        finally:
            program.terminate()
            program.wait(time_limit(30))


@needs_prometheus
def test_prometheus_runs_every_query(prometheus: Prometheus) -> None:
    for title, query in QUERIES:
        query = query.replace("$__rate_interval", "1m").replace("$instance", ".+")
        try:
            prometheus.query(query)
        except urllib.error.HTTPError as error:
            pytest.fail(f"{title}: Prometheus refuses {query}: {error}")
        for name in names_of(query) - EMPTY:
            if name.startswith(OPTIONAL):
                continue
            assert prometheus.query(name), f"{title}: the server has no series {name}"


@needs_prometheus
def test_prometheus_loads_the_alerts_and_none_fires(prometheus: Prometheus) -> None:
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert [rule["name"] for rule in rules] == [rule["alert"] for rule in ALERTS]
    assert [rule["name"] for rule in rules if rule["health"] == "err"] == []
    assert prometheus.query('ALERTS{alertstate="firing"}') == []


@needs_prometheus
def test_prometheus_reads_the_names_of_vllm(prometheus: Prometheus) -> None:
    [series] = prometheus.query("vllm:e2e_request_latency_seconds_count")
    assert series["metric"]["engine"] == "0"
    assert float(series["value"][1]) >= 2
