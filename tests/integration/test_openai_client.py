"""Tests the official OpenAI client with a real server, agent and model."""

from __future__ import annotations

import concurrent.futures
import re

import pytest

from support.lazy_module import LazyModule

openai = LazyModule("openai")

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_models(client):
    assert [model.id for model in client.models.list()] == ["llama_tiny"]


def test_a_chat_ends_its_turn_by_itself(client):
    answer = client.chat.completions.create(model="llama_tiny", messages=QUESTION, temperature=0)
    [choice] = answer.choices
    assert choice.finish_reason == "stop"
    assert "Paris" in choice.message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_is_the_answer_in_pieces_with_its_usage(client, record_property):
    whole = client.chat.completions.create(model="llama_tiny", messages=QUESTION, temperature=0)
    pieces = list(
        client.chat.completions.create(
            model="llama_tiny",
            messages=QUESTION,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    record_property("other_streams", f"{text != whole.choices[0].message.content:d} of 1")
    assert text == whole.choices[0].message.content
    assert len(pieces) > 3
    assert pieces[-1].usage == whole.usage


def test_a_seed_fixes_the_text_whoever_else_is_served(client):
    def ask(seed):
        return client.completions.create(
            model="llama_tiny", prompt="Once upon a time", max_tokens=40, temperature=1.0, seed=seed
        )

    alone = [ask(seed).choices[0].text for seed in range(4)]
    assert len(set(alone)) == 4
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = [answer.choices[0].text for answer in pool.map(ask, [0, 1, 2, 3, 0, 1, 2, 3])]
    assert together == alone * 2


def test_logprobs_of_chat_and_completion_agree(client):
    chat = client.chat.completions.create(
        model="llama_tiny", messages=QUESTION, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    for entry in chat.choices[0].logprobs.content:
        assert entry.logprob <= 0
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)
        assert len(entry.top_logprobs) == 3
        assert bytes(entry.bytes).decode(errors="replace") == entry.token or entry.token.startswith("bytes:")


def test_n_and_lists_of_prompts(client):
    answer = client.completions.create(
        model="llama_tiny", prompt=["Once upon a time", [1, 300, 301]], n=2, max_tokens=5, temperature=0
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == answer.choices[1].text
    assert answer.usage.completion_tokens == 20


def test_stop_strings_end_the_text_before_them(client):
    free = client.completions.create(model="llama_tiny", prompt="Once upon a time", max_tokens=60, temperature=0)
    word = re.findall(r"\w+", free.choices[0].text)[6]
    cut = client.completions.create(
        model="llama_tiny", prompt="Once upon a time", max_tokens=60, temperature=0, stop=[word]
    )
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].text == free.choices[0].text.split(word)[0]


def test_errors_are_the_clients_exceptions(client):
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="llama_tiny", prompt="x", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="2048"):
        client.completions.create(model="llama_tiny", prompt=[5] * 3000, max_tokens=5)


def test_the_published_dialects_return_text(server):
    body = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 8}}
    reply = server.post("/models/llama_tiny/generate", body)
    assert reply["generated_text"]
    chat = {
        "request_id": "r1",
        "query": "What is the capital of France?",
        "role": "user",
        "history": [],
        "gen_kwargs": {"temperature": 0, "max_length": 200, "max_new_tokens": 12, "prefix_text": "The capital"},
    }
    reply = server.post("/chat", chat)
    assert reply["request_id"] == "r1"
    assert not reply["response"].startswith("The capital")
    assert "Paris" in reply["response"]


def test_tokenize_and_back(server):
    text = "Once upon a time, 2 + 2 = 4; naïve 🦊"
    tokens = server.post("/tokenize", {"prompt": text})["tokens"]
    assert server.post("/detokenize", {"tokens": tokens})["prompt"].strip() == text


def test_health_metrics_and_info_are_served(server):
    assert server.get("/health/live")
    assert server.get("/health/ready")
    info = server.get("/server_info")
    assert info["engine"]["state"] == "ready"
    assert info["engine"]["agents"][0]["summary"]["op_table"] == "fused"
