"""Tests the self-checks of a real server whose agents or weights are wrong. Only the affected requests fail."""

from __future__ import annotations

import json
import shutil
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.recorded import RecordProperty
from support.server_process import ServerProcess, running_server
from support.small_configs import REPOSITORY
from support.time_limits import time_limit

BAD_TOKEN = 300
BFLOAT16_NAN = b"\xc0\x7f"
GOOD = {"prompt": [1, 310, 320, 330], "max_tokens": 60, "temperature": 0, "ignore_eos": True}
BAD = GOOD | {"prompt": [1, 310, BAD_TOKEN, 330]}
TABLES = {"fused": [], "native": ["model_config.op_table=native", "model_config.model_dtype=bfloat16"]}


def wait_for(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + time_limit(60)
    while not condition():
        assert time.monotonic() < until, f"not seen: {what}"
        time.sleep(0.05)


def metric(server: ServerProcess, name: str) -> float:
    return sum(
        float(line.split()[-1]) for line in server.get_text("/metrics").splitlines() if line.startswith(f"{name} ")
    )


def folder_with_nan(folder: Path, model: Path) -> Path:
    """Makes a copy of ``model``, a tiny model, that has a NaN in the embedding of ``BAD_TOKEN``.

    Only sequences with this token get logits that are NaN. The tiny model's output layer is its embedding, so the copy
    has a separate, correct output layer.
    """
    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8:start]), bytearray(content[start:])
    embedding = header["model.embed_tokens.weight"]
    assert embedding["dtype"] == "BF16"
    begin, end = embedding["data_offsets"]
    header["lm_head.weight"] = embedding | {"data_offsets": [len(data), len(data) + end - begin]}
    data += data[begin:end]
    place = begin + 2 * BAD_TOKEN * embedding["shape"][1]
    data[place : place + 2] = BFLOAT16_NAN
    packed = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(packed)) + packed + data)
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return folder


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["text"]
    return text


@pytest.mark.parametrize("table", TABLES)
def test_logits_that_are_not_finite_end_their_request_only(
    table: str, tmp_path: Path, shallow_model: Path, record_property: RecordProperty
) -> None:
    """Two requests get logits that are NaN, one after the other, while four other requests run.

    A step with both of them and no other request would restart the agent, as the next test checks.
    """
    model = folder_with_nan(tmp_path / "model", shallow_model)
    overrides = [f"model_config.model_path={model}", "scheduler_config.prefix_cache=true", *TABLES[table]]
    with running_server(tmp_path / "server", overrides) as server:
        expected = text_of(server.post("/v1/completions", GOOD))
        started = threading.Barrier(5)

        def good(number: int) -> str:
            started.wait()
            return text_of(server.post("/v1/completions", GOOD | {"user": str(number)}))

        def bad(kinds: list[dict[str, Any]]) -> list[dict[str, Any]]:
            started.wait()
            return [server.post("/v1/completions", BAD | settings) for settings in kinds]

        kinds: list[dict[str, Any]] = [{}, {"temperature": 1, "repetition_penalty": 1.2, "logprobs": 2}]
        with ThreadPoolExecutor(5) as pool:
            neighbours = [pool.submit(good, number) for number in range(4)]
            failures = pool.submit(bad, kinds)
        texts = [each.result() for each in neighbours]
        record_property("changed_neighbours", f"{sum(text != expected for text in texts)} of {len(texts)}")
        assert texts == [expected] * 4
        for answer in failures.result():
            assert (answer["status"], answer["error"]["code"]) == (500, "logits_not_finite")
        assert text_of(server.post("/v1/completions", GOOD)) == expected
        assert metric(server, "llm_serving_sequences_not_finite_total") == 2
        assert sum(len(line["requests"]) for line in server.events("logits_not_finite")) == 2
        assert server.events("agent_lost") == []
        assert server.get("/server_info")["engine"]["agents"][0]["restarts"] == 0


def test_agents_without_finite_logits_are_restarted(tmp_path: Path, shallow_model: Path) -> None:
    """Two sequences of one request usually run in one step, and both get logits that are not finite.

    Sometimes the second sequence arrives too late for this step. Then the test sends the request again.
    """
    model = folder_with_nan(tmp_path / "model", shallow_model)
    with running_server(tmp_path / "server", [f"model_config.model_path={model}"]) as server:

        def has_failed_together() -> bool:
            """Returns whether both sequences of the request failed in the same step.

            The request ends when its first sequence fails. If the second sequence starts later, it is aborted and not
            logged.
            """
            before = len(failures())
            answer = server.post("/v1/completions", BAD | {"n": 2, "temperature": 1})
            assert answer["error"]["code"] == "logits_not_finite"
            wait_for(lambda: len(failures()) > before, "the log event")
            server.wait_until_idle()
            return any(event["sequences"] == 2 for event in failures())

        def failures() -> list[dict[str, Any]]:
            return server.events("logits_not_finite")

        wait_for(has_failed_together, "a step with both sequences")
        wait_for(lambda: len(server.events("agent_ready")) == 2, "the restart")
        (failed,) = server.events("self_check_failed")
        assert (failed["check"], "no sequence with finite logits, of 2" in failed["message"]) == ("logits", True)
        assert any(Path(failed["recording"]).iterdir())
        assert metric(server, 'llm_serving_self_checks_total{check="logits",result="failed"}') == 1
        assert text_of(server.post("/v1/completions", GOOD))


