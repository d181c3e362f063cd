"""Tests real servers of a small SmolVLM and of a small Qwen2.5-VL. Tokens equal those of transformers, and bits do not
depend on how the images are computed.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from performance.models.adapter import seeded_tensors
from performance.models.qwen_vision import write_qwen_vision_model
from performance.models.vision import write_vision_model
from support.chat_images import sample_part
from support.lora_folders import write_adapter
from support.server_process import ServerProcess, running_server
from support.small_configs import REPOSITORY
from support.sweeps import with_sweeps
from support.time_limits import time_limit

FAMILIES = {"smolvlm": ("images.json", write_vision_model), "qwen": ("qwen_images.json", write_qwen_vision_model)}
GOLDEN: dict[str, dict[str, Any]] = {
    name: json.loads((REPOSITORY / "tests" / "golden" / golden).read_text()) for name, (golden, _) in FAMILIES.items()
}
CASES: dict[str, list[dict[str, Any]]] = {name: golden["cases"] for name, golden in GOLDEN.items()}
TOKENS = len(CASES["smolvlm"][0]["tokens"])
SLOTS = ("lora_config.max_adapters=1", "lora_config.max_rank=8")
TIE = 1e-3
"""Two logits closer than this are a tie: sums in another order may exchange their tokens."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def cases(family: str) -> list[dict[str, Any]]:
    return CASES[family]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, family: str) -> Path:
    folder = tmp_path_factory.mktemp("model") / "small_vlm"
    FAMILIES[family][1](folder)
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, family: str) -> Path:
    [made] = GOLDEN[family]["adapters"]
    return write_adapter(tmp_path_factory.mktemp("adapter"), made["config"], seeded_tensors(made["shapes"]))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[ServerProcess]:
    # The other servers of this file have no adapter slots. Tests that compare them show that slots change no bit.
    with running_server(tmp_path_factory.mktemp("images"), settings_of(folder, *SLOTS)) as running:
        yield running
        running.wait_until_idle()


def settings_of(folder: Path, *more: str) -> list[str]:
    lengths = [f"{key}=1024" for key in ("model_config.max_generate_length", "pa_config.decode_seq_length")]
    return [f"model_config.model_path={folder}", "model_config.seq_length=[1024]", *lengths, *more]


def body_of(case: dict[str, Any], **fields: Any) -> dict[str, Any]:
    before, numbers, after = case["parts"]
    content = [{"type": "text", "text": before}] if before else []
    content += [sample_part(number) for number in numbers]
    content += [{"type": "text", "text": after}] if after else []
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "logprobs": True, "top_logprobs": 2, **fields}  # fmt: skip


