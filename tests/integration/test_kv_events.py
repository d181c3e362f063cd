"""Tests that a real server publishes the events of its prefix cache, and that a subscriber in another process can
follow them.
"""

import concurrent.futures

import pytest

pytest.importorskip("zmq", reason="the package pyzmq is not installed")

from support.kv_events import Subscriber
from support.server_process import running_server

PROMPT = list(range(3, 103))


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    settings = ["enabled=true", "endpoint=tcp://127.0.0.1:0", "replay_endpoint=tcp://127.0.0.1:0", "topic=kv@pod@tiny"]
    overrides = ["model_config.model_name=tiny", *(f"kv_events_config.{each}" for each in settings)]
    with running_server(tmp_path_factory.mktemp("events"), overrides) as server:
        subscriber = Subscriber(*server.events("kv_events_open")[0]["endpoints"], "kv@pod@tiny")
        yield server, subscriber
        subscriber.close()


def complete(server, **more):
    answer = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2, **more})
    assert answer["choices"]


def test_blocks_of_a_prompt_are_published_with_a_namespace_for_each_salt(published):
    server, subscriber = published
    block_size = server.events("server_start")[0]["config"]["pa_config"]["block_size"]
    num_full = len(PROMPT) // block_size
    assert num_full
    for salt in ("a", "b"):
        complete(server, cache_salt=salt)
    complete(server)
    subscriber.catch_up()
    blocks = subscriber.blocks[0]
    subscriber.follow(lambda: len(blocks) >= 3 * num_full)
    firsts = [block for block in blocks.values() if block[1] == tuple(PROMPT[:block_size])]
    names = {block[2] for block in firsts}
    assert len(firsts) == len(names) == 3
    assert None in names, "the request without a salt"
    for number in range(1, num_full):
        tokens = tuple(PROMPT[number * block_size : (number + 1) * block_size])
        assert {block[0] for block in blocks.values() if block[1] == tokens} <= set(blocks)
    assert server.counter("kv_events_dropped") == 0


def test_a_reload_clears_the_blocks_and_its_engine_publishes_on(published):
    """A request begins before the reload and completes on the old engine. The server publishes no events of its later
    blocks.
    """
    server, subscriber = published
    body = {"prompt": [7, *PROMPT], "max_tokens": 1000, "ignore_eos": True}
    subscriber.catch_up()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.post, "/v1/completions", body)
        subscriber.follow(lambda: any(block[1][0] == 7 for block in subscriber.blocks[0].values()))
        num_clears = [event["type"] for event in subscriber.events].count("AllBlocksCleared")
        assert "status" not in server.post("/v1/models/tiny/reload", {})
        subscriber.follow(lambda: subscriber.blocks[0] == {})
        assert running.result()["usage"]["completion_tokens"] == 1000
    server.post("/v1/completions", {"prompt": list(range(200, 264)), "max_tokens": 2})
    subscriber.follow(lambda: len(subscriber.blocks[0]) >= 4)
    assert [event["type"] for event in subscriber.events].count("AllBlocksCleared") == num_clears + 1
    assert {block[1][0] for block in subscriber.blocks[0].values() if block[0] is None} == {200}
    assert subscriber.lost == []
