"""Tests that a real server with LoRA adapters gives PEFT's results, with the same bits alone and among other adapters.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_serving import LLM
from llm_serving.model.shape import ModelShape
from support.lora_folders import random_adapter
from support.lora_in_numpy import NumpyLora
from support.server_process import ServerProcess, run_start_server, running_server
from support.small_configs import TINY_LLAMA
from support.sweeps import with_sweeps
from support.time_limits import time_limit

VOCAB = ModelShape.from_hf_folder(TINY_LLAMA).vocab_size
PROMPT = np.random.default_rng(3).integers(3, VOCAB, 40).tolist()
TOKENS = 12
NAMES = ("first", "second", "third")
SLOTS = ["lora_config.max_adapters=3", "lora_config.max_rank=8"]


@pytest.fixture(scope="module")
def slots(shallow_model: Path) -> list[str]:
    """Returns the settings for the shallow model with three adapter slots. Its two layers contain every kind of adapted
    matrix.
    """
    return [*SLOTS, f"model_config.model_path={shallow_model}"]


@pytest.fixture(scope="module")
def shape(shallow_model: Path) -> ModelShape:
    return ModelShape.from_hf_folder(shallow_model)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, shape: ModelShape) -> dict[str, Path]:
    """Adapters of different ranks and layers, by name."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        "first": random_adapter(root / "first", shape, seed=1),
        "second": random_adapter(root / "second", shape, seed=2, rank=8, modules=["q_proj", "v_proj", "down_proj"]),
        "third": random_adapter(root / "third", shape, seed=3, rank=1, modules=["o_proj", "gate_proj"]),
        "other": random_adapter(root / "other", shape, seed=4),
    }


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path], slots: list[str]
) -> Iterator[ServerProcess]:
    adapters = f"lora_config.adapters=['first={folders['first']}', 'second={folders['second']}']"
    with running_server(tmp_path_factory.mktemp("lora"), [*slots, adapters]) as running:
        load(running, "third", folders["third"])
        yield running
        running.wait_until_idle()


def load(server: ServerProcess, name: str, folder: Path) -> Any:
    return server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})