def answered(server: ServerProcess, body: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Returns the tokens of an answer, and their log-probabilities."""
    answer = server.post("/v1/chat/completions", body)
    assert "choices" in answer, answer
    [choice] = answer["choices"]
    return choice["token_ids"], [each["logprob"] for each in choice["logprobs"]["content"]]


def load(server: ServerProcess, adapter: Path) -> None:
    server.post("/v1/load_lora_adapter", {"lora_name": "small", "lora_path": str(adapter)})


def check_tokens(found: list[int], case: dict[str, Any], tie: float = TIE) -> None:
    """Compares tokens with those of transformers. The first difference must be at a tie."""
    different = [i for i, (ours, theirs) in enumerate(zip(found, case["tokens"], strict=True)) if ours != theirs]
    if different:
        (_, best), (_, second) = case["top"][different[0]]
        assert best - second < tie, (different[0], case["top"][different[0]])


@pytest.mark.parametrize("number", range(len(CASES["smolvlm"])))
def test_prompt_and_tokens_equal_those_of_transformers(
    server: ServerProcess, cases: list[dict[str, Any]], number: int
) -> None:
    case = cases[number]
    answer = server.post("/v1/chat/completions", body_of(case))
    assert answer["prompt_token_ids"] == case["prompt"]
    assert answer["usage"]["prompt_tokens"] == len(case["prompt"])
    check_tokens(answer["choices"][0]["token_ids"], case)


def test_the_bits_do_not_depend_on_chunks_batch_cache_or_preemption(
    server: ServerProcess, folder: Path, cases: list[dict[str, Any]], tmp_path: Path
) -> None:
    # Answers of 96 tokens take 6 more blocks each, so two sequences that start together always outgrow the cache.
    bodies = [body_of(case, max_tokens=96) for case in cases]
    alone = [answered(server, body) for body in bodies]
    # Chunks of 20 tokens end inside tiles of 9. 30 blocks of 16 tokens are too few for all, so some are preempted.
    # The agents cache one tile, so they encode tiles again.
    pressed = ("scheduler_config.policy=chunked", "scheduler_config.chunk_tokens=20", "pa_config.num_blocks=31",
               "pa_config.decode_seq_length=480", "image_config.cached_tiles=1",
               "scheduler_config.prefix_cache=false")  # fmt: skip
    with running_server(tmp_path, settings_of(folder, *pressed)) as other, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda body: answered(other, body), bodies * 2))
        preemptions = other.get("/server_info")["engine"]["preemptions"]
    assert found == alone * 2
    assert preemptions > 0
    assert [answered(server, body) for body in bodies] == alone


def test_the_prefix_cache_knows_images_by_their_content(server: ServerProcess) -> None:
    def cached(number: int) -> int:
        part, text = sample_part(number, detail="low"), {"type": "text", "text": "t11 t12 " * 20}
        body = {"messages": [{"role": "user", "content": [part, text]}], "max_tokens": 1}
        return int(server.post("/v1/chat/completions", body)["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(4) == 0
    assert cached(8) == 0, "both prompts have the same token ids, because the images have the same size"
    assert cached(4) > 32


def test_an_adapter_of_the_text_model_has_the_tokens_of_peft(
    server: ServerProcess, family: str, cases: list[dict[str, Any]], adapter: Path
) -> None:
    [case] = GOLDEN[family]["adapted"]
    body = body_of(case)
    plain = answered(server, body)
    load(server, adapter)
    answer = server.post("/v1/chat/completions", body | {"model": "small"})
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "blocks of the model without the adapter"
    found = answered(server, body | {"model": "small"})
    check_tokens(found[0], case)
    assert found[0] != plain[0]
    others = [body_of(other) for other in cases]
    expected = [plain, found, *(answered(server, other) for other in others)]
    with ThreadPoolExecutor(8) as pool:
        mixed = list(pool.map(lambda each: answered(server, each), [body, body | {"model": "small"}, *others]))
    assert mixed == expected


def test_a_restarted_agent_reads_the_images_of_open_requests(
    server: ServerProcess, cases: list[dict[str, Any]]
) -> None:
    body = body_of(cases[0])
    expected = answered(server, body)
    [agent] = server.agents()
    agent.suspend()
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(answered, server, body)
        deadline = time.monotonic() + time_limit(20)
        while not server.get("/server_info")["engine"]["running"]:
            assert time.monotonic() < deadline, "the request does not start"
            time.sleep(0.02)
        agent.kill()
        assert later.result() == expected


def test_replicas_with_roles_have_the_bits_of_one_replica(
    server: ServerProcess, folder: Path, cases: list[dict[str, Any]], adapter: Path, tmp_path: Path
) -> None:
    """One replica computes the prompts and hands them over. The replica that decodes has so few blocks that it preempts
    sequences and computes their images again, from the same memory of tiles.
    """
    load(server, adapter)
    bodies = [body_of(case, max_tokens=160, **model) for case in cases for model in ({}, {"model": "small"})]
    with ThreadPoolExecutor(4) as pool:
        expected = list(pool.map(lambda body: answered(server, body), bodies))
    roles = ("parallel_config.data_parallel=2", "parallel_config.roles=[prefill, decode]", "pa_config.num_blocks=31",
             "parallel_config.prefill_threshold=16", "pa_config.decode_seq_length=480",
             "scheduler_config.prefix_cache=false")  # fmt: skip
    with running_server(tmp_path, settings_of(folder, *SLOTS, *roles)) as other, ThreadPoolExecutor(8) as pool:
        load(other, adapter)
        for rounds in range(1, 11):
            assert list(pool.map(lambda body: answered(other, body), bodies)) == expected
            engine = other.wait_until_idle()
            assert engine["hand_overs"]["completed"] == rounds * len(bodies)
            if engine["preemptions"]:  # a slow machine may complete one sequence before it has the prompt of the next
                break
    assert engine["preemptions"] > 0


def test_groups_of_agents_have_the_bits_of_one_agent(tmp_path: Path) -> None:
    """Two agents that share layers give the bits of two pipeline stages with ``sum_parts=2``, which add in the same
    order.

    Each agent of the first stage encodes the images. The agents of all stages need their rotary positions.
    """
    folder = tmp_path / "model"
    write_qwen_vision_model(folder)
    bodies = [body_of(case) for case in CASES["qwen"]]
    found = []
    for name, groups in {
        "shared": ("parallel_config.tensor_parallel=2",),
        "stages": ("parallel_config.pipeline_parallel=2", "parallel_config.sum_parts=2"),
    }.items():
        (tmp_path / name).mkdir()
        with running_server(tmp_path / name, settings_of(folder, *groups)) as server, ThreadPoolExecutor(4) as pool:
            found.append(list(pool.map(lambda body: answered(server, body), bodies)))
    assert found[0] == found[1]
    for case, (tokens, _) in zip(CASES["qwen"], found[0], strict=True):
        check_tokens(tokens, case)


@pytest.mark.parametrize("family", with_sweeps([(family,) for family in FAMILIES], lambda family: family != "qwen"))
def test_native_operators_read_images(tmp_path: Path, family: str) -> None:
    """Native operators in float16 may choose another token where transformers' best two logits differ by less than
    ``tie``.

    Fused operators in float16 have the same differences. If rows and columns are exchanged, the second token of
    Qwen2.5-VL differs where its logit leads by 2.8.
    """
    tie = {"smolvlm": 0.3, "qwen": 0.9}[family]
    folder, cases = tmp_path / "model", CASES[family]
    FAMILIES[family][1](folder)
    native = ("model_config.op_table=native", "model_config.model_dtype=float16", *SLOTS)
    chunked = ("scheduler_config.policy=chunked", "scheduler_config.chunk_tokens=20",
               "scheduler_config.prefix_cache=false")  # fmt: skip
    bodies = [body_of(case) for case in cases]
    with running_server(tmp_path, settings_of(folder, *native, *chunked)) as server, ThreadPoolExecutor(8) as pool:
        alone = [answered(server, body) for body in bodies]
        together = list(pool.map(lambda body: answered(server, body), bodies * 2))
    assert together == alone * 2
    for case, (tokens, _) in zip(cases, alone, strict=True):
        check_tokens(tokens, case, tie)
        assert len(set(tokens)) > TOKENS // 3


def test_blocks_of_images_come_back_from_kv_tiers_with_equal_bits(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_vision_model(folder)
    bodies = [body_of(case) for case in CASES["smolvlm"]]
    tiered = ("pa_config.num_blocks=31", "pa_config.decode_seq_length=480", "kv_tier_config.host_blocks=200",
              "scheduler_config.prefix_cache=true")  # fmt: skip
    with running_server(tmp_path, settings_of(folder, *tiered)) as server:
        computed = [answered(server, body) for body in bodies]
        assert [answered(server, body) for body in bodies] == computed
        metrics = server.get_text("/metrics")
    assert re.search(r'^llm_serving_kv_tier_hit_blocks_total{tier="host"} [1-9]', metrics, re.MULTILINE)
