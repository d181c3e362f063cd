"""Tests the comparison of batching modes with a scripted server: closed loop, table, JSON, and equal texts."""

import json
import threading
from pathlib import Path

import pytest

from performance.load.closed_loop import run_closed_loop
from performance.load.endpoint import Endpoint
from performance.load.options import LoadOptions
from performance.load.statistics import measure
from performance.load.watches import read_metrics
from performance.load.workload import study_workload
from performance.simulation.batching import MODES, main, mode_settings
from support.fake_openai_server import Reply, fake_openai_server

TESTS = Path(__file__).resolve().parents[1]
STAND_IN = """
import sys
import time

sys.path.insert(0, {tests!r})
from support.fake_openai_server import Reply, fake_openai_server

mode = next(text for text in sys.argv if text.startswith("model_config.batching_strategy="))
slow = 0.06 if mode.endswith("=dynamic") else 0.02
tokens = 5 if {differ!r} and mode.endswith("=dynamic") else 4
with open({record!r}, "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
with fake_openai_server(lambda *_: Reply(tokens=tokens, first_s=slow)) as server:
    print(f"ready http://127.0.0.1:{{server.port}}", flush=True)
    time.sleep(60)
"""


def stand_in(folder: Path, differ: bool = False) -> Path:
    program = folder / "stand_in.py"
    program.write_text(STAND_IN.format(tests=str(TESTS), record=str(folder / "record"), differ=differ))
    return program


def test_the_number_of_running_requests_is_the_number_of_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("performance.load.client.fetch_metrics", lambda *_: {})  # it would open more connections
    monkeypatch.setattr("performance.load.http_client.MAX_IDLE_S", 60.0)  # keeps idle connections on a slow machine
    under_way: list[int] = []

    def script(number: int, body: dict[str, object]) -> Reply:
        under_way.append(server.open_connections)
        return Reply(tokens=3, first_s=0.01)

    requests = study_workload(25, 0, (2, 4), (3, 5), 100)
    with fake_openai_server(script) as server:
        run = run_closed_loop(LoadOptions(Endpoint("127.0.0.1", server.port), keep_text=True), requests, clients=4)
        # One additional connection asks for the name of the model.
        assert (len(server.requests), server.connections) == (25, 4 + 1)
    figures = measure(run)
    assert (figures.requests, figures.failed, max(under_way)) == (25, 0, 4)
    assert {tuple(body["prompt"]) for body in server.requests} == {each.token_ids for each in requests}
    assert [record.index for record in run.records] == list(range(25))
    assert {record.text for record in run.records} == {" token0 token1 token2"}
    ends = sorted(record.end or 0.0 for record in run.records)
    assert all(record.due >= ends[record.index - 4] for record in run.records[4:])


def test_a_run_with_fewer_requests_than_clients_ends() -> None:
    with fake_openai_server(lambda *_: Reply("status")) as server:
        requests = study_workload(3, 0, (2, 4), (3,), 100)
        run = run_closed_loop(LoadOptions(Endpoint("127.0.0.1", server.port)), requests, clients=50)
    assert [record.failure for record in run.records] == ["http 429"] * 3


def test_no_request_is_sent_after_enough_and_the_running_ones_complete() -> None:
    enough = threading.Event()

    def script(number: int, body: dict[str, object]) -> Reply:
        if number >= 4:
            enough.set()
        return Reply(tokens=3, first_s=0.01)

    with fake_openai_server(script) as server:
        requests = study_workload(1000, 0, (2, 4), (3, 5), 100)
        run = run_closed_loop(LoadOptions(Endpoint("127.0.0.1", server.port)), requests, clients=2, enough=enough)
    assert 5 <= len(run.records) < 50
    assert [record.failure for record in run.records] == [None] * len(run.records)


def test_the_workload_depends_on_the_seed_and_has_three_output_lengths() -> None:
    first, second = (study_workload(300, 4, (32, 64), (64, 128, 256), 1000) for _ in range(2))
    assert first == second != study_workload(300, 5, (32, 64), (64, 128, 256), 1000)
    assert {each.max_tokens for each in first} == {64, 128, 256}
    assert {len(each.token_ids or ()) for each in first} == set(range(32, 65))


@pytest.mark.parametrize("differ", [False, True])
def test_modes_are_measured_one_after_the_other_and_texts_are_compared(
    differ: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    arguments = ["--config", "c.yaml", "--clients", "4", "--requests", "12", "--modes", "dynamic,paged"]
    code = main([*arguments, "--set", "a.b=1", "--json", str(path)], stand_in(tmp_path, differ))
    assert code == int(differ)
    content = json.loads(path.read_text())
    assert content["texts_identical"] is not differ
    assert list(content["modes"]) == ["dynamic", "paged"]
    assert set(content["modes"]["paged"]) >= {"requests_per_s", "kv_waste"}
    rates = {mode: figures["requests_per_s"] for mode, figures in content["modes"].items()}
    assert content["ratios"]["paged/dynamic"] == pytest.approx(rates["paged"] / rates["dynamic"], rel=0.02)
    out = capsys.readouterr().out
    assert f"paged/dynamic: {content['ratios']['paged/dynamic']:.2f}" in out
    assert ("NOT the same" in out) is differ
    dynamic, paged = (tmp_path / "record").read_text().splitlines()
    assert (
        "batching_strategy=dynamic --set model_config.page_attention=false --set model_config.batch_size=16" in dynamic
    )
    assert "batching_strategy=continuous --set model_config.page_attention=true" in paged
    assert paged.endswith("--set a.b=1")


def test_a_server_that_does_not_start_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "broken.py"
    program.write_text("import sys; sys.exit('config: no such key')")
    assert main([], program) == 2
    assert "config: no such key" in capsys.readouterr().err
    assert main(["--clients", "0"], program) == 2
    assert "--clients 0: the minimum is 1" in capsys.readouterr().err


def test_settings_of_the_modes() -> None:
    assert mode_settings("none", 8, 0.5) == [
        "model_config.batching_strategy=none", "model_config.page_attention=true",
    ]  # fmt: skip
    assert mode_settings("dynamic", 8, 0.5)[2:] == ["model_config.batch_size=8", "model_config.batch_waiting_time=0.5"]
    assert list(MODES) == ["none", "static", "dynamic", "continuous", "paged"]


def test_prometheus_text_is_parsed() -> None:
    text = '# HELP a b\n# TYPE a gauge\na 0.5\nb{x="1"} 3.0\nc_total 2e3\n'
    assert read_metrics(text) == {"a": 0.5, 'b{x="1"}': 3.0, "c_total": 2000.0}
