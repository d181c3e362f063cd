"""Serves two models with one server: a trained Llama and a seeded Qwen2, whose tokens are known from transformers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from performance.models.folders import write_model
from performance.models.variants import FAMILY_VARIANTS
from support.golden_files import golden_of
from support.processes import has_ended
from support.server_process import ServerProcess, running_server
from support.time_limits import time_limit

SECOND = "qwen2_tied"
GOLDEN = golden_of(SECOND)["cases"]
PROMPTS = [f"The {word} went to the" for word in ("fox", "boy", "bird", "old man", "queen", "cat")]
SETTINGS = ["pa_config.num_blocks=160", "model_config.decode_batch_size=[8]", "serving_config.canary_interval_s=0"]


def entry(folder: Path) -> str:
    return f'models_config.models=[{{name: second, config: llama_tiny_cpu.yaml, model: "{folder}", set: {SETTINGS}}}]'


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "second"
    write_model(FAMILY_VARIANTS[SECOND], folder)
    return folder


@pytest.fixture(scope="module")
def both(second: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("both"), [entry(second)]) as running:
        yield running


def story(server: ServerProcess, prompt: str, **fields: object) -> str:
    body = {"model": "llama_tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0, **fields}
    reply = server.post("/v1/completions", body)
    assert "choices" in reply, reply
    text: str = reply["choices"][0]["text"]
    return text


def tokens(server: ServerProcess, prompt: str) -> list[int]:
    """Returns 64 tokens of the second model."""
    body = {"model": "second", "prompt": prompt, "max_tokens": 64, "temperature": 0, "ignore_eos": True}
    reply = server.post("/v1/completions", {**body, "return_token_ids": True})
    assert "choices" in reply, reply
    found: list[int] = reply["choices"][0]["token_ids"]
    return found


def golden_holds(server: ServerProcess) -> bool:
    return all(tokens(server, case["prompt"]) == case["tokens"] for case in GOLDEN)


def state(server: ServerProcess, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in server.get("/v1/models")["data"] if one["id"] == name)
    return found


def engine_of(server: ServerProcess, name: str) -> dict[str, Any]:
    """Returns the figures of the engine of a model that serves."""
    model = next(each for each in server.get("/server_info")["models"] if each["name"] == name)
    engine: dict[str, Any] = model["engine"]
    return engine


def agent_of(server: ServerProcess, name: str) -> psutil.Process:
    """Returns the agent of a model that serves."""
    [agent] = engine_of(server, name)["agents"]
    return psutil.Process(agent["pid"])


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + time_limit(60)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Load:
    """Requests for one model in several threads, until the ``with`` block ends. Keeps every text."""

    def __init__(self, ask: Callable[[int], object]) -> None:
        self.answers: list[tuple[int, object]] = []
        self._ask = ask
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(3)

    def __enter__(self) -> Load:
        self._futures = [self._pool.submit(self._run, number) for number in range(3)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for future in self._futures:
            future.result()
        self._pool.shutdown()

    def _run(self, number: int) -> None:
        while not self._stop.is_set():
            self.answers.append((number, self._ask(number)))
            number += 3


def test_the_second_model_starts_for_the_first_request_while_the_main_one_serves(
    both: ServerProcess, server: ServerProcess
) -> None:
    """Both models give the same tokens alone and while requests for both run."""
    expected = [story(server, prompt) for prompt in PROMPTS]
    assert state(both, "second")["state"] == "cold"
    with Load(lambda number: story(both, PROMPTS[number % len(PROMPTS)])) as load:
        assert golden_holds(both)
    assert state(both, "second")["state"] == "ready"
    assert load.answers
    for number, text in load.answers:
        assert text == expected[number % len(PROMPTS)]


def test_every_api_chooses_the_model_by_name(both: ServerProcess) -> None:
    short = {"max_tokens": 4, "temperature": 0}
    chat = {"messages": [{"role": "user", "content": "t1 t2"}]}
    for path, body in (
        ("/v1/completions", {"prompt": "t1 t2", **short}),
        ("/tokenize", {"prompt": "t1 t2"}),
        ("/v1/chat/completions", {**chat, **short}),
        ("/v1/messages", {**chat, **short}),
        ("/v1/responses", {"input": "t1 t2", "max_output_tokens": 4}),
    ):
        assert both.post(path, {**body, "model": "third"})["status"] == 404
        assert not both.post(path, {**body, "model": "llama_tiny"}).get("error"), path
    assert both.post("/tokenize", {"model": "second", "prompt": "t1 t2"})["tokens"] != both.post(
        "/tokenize", {"model": "llama_tiny", "prompt": "t1 t2"}
    )["tokens"]
    answer = both.post("/v1/completions", {"model": "second", "prompt": "t1 t2", **short})
    assert answer["model"] == "second"
    refused = both.post("/v1/chat/completions", {"model": "second", **chat, **short})
    assert "template" in refused["error"]["message"], "the second model has no chat template, the main one has"
    body = {"text_input": "t1 t2", "parameters": {"max_tokens": 4, "temperature": 0}}
    assert both.post("/v2/models/second/generate", body)["model_name"] == "second"
    assert both.get("/v2/models/second/ready")["ready"] is True
    assert both.post("/v2/models/third/generate", body)["status"] == 404
    scores = both.post("/v1/embeddings", {"model": "second", "input": "t1"})
    assert scores["error"]["code"] == "unsupported_task"
    assert state(both, "second")["max_model_len"] == 512
    assert both.post("/v1/models/third/load", {})["status"] == 404


def test_sleep_returns_the_memory_and_a_request_wakes_the_model(both: ServerProcess) -> None:
    assert golden_holds(both)
    agent = agent_of(both, "second")
    reply = both.post("/v1/models/second/sleep", {})
    assert (reply["state"], reply["memory_bytes"]) == ("sleeping", 0)
    assert has_ended(agent)
    assert reply["wake_seconds"] > 0
    late = both.post("/v1/completions", {"model": "second", "prompt": "t1", "deadline_ms": 1})
    assert late["status"] in (503, 504)
    assert state(both, "second")["state"] == "sleeping"
    assert golden_holds(both)
    assert both.post("/v1/models/second/unload", {})["state"] == "cold"
    assert both.post("/v1/models/second/load", {})["state"] == "ready"
    refused = both.post("/v1/models/llama_tiny/sleep", {})
    assert (refused["status"], refused["error"]["code"]) == (409, "model_state")


def test_the_loss_of_one_agent_leaves_the_other_model_alone(both: ServerProcess) -> None:
    main = agent_of(both, "llama_tiny")
    assert golden_holds(both)
    with Load(lambda number: story(both, PROMPTS[number % len(PROMPTS)])) as load:
        victim = agent_of(both, "second")
        victim.suspend()  # while the agent is suspended, the request for the second model cannot complete
        with ThreadPoolExecutor(1) as pool:
            lost = pool.submit(tokens, both, GOLDEN[0]["prompt"])
            wait_until(lambda: engine_of(both, "second")["running"] == 1)
            victim.kill()
            assert lost.result() == GOLDEN[0]["tokens"], "the request was computed again by the restarted agent"
        assert golden_holds(both)
    assert load.answers
    assert agent_of(both, "llama_tiny").pid == main.pid
    assert {event.get("model") for event in both.events("agent_lost")} == {"second"}


def test_reload_under_load_fails_no_request_and_uses_the_new_weights(both: ServerProcess, second: Path) -> None:
    """The test replaces the weights in the folder, and later restores them. No request uses a cached prefix of other
    weights.
    """
    assert golden_holds(both), "the second model serves, also without the earlier tests"
    main = agent_of(both, "llama_tiny").pid
    case = GOLDEN[0]
    write_model(replace(FAMILY_VARIANTS[SECOND], seed=77), second)
    with Load(lambda _: tokens(both, case["prompt"])) as load:
        time.sleep(0.2)
        assert both.post("/v1/models/second/reload", {})["state"] == "ready"
        other = tokens(both, case["prompt"])
    assert other != case["tokens"]
    assert {tuple(found) for _, found in load.answers} <= {tuple(case["tokens"]), tuple(other)}  # type: ignore[arg-type]
    write_model(FAMILY_VARIANTS[SECOND], second)
    wait_until(lambda: "status" not in both.post("/v1/models/second/reload", {}))
    assert golden_holds(both)
    assert agent_of(both, "llama_tiny").pid == main
    assert len(both.events("model_reloaded")) == 2


def test_the_main_model_is_reloaded_under_load(both: ServerProcess, server: ServerProcess) -> None:
    assert golden_holds(both), "the second model serves, also without the earlier tests"
    expected = [story(server, prompt) for prompt in PROMPTS]
    first = agent_of(both, "llama_tiny").pid
    with Load(lambda number: story(both, PROMPTS[number % len(PROMPTS)])) as load:
        assert both.post("/v1/models/llama_tiny/reload", {})["state"] == "ready"
    assert load.answers
    for number, text in load.answers:
        assert text == expected[number % len(PROMPTS)]
    wait_until(lambda: not psutil.pid_exists(first))
    assert story(both, PROMPTS[0]) == expected[0]
    assert both.get("/health/ready")["ready"] is True
    metrics = both.get_text("/metrics")
    assert 'llm_serving_model_reloads_total{model="llama_tiny"} 1.0' in metrics
    assert 'llm_serving_model_state{model="second",state="ready"} 1.0' in metrics


def test_models_that_do_not_fit_together_take_turns(second: Path, tmp_path: Path) -> None:
    """The limit permits the main model and one other model. A request for a third model puts the idle one to sleep."""
    models = entry(second).removesuffix("]") + f", {{name: third, config: llama_tiny_cpu.yaml, set: {SETTINGS}}}]"
    with running_server(tmp_path, [models, f"models_config.memory_limit={1400 * 2**20}"]) as server:
        assert golden_holds(server)
        text = server.post("/v1/completions", {"model": "third", "prompt": PROMPTS[0], "max_tokens": 8})
        assert "choices" in text
        assert (state(server, "second")["state"], state(server, "third")["state"]) == ("sleeping", "ready")
        assert golden_holds(server)
        assert state(server, "third")["state"] == "sleeping"