def complete(
    server: ServerProcess, model: str | None, prompt: list[int] = PROMPT, tokens: int = TOKENS
) -> dict[str, Any]:
    """Returns the greedy continuation of a prompt: its tokens and log-probabilities."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 1, "return_token_ids": True,
            "ignore_eos": True}  # fmt: skip
    answer = server.post("/v1/completions", body | ({} if model is None else {"model": model}))
    assert "choices" in answer, answer
    [choice] = answer["choices"]
    return {"model": answer["model"], "tokens": choice["token_ids"], "logprobs": choice["logprobs"]["token_logprobs"]}


@pytest.mark.parametrize("name", [None, *NAMES])
def test_tokens_and_log_probabilities_equal_those_of_peft(
    server: ServerProcess, folders: dict[str, Path], shallow_model: Path, name: str | None
) -> None:
    found = complete(server, name)
    tokens, logprobs = NumpyLora(shallow_model, None if name is None else folders[name]).continuation(PROMPT, TOKENS)
    assert found["tokens"] == tokens
    np.testing.assert_allclose(found["logprobs"], logprobs, atol=1e-5, rtol=1e-5)
    assert found["model"] == (name or server.get("/v1/models")["data"][0]["id"])


@pytest.mark.sweep
def test_a_program_names_an_adapter_as_its_model(
    server: ServerProcess, folders: dict[str, Path], shallow_model: Path
) -> None:
    lora = {"max_adapters": 1, "max_rank": 8, "adapters": [f"first={folders['first']}"]}
    sampling = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    with LLM(shallow_model, config="llama_tiny_cpu.yaml", lora_config=lora) as llm:
        found = [list(llm.generate(PROMPT, sampling | name)[0].token_ids) for name in ({"model": "first"}, {})]
    assert found == [complete(server, name)["tokens"] for name in ("first", None)]
    assert found[0] != found[1]


def test_the_bits_are_those_of_a_request_alone(server: ServerProcess) -> None:
    prompts = [[*PROMPT[:length], 5] for length in (1, 7, 30)]
    jobs = [(name, prompt) for prompt in prompts for name in (None, *NAMES)] * 2
    alone = [complete(server, *job) for job in jobs[: len(jobs) // 2]]
    with ThreadPoolExecutor(len(jobs)) as pool:
        together = list(pool.map(lambda job: complete(server, *job), jobs))
    assert together == alone * 2
    assert len({tuple(each["tokens"]) for each in alone}) > len(prompts)


def test_chunks_and_preemption_change_no_bit_of_quantised_layers(
    tmp_path: Path, folders: dict[str, Path], slots: list[str]
) -> None:
    adapters = ", ".join(f"'{name}={folders[name]}'" for name in NAMES)
    pressed = ["scheduler_config.max_num_batched_tokens=24", "scheduler_config.policy=chunked",
               "pa_config.num_blocks=17", "pa_config.decode_seq_length=256", "scheduler_config.prefix_cache=False",
               "model_config.weight_format=int4", "model_config.model_dtype=bfloat16"]  # fmt: skip
    jobs = [(name, [*PROMPT * (1 + index % 3), index + 3]) for index, name in enumerate([None, *NAMES] * 3)]
    with running_server(tmp_path / "server", [*slots, f"lora_config.adapters=[{adapters}]", *pressed]) as server:
        alone = [complete(server, *job, tokens=100) for job in jobs]
        with ThreadPoolExecutor(len(jobs)) as pool:
            together = list(pool.map(lambda job: complete(server, *job, tokens=100), jobs))
        preemptions = server.get("/server_info")["engine"]["preemptions"]
    assert together == alone
    assert preemptions > 0


@pytest.mark.parametrize("method", with_sweeps([("draft",), ("suffix",)], lambda method: method == "suffix"))
def test_drafts_change_no_bit_of_requests_with_adapters(
    method: str, tmp_path: Path, folders: dict[str, Path], slots: list[str], shallow_model: Path
) -> None:
    adapters = ", ".join(f"'{name}={folders[name]}'" for name in NAMES)
    settings = [*slots, f"lora_config.adapters=[{adapters}]"]
    drafts = [f"speculative_config.method={method}"]
    if method == "draft":
        drafts += [f"speculative_config.model={shallow_model}", "speculative_config.always=true"]
    jobs = [(name, [*PROMPT[:6] * (3 + index % 3), index + 3]) for index, name in enumerate([None, *NAMES] * 3)]
    with running_server(tmp_path / "plain", [*settings, "speculative_config.method=off"]) as server:
        alone = [complete(server, *job, tokens=60) for job in jobs]
    with running_server(tmp_path / "drafts", [*settings, *drafts]) as server:
        with ThreadPoolExecutor(len(jobs)) as pool:
            together = list(pool.map(lambda job: complete(server, *job, tokens=60), jobs))
        # Drafts do not fit into steps with many sequences. So a model and an adapter also run alone with drafts.
        alone_with_drafts = [complete(server, *job, tokens=60) for job in jobs[:2]]
        drafted, accepted = server.counter("draft_tokens"), server.counter("accepted_draft_tokens")
    assert together == alone
    assert alone_with_drafts == alone[:2]
    assert 0 < accepted < drafted


def test_agents_that_share_a_model_give_the_same_text_in_any_batch(
    tmp_path: Path, folders: dict[str, Path], slots: list[str], shallow_model: Path
) -> None:
    jobs = [(name, [*PROMPT[:length], 5]) for length in (7, 30) for name in (None, *NAMES)]
    shared = [*slots, "parallel_config.tensor_parallel=2", "serving_config.agent_ports=[0]"]
    with running_server(tmp_path / "server", shared) as server:
        for name in NAMES:
            load(server, name, folders[name])
        alone = [complete(server, *job) for job in jobs]
        with ThreadPoolExecutor(len(jobs)) as pool:
            together = list(pool.map(lambda job: complete(server, *job), jobs))
        server.wait_until_idle()
    assert together == alone
    for (name, prompt), found in zip(jobs, alone, strict=True):
        folder = None if name is None else folders[name]
        tokens, logprobs = NumpyLora(shallow_model, folder).continuation(prompt, TOKENS)
        assert found["tokens"] == tokens
        np.testing.assert_allclose(found["logprobs"], logprobs, atol=1e-5, rtol=1e-5)


def test_a_restarted_agent_has_all_adapters(server: ServerProcess) -> None:
    before = [complete(server, name) for name in (None, *NAMES)]
    [agent] = server.agents()
    agent.kill()
    until = time.monotonic() + time_limit(60)
    while server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).get("status") or server.agents() == [agent]:
        assert time.monotonic() < until
        time.sleep(0.1)
    assert [complete(server, name) for name in (None, *NAMES)] == before


def test_other_bytes_under_the_same_name_use_no_old_keys_and_values(
    server: ServerProcess, folders: dict[str, Path], shallow_model: Path
) -> None:
    """The prefix cache has blocks that the earlier adapter has computed. The new adapter must not use them. When the
    earlier bytes are loaded again, the answer is the same as before.
    """
    before = complete(server, "third")
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "third"})["deleted"] is True
    load(server, "third", folders["other"])
    tokens, logprobs = NumpyLora(shallow_model, folders["other"]).continuation(PROMPT, TOKENS)
    after = complete(server, "third")
    assert after["tokens"] == tokens
    np.testing.assert_allclose(after["logprobs"], logprobs, atol=1e-5, rtol=1e-5)
    server.post("/v1/unload_lora_adapter", {"lora_name": "third"})
    load(server, "third", folders["third"])
    assert complete(server, "third") == before


def test_the_list_of_models_has_the_adapters(server: ServerProcess, folders: dict[str, Path]) -> None:
    base, *adapters = server.get("/v1/models")["data"]
    assert [each["id"] for each in adapters] == sorted(NAMES)
    assert {each["parent"] for each in adapters} == {base["id"]}
    assert server.get("/v1/models/first")["root"] == str(folders["first"])
    assert "parent" not in base
    counted = [line for line in server.get_text("/metrics").splitlines() if "adapter_requests{" in line]
    assert [line.split('"')[1] for line in counted] == sorted(NAMES)


def test_other_apis_name_an_adapter(server: ServerProcess) -> None:
    message = [{"role": "user", "content": "hi"}]
    chat = {"messages": message, "max_tokens": 2, "model": "first"}
    assert server.post("/v1/chat/completions", chat)["model"] == "first"
    assert server.post("/v1/messages", chat)["model"] == "first"
    assert server.post("/v1/responses", {"input": "hi", "max_output_tokens": 2, "model": "first"})["model"] == "first"
    assert "generated_text" in server.post("/models/first/generate", {"inputs": "hi", "parameters": {}})


def test_wrong_requests_are_refused_with_a_reason(
    server: ServerProcess, folders: dict[str, Path], shape: ModelShape
) -> None:
    unknown = server.post("/v1/completions", {"prompt": "hi", "model": "missing", "max_tokens": 1})
    assert (unknown["status"], unknown["error"]["param"]) == (404, "model")
    again = load(server, "first", folders["other"])
    assert (again["status"], again["error"]["param"]) == (400, "lora_name")
    missing = load(server, "fourth", folders["first"] / "missing")
    assert (missing["status"], missing["error"]["param"]) == (400, "lora_path")
    gone = server.post("/v1/unload_lora_adapter", {"lora_name": "fourth"})
    assert (gone["status"], gone["error"]["param"]) == (404, "lora_name")
    large = load(server, "fourth", random_adapter(folders["first"].parent / "large", shape, rank=9))
    assert "lora_config.max_rank" in large["error"]["message"]
    assert [each["id"] for each in server.get("/v1/models")["data"][1:]] == sorted(NAMES)


def test_a_new_adapter_takes_the_slot_of_the_least_recently_used_one(
    server: ServerProcess, folders: dict[str, Path]
) -> None:
    for name in ("first", "third"):
        complete(server, name)
    load(server, "fourth", folders["other"])
    assert [each["id"] for each in server.get("/v1/models")["data"][1:]] == ["first", "fourth", "third"]
    assert server.post("/v1/completions", {"prompt": "hi", "model": "second"})["status"] == 404
    assert complete(server, "fourth")["tokens"] != complete(server, None)["tokens"]


def test_a_start_with_wrong_settings_is_refused(tmp_path: Path, folders: dict[str, Path]) -> None:
    log = f"log_config.path={tmp_path / 'server.log'}"
    for sets, reason in (
        ([f"lora_config.adapters=['a={folders['first']}']"], "are more than lora_config.max_adapters = 0"),
        (["lora_config.max_adapters=1", "lora_config.adapters=['a']"], "must be NAME=FOLDER"),
        (["lora_config.max_adapters=1", "parallel_config.sum_parts=2"], "the sums of parts have no adapters"),
    ):  # fmt: skip
        arguments = [part for each in (log, *sets) for part in ("--set", each)]
        ended = run_start_server("--config", "llama_tiny_cpu.yaml", *arguments)
        assert ended.returncode == 2
        assert reason in ended.stderr