@pytest.mark.parametrize("overrides", [*TABLES.values(), ["parallel_config.tensor_parallel=2"]], ids=str)
def test_a_row_with_other_bits_alone_restarts_the_agents(
    overrides: list[str], tmp_path: Path, shallow_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row check computes a sequence of a batch again, alone. If its bits differ, the agents are restarted.

    The requests are computed again and give the same text.
    """
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "tests/support/faulty_agent"))
    monkeypatch.setenv("FAULTY_AGENT_FILE", str(tmp_path / "fault"))
    settings = [
        "serving_config.row_check_interval=5", "serving_config.agent_ports=[0]",
        "speculative_config.method=off",  # so that a text has a step for each token
        f"model_config.model_path={shallow_model}", *overrides,
    ]  # fmt: skip
    with running_server(tmp_path / "server", settings) as server, ThreadPoolExecutor(3) as pool:
        prompts = [GOOD | {"prompt": [1, 310, number], "max_tokens": 150} for number in (300, 301, 302)]
        expected = list(pool.map(lambda body: text_of(server.post("/v1/completions", body)), prompts))
        passed = metric(server, 'llm_serving_self_checks_total{check="row",result="passed"}')
        # Every fifth decode step is checked. A text has at most 149 decode steps, because the prefill samples its first
        # token.
        assert passed >= 149 // 5
        assert server.events("agent_lost") == []
        (tmp_path / "fault").touch()
        pending = [pool.submit(server.post, "/v1/completions", body) for body in prompts]
        wait_for(lambda: bool(server.events("self_check_failed")), "the failed check")
        (tmp_path / "fault").unlink()
        assert [text_of(each.result()) for each in pending] == expected
        failed = server.events("self_check_failed")[0]
        assert (failed["check"], isinstance(failed["step"], int)) == ("row", True)
        assert "has other logits in step" in failed["message"]
        assert any(Path(failed["recording"]).iterdir())
        assert metric(server, 'llm_serving_self_checks_total{check="row",result="failed"}') >= 1
        assert json.dumps(server.get("/server_info")["engine"]["agents"][0]["restarts"]) != "0"


def test_the_canary_runs_at_the_start_and_finds_wrong_tokens(
    tmp_path: Path, shallow_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent begins to compute wrong logits after its start.

    The next run of the canary detects them and restarts the agent. The run after the restart passes.
    """
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "tests/support/faulty_agent"))
    monkeypatch.setenv("FAULTY_AGENT_FILE", str(tmp_path / "fault"))
    monkeypatch.setenv("FAULTY_AGENT", "other_tokens")
    settings = ["serving_config.canary_interval_s=1", "serving_config.row_check_interval=0"]
    settings += [f"model_config.model_path={shallow_model}"]
    with running_server(tmp_path / "server", settings) as server:
        passed = 'llm_serving_self_checks_total{check="canary",result="passed"}'
        wait_for(lambda: metric(server, passed) >= 2, "the first runs")
        assert server.events("request_arrival") == []
        (tmp_path / "fault").touch()
        wait_for(lambda: bool(server.events("self_check_failed")), "the failed run")
        (tmp_path / "fault").unlink()
        before = metric(server, passed)
        wait_for(lambda: metric(server, passed) > before, "a run after the restart")
        failed = server.events("self_check_failed")[0]
        assert (failed["check"], failed["step"]) == ("canary", None)
        assert "its first run got" in failed["message"]
        assert server.get("/server_info")["engine"]["agents"][0]["restarts"] >= 1


def test_an_agent_that_is_wrong_from_the_start_of_its_server_is_found(
    tmp_path: Path, shallow_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first server stores the tokens of the canary. The agent of the second server is wrong from its start.

    The third server has another weight format, so its tokens have a file of their own.
    """
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "tests/support/faulty_agent"))
    monkeypatch.setenv("FAULTY_AGENT_FILE", str(tmp_path / "fault"))
    monkeypatch.setenv("FAULTY_AGENT", "other_tokens")
    settings = [
        "serving_config.canary_interval_s=1", "serving_config.row_check_interval=0",
        f"model_config.weight_cache_path={tmp_path / 'cache'}", f"model_config.model_path={shallow_model}",
    ]  # fmt: skip
    passed = 'llm_serving_self_checks_total{check="canary",result="passed"}'
    with running_server(tmp_path / "first", settings) as server:
        wait_for(lambda: metric(server, passed) >= 1, "the first run")
        wait_for(lambda: bool(list((tmp_path / "cache/canary").glob("*.json"))), "the stored tokens")
    [stored] = (tmp_path / "cache/canary").iterdir()
    (tmp_path / "fault").touch()
    with running_server(tmp_path / "second", settings) as server:
        wait_for(lambda: bool(server.events("self_check_failed")), "the failed first run")
        (tmp_path / "fault").unlink()
        wait_for(lambda: metric(server, passed) >= 1, "a run of the new agents")
        failed = server.events("self_check_failed")[0]
        assert failed["check"] == "canary"
        assert f"in {stored}" in failed["message"]
        assert any(Path(failed["recording"]).iterdir())
        assert metric(server, 'llm_serving_self_checks_total{check="canary",result="failed"}') >= 1
        assert server.get("/server_info")["engine"]["agents"][0]["restarts"] >= 1
    with running_server(tmp_path / "third", [*settings, "model_config.weight_format=int8"]) as server:
        wait_for(lambda: metric(server, passed) >= 1, "the first run with other weights")
        assert server.events("self_check_failed") == []
