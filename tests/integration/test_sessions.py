"""Tests sessions between real servers. A conversation continues on another server with the same bits, or the answer
states why not.
"""

from __future__ import annotations

import json
import shutil

import pytest

from support.server_process import ServerProcess, running_server
from support.session_files import call, put
from support.small_configs import TINY_LLAMA

MESSAGES = [{"role": "user", "content": "Tell me a long story about a bird, a stone and the sea. " * 9}]
TURN = {"messages": MESSAGES, "max_tokens": 40, "temperature": 0, "logprobs": True, "session_id": "trip"}


def next_turn(server: ServerProcess, answer: str, **changes: object) -> dict:
    messages = [*MESSAGES, {"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]
    return server.post("/v1/chat/completions", {**TURN, "messages": messages, **changes})


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Returns the file of a session, the answer to its first request, and the response to its second request."""
    folder = tmp_path_factory.mktemp("first")
    settings = ["kv_tier_config.host_blocks=64", "kv_tier_config.kept_blocks_per_key=5"]
    with running_server(folder, settings) as server:
        first = server.post("/v1/chat/completions", {**TURN, "cache_keep_s": 600})
        answer = first["choices"][0]["message"]["content"]
        status, file = call(server, "GET", "/v1/sessions/trip")
        assert status == 200
        assert json.loads(call(server, "GET", "/v1/sessions")[1])["data"][0]["tokens"] == first["usage"]["total_tokens"]
        second = next_turn(server, answer, session_id="other")
        kept = [line for line in server.get_text("/metrics").splitlines() if "tier_kept_blocks" in line]
        assert kept[-1] == "llm_serving_kv_tier_kept_blocks 5.0", kept
        assert next_turn(server, answer, cache_keep_s=1e9)["error"]["param"] == "cache_keep_s"
        assert call(server, "DELETE", "/v1/sessions/trip")[0] == 200
        assert call(server, "GET", "/v1/sessions/trip")[0] == 404
    return file, answer, second


@pytest.fixture(scope="module")
def other_place(tmp_path_factory, exported):
    """Provides a server with the same weights at another path, so that its block hashes differ."""
    folder = tmp_path_factory.mktemp("second")
    shutil.copytree(TINY_LLAMA, folder / "copy")
    settings = ["kv_tier_config.host_blocks=64", f"model_config.model_path={folder / 'copy'}"]
    with running_server(folder, settings) as server:
        yield server


def test_another_server_goes_on_from_the_blocks_of_the_file(exported, other_place):
    file, answer, second = exported
    imported = put(other_place, file)
    assert imported["differences"] == []
    assert imported["resumed_tokens"] >= imported["tokens"] - 17
    alone = next_turn(other_place, answer, session_id="trip2")
    assert alone["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "only the session itself uses its blocks"
    resumed = next_turn(other_place, answer)
    assert resumed["usage"]["prompt_tokens_details"]["cached_tokens"] >= imported["resumed_tokens"]
    assert resumed["choices"] == second["choices"], "tokens and bits of log-probabilities"
    status, again = call(other_place, "GET", "/v1/sessions/trip")
    assert (status, len(again) > len(file)) == (200, True), "an imported session can be exported again"
    assert put(other_place, again, "third")["differences"] == []


def test_a_damaged_or_cut_file_is_refused_and_leaves_no_session(exported, other_place):
    file, _, _ = exported
    flipped = bytearray(file)
    flipped[len(file) // 2] ^= 1
    for body, reason in ((bytes(flipped), "damaged"), (file[:-30], "cut off"), (file + b"x", "after its end")):
        status, answer = call(other_place, "PUT", "/v1/sessions/bad", body)
        assert (status, reason in json.loads(answer)["error"]["message"]) == (400, True), answer
        assert call(other_place, "GET", "/v1/sessions/bad")[0] == 404


def test_a_server_with_another_block_size_says_so_and_computes(exported, tmp_path):
    file, answer, second = exported
    settings = ["kv_tier_config.host_blocks=64", "pa_config.block_size=32", "pa_config.num_blocks=80"]
    with running_server(tmp_path, settings) as server:
        imported = put(server, file)
        assert imported["resumed_tokens"] == 0
        assert imported["differences"] == ["block_size is 16 in the file and 32 here"]
        assert next_turn(server, answer)["choices"] == second["choices"]
