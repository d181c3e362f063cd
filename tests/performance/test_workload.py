"""Tests generated prompts, which have the requested lengths, and prompts from data sets."""

from pathlib import Path

import pytest

from performance.load.apis import APIS, Generation, Piece
from performance.load.workload import LoadRequest, dataset_workload, text_workload, token_workload, with_beginnings
from performance.program import UsageError


def test_text_prompts_have_the_requested_lengths_and_depend_on_the_seed() -> None:
    requests = text_workload(200, 1, (5, 9), (3, 4))
    assert requests == text_workload(200, 1, (5, 9), (3, 4))
    assert requests != text_workload(200, 2, (5, 9), (3, 4))
    assert {len(request.text.split()) for request in requests} == {5, 6, 7, 8, 9}
    assert {request.max_tokens for request in requests} == {3, 4}


def test_a_longer_run_begins_with_the_same_requests() -> None:
    assert text_workload(10, 1, (5, 50), (3, 4)) == text_workload(20, 1, (5, 50), (3, 4))[:10]


def test_token_prompts_stay_within_the_vocabulary() -> None:
    requests = token_workload(300, 1, (4, 4), (2, 2), vocab_size=20)
    assert {len(request.token_ids) for request in requests} == {4}
    assert {token for request in requests for token in request.token_ids} == set(range(10, 20))


def test_prompts_after_common_beginnings() -> None:
    plain = token_workload(40, 3, (2, 5), (1, 4), 50)
    made = with_beginnings(plain, 3, 7, 3, 50)
    beginnings = {(request.token_ids or ())[:7] for request in made}
    assert len(beginnings) == 3
    assert all(10 <= token < 50 for each in beginnings for token in each)
    assert [(request.token_ids or ())[7:] for request in made] == [request.token_ids for request in plain]
    assert [request.max_tokens for request in made] == [request.max_tokens for request in plain]
    other_prompts = with_beginnings(token_workload(40, 4, (2, 5), (1, 4), 50), 3, 7, 3, 50)
    assert {(request.token_ids or ())[:7] for request in other_prompts} == beginnings
    first, second = with_beginnings(text_workload(2, 0, (1, 1), (1, 1)), 1, 9, 0, 50)
    assert (first.text or "").split()[:9] == (second.text or "").split()[:9]
    assert len((first.text or "").split()) == 10


