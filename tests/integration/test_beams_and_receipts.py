"""Tests beam search and receipts with a real server.

Log-probabilities come from an agent, and times come from the real clock.
"""

from __future__ import annotations

import concurrent.futures
import math

import pytest

from support.server_process import running_server

PROMPT = {"prompt": "The capital of France is", "max_tokens": 8}
TERMS = {"return_receipt": True, "priority": -1, "ttft_objective_ms": 9e6, "tbt_objective_ms": 9e6}

CACHE = ["pa_config.num_blocks=1024", "scheduler_config.prefix_cache=true"]


@pytest.fixture(scope="module")
def caching_server(tmp_path_factory):
    with running_server(tmp_path_factory.mktemp("server"), CACHE) as running:
        yield running
        running.wait_until_idle()


def test_one_beam_is_the_greedy_answer(server):
    greedy = server.post("/v1/completions", {**PROMPT, "temperature": 0, "logprobs": 1, "return_token_ids": True})
    beam = server.post(
        "/v1/completions", {**PROMPT, "use_beam_search": True, "best_of": 1, "logprobs": 1, "return_token_ids": True}
    )
    assert beam["choices"] == greedy["choices"]
    assert beam["usage"]["total_tokens"] == greedy["usage"]["total_tokens"]


@pytest.mark.parametrize("caches", [False, True], ids=["no cache", "prefix cache"])
def test_beams_are_ranked_and_the_same_in_a_crowd(request, caches):
    server = request.getfixturevalue("caching_server" if caches else "server")
    body = {**PROMPT, "use_beam_search": True, "n": 4, "logprobs": 0, "ignore_eos": True}
    alone = server.post("/v1/completions", body)["choices"]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        crowd = [pool.submit(server.post, "/v1/completions", {**PROMPT, "max_tokens": 60}) for _ in range(5)]
        searches = [pool.submit(server.post, "/v1/completions", body) for _ in range(3)]
        found = [search.result()["choices"] for search in searches]
        assert all("choices" in one.result() for one in crowd)
    assert found == [alone] * 3
    sums = [math.fsum(choice["logprobs"]["token_logprobs"]) for choice in alone]
    assert sums == sorted(sums, reverse=True)
    assert len({choice["text"] for choice in alone}) == 4


@pytest.mark.parametrize("caches", [False, True], ids=["no cache", "prefix cache"])
def test_cached_tokens_are_reported_everywhere(request, caches):
    server = request.getfixturevalue("caching_server" if caches else "server")
    body = {"prompt": "The quick brown fox jumps over the lazy dog, and nobody minds it at all, or ever did.",
            "max_tokens": 4, "temperature": 0, "return_receipt": True, "cache_salt": "ours"}  # fmt: skip
    first, second = (server.post("/v1/completions", body) for _ in range(2))
    salted = server.post("/v1/completions", {**body, "cache_salt": "mine"})
    assert first["choices"][0]["text"] == second["choices"][0]["text"] == salted["choices"][0]["text"]
    answers = (first, second, salted)
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert [answer["receipt"]["sequences"][0]["cached_tokens"] for answer in answers] == cached
    assert (cached[0], cached[2]) == (0, 0)
    assert (cached[1] > 0) == caches
    assert (server.get("/server_info")["engine"]["prefix_hit_tokens"] > 0) == caches


def test_receipt_matches_the_log(server):
    answer = server.post(
        "/v1/completions",
        {**PROMPT, **TERMS},
    )
    [given] = answer["receipt"]["sequences"]
    [kept] = server.get(f"/requests/{answer['id']}")["sequences"]
    [line] = [line for line in server.events("request_end") if line["request_id"] == answer["id"]]
    for receipt in (given, kept):
        assert round(sum(receipt["parts_ms"].values()), 3) == receipt["e2e_ms"]
    assert {f"{part}_ms": value for part, value in kept["parts_ms"].items()}.items() <= line.items()
    assert (kept["state"], kept["priority"], kept["output_tokens"]) == (
        "done",
        -1,
        answer["usage"]["completion_tokens"],
    )
    assert line["objectives_met"] == {"ttft": True, "tbt": True, "both": True}
    assert given["e2e_ms"] <= kept["e2e_ms"]
    assert min(kept["parts_ms"][part] for part in ("tokenise", "queue", "prefill", "decode", "delivery")) > 0