def test_a_dataset_is_read_in_order_and_again(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(
        '{"prompt": "hello", "max_tokens": 5}\n\n{"prompt": [1, 2, 3], "id": "x"}\n'
        '{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 7}\n'
    )
    assert dataset_workload(path, 4, 0, (9, 9)) == [
        LoadRequest(5, text="hello"),
        LoadRequest(9, token_ids=(1, 2, 3)),
        LoadRequest(7, messages=({"role": "user", "content": "hi"},)),
        LoadRequest(5, text="hello"),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ('{"prompt": "x"}\n{"prompt": 5}\n', r":2: Expected `str \| array \| null`, got `int`"),
        ("{}\n", ":1: give either 'prompt'"),
        ('{"prompt": "x", "messages": []}\n', ":1: give either 'prompt'"),
        ('{"prompt": "x", "max_tokens": 0}\n', ":1: max_tokens is 0, the minimum is 1"),
        ("not json\n", ":1: JSON is malformed"),
    ],
)
def test_the_error_names_the_wrong_line_of_a_dataset(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        dataset_workload(path, 1, 0, (1, 1))


def test_a_missing_dataset_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*: No such file"):
        dataset_workload(tmp_path / "no", 1, 0, (1, 1))


def test_the_body_of_a_completion_request() -> None:
    request = LoadRequest(5, token_ids=(1, 2))
    assert APIS["openai"].body(request, Generation("m"), "id", 3) == {
        "model": "m",
        "prompt": (1, 2),
        "max_tokens": 5,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_options_and_seed_are_in_the_body() -> None:
    generation = Generation("m", temperature=0.5, ignore_eos=True, return_token_ids=True)
    body = APIS["openai-chat"].body(LoadRequest(5, text="hi"), generation, "id", 3)
    assert body["messages"] == ({"role": "user", "content": "hi"},)
    assert (body["seed"], body["ignore_eos"], body["return_token_ids"]) == (3, True, True)


@pytest.mark.parametrize(
    ("api", "request_"),
    [
        ("openai", LoadRequest(1, messages=())),
        ("openai-chat", LoadRequest(1, token_ids=(1,))),
        ("generate", LoadRequest(1, token_ids=(1,))),
        ("chat", LoadRequest(1, messages=())),
    ],
)
def test_an_api_rejects_prompts_that_it_cannot_send(api: str, request_: LoadRequest) -> None:
    with pytest.raises(UsageError):
        APIS[api].check([request_])


@pytest.mark.parametrize(
    ("api", "payload", "piece"),
    [
        (
            "openai",
            b'{"id":"a","choices":[{"index":0,"text":" x","finish_reason":null}]}',
            Piece(True, request_id="a", text=" x"),
        ),
        ("openai", b'{"choices":[{"text":"","finish_reason":null,"token_ids":[1,2]}]}', Piece(True, token_ids=2)),
        ("openai", b'{"choices":[{"text":"","finish_reason":null}]}', Piece()),
        ("openai", b'{"choices":[{"text":"","finish_reason":"stop"}]}', Piece(True, finish_reason="stop")),
        (
            "openai",
            b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}}',
            Piece(prompt_tokens=3, output_tokens=4),
        ),
        ("openai", b'{"error":{"message":"m","code":"c"}}', Piece(error="m")),
        ("openai", b'{"error":"text"}', Piece(error="text")),
        ("openai-chat", b'{"choices":[{"delta":{"role":"assistant","content":""}}]}', Piece()),
        ("openai-chat", b'{"choices":[{"delta":{"content":"x"}}],"usage":null}', Piece(True, text="x")),
        ("openai-chat", b'{"choices":[{"delta":{"reasoning_content":"x"}}]}', Piece(True)),
        (
            "generate",
            b'{"index":1,"token":{"id":null,"text":"x"},"generated_text":null,"details":null}',
            Piece(True, text="x"),
        ),
        ("generate", b'{"index":1,"token":null,"generated_text":null,"details":null}', Piece()),
        (
            "generate",
            b'{"index":2,"token":null,"generated_text":"x","finish_reason":"stop","generated_tokens":2,"seed":1}',
            Piece(True, finish_reason="stop", output_tokens=2),
        ),
        ("chat", b'{"request_id":"r","delta":"x","finish_reason":null}', Piece(True, request_id="r", text="x")),
        (
            "chat",
            b'{"request_id":"r","delta":"","finish_reason":"length","usage":{"prompt_tokens":3,"completion_tokens":4}}',
            Piece(True, finish_reason="length", prompt_tokens=3, output_tokens=4, request_id="r"),
        ),
    ],
)
def test_a_piece_of_a_stream(api: str, payload: bytes, piece: Piece) -> None:
    assert APIS[api].read(payload) == piece


def test_the_bodies_of_the_other_apis() -> None:
    request, greedy, random = LoadRequest(5, text="hi"), Generation("a/b"), Generation("a/b", temperature=0.5)
    assert APIS["generate"].path(greedy) == "/models/a%2Fb/generate_stream"
    assert APIS["generate"].body(request, greedy, "id", 3) == {
        "inputs": "hi",
        "parameters": {"max_new_tokens": 5, "do_sample": False},
    }
    assert APIS["chat"].path(random) == "/stream_chat_post"
    assert APIS["chat"].body(request, random, "id", 3) == {
        "request_id": "id",
        "query": "hi",
        "role": "user",
        "history": [],
        "gen_kwargs": {"max_new_tokens": 5, "do_sample": True, "temperature": 0.5, "seed": 3},
    }
