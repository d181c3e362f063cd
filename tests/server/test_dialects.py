"""Tests the routes of the published MindSpore serving project: /generate, /generate_stream, /chat and
/stream_chat_post.
"""

import pytest

from llm_serving.errors import RequestError
from llm_serving.server.error_replies import FAILURE_TEXTS
from llm_serving.server.published.chat import _observation_role
from performance.load import mock_chat
from support.fake_engine import LOGSUMEXP, MODEL_NAME
from support.http_server import wait_until

GENERATE = ["/generate", f"/models/{MODEL_NAME}/generate"]


@pytest.mark.parametrize("path", GENERATE)
def test_generate(server, engine, tokenizer, path):
    engine.say("hello to the bird")
    answer = server.post(path, {"inputs": "Once", "parameters": {"max_new_tokens": 9, "seed": 5}}).json()
    assert answer == {
        "generated_text": " hello to the bird",
        "finish_reason": "stop",
        "generated_tokens": 5,
        "seed": 5,
        "details": None,
    }
    [request] = engine.submitted
    assert request.prompt_token_ids == tokenizer.encode("Once")
    assert (request.sampling.max_tokens, request.sampling.temperature, request.sampling.seed) == (9, 0.0, 5)


def test_defaults(server, engine):
    server.post("/generate", {"inputs": "Once"})
    assert engine.submitted[0].sampling.max_tokens == min(300, 128 - 4)
    assert engine.submitted[0].sampling.temperature == 0.0


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, (0.0, 0, 1.0)),
        ({"do_sample": True}, (1.0, 0, 1.0)),
        ({"do_sample": "True", "top_p": "0.7", "top_k": "3"}, (1.0, 3, 0.7)),
        ({"temperature": 0.5}, (0.5, 0, 1.0)),
        ({"top_k": 5}, (1.0, 5, 1.0)),
        ({"do_sample": False, "temperature": 0.5, "top_k": 5, "top_p": 0.1}, (0.0, 0, 1.0)),
        ({"do_sample": "False", "temperature": "0.5"}, (0.0, 0, 1.0)),
        ({"temperature": 1e-6}, (0.0, 0, 1.0)),
    ],
)
def test_which_parameters_make_generate_sample(server, engine, parameters, expected):
    assert server.post("/generate", {"inputs": "Once", "parameters": parameters}).status_code == 200
    sampling = engine.submitted[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == expected


def test_full_text_stop_and_penalty(server, engine):
    parameters = {"return_full_text": "True", "stop": ["the"], "repetition_penalty": 1.2, "return_protocol": "sse"}
    answer = server.post("/generate", {"inputs": "Once", "parameters": parameters}).json()
    assert answer["generated_text"].startswith("Once ")
    assert answer["generated_text"].endswith("hello to ")
    assert engine.submitted[0].sampling.repetition_penalty == 1.2


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_an_adapter_is_named_in_the_path(server, path):
    body = {"inputs": "Once", "parameters": {"adapter_id": "sql"}}
    error = server.post(path, body).json()["error"]
    assert (error["param"], error["code"]) == ("parameters.adapter_id", "unsupported_parameter")
    assert "send the request to /models/NAME/generate, where NAME is the name of the adapter" in error["message"]
    body["parameters"]["adapter_id"] = None
    assert server.post(path, body).status_code == 200


def test_details_and_logits(server, engine, tokenizer):
    engine.say("the fox")
    parameters = {"details": True, "top_n_tokens": 2, "return_logits": True}
    answer = server.post("/generate", {"inputs": "Once", "parameters": parameters}).json()
    ids = [*tokenizer.encode("the fox", add_special_tokens=False), 2]
    details = answer["details"]
    assert [token["id"] for token in details["tokens"]] == ids
    assert [token["text"] for token in details["tokens"]] == [" the", " fox", "</s>"]
    assert [token["special"] for token in details["tokens"]] == [False, False, True]
    assert details["tokens"][0]["logprob"] == 2 - LOGSUMEXP
    assert [[top["id"] for top in tops] for tops in details["top_tokens"]] == [[i, i + 1] for i in ids]
    assert (details["finish_reason"], details["generated_tokens"]) == ("stop", 3)
    assert [step["token_id"] for step in answer["logits"]] == ids
    assert answer["logits"][0]["top_token_ids"] == [ids[0] + i for i in range(32)]
    assert answer["logits"][0]["top_logits"] == [2.0 - i for i in range(32)]
    assert answer["logits"][0]["logit"] == 2.0


@pytest.mark.parametrize(
    ("path", "more"),
    [("/generate_stream", {}), (f"/models/{MODEL_NAME}/generate_stream", {}), ("/generate", {"stream": "True"})],
)
def test_generate_stream(server, engine, tokenizer, path, more):
    engine.say("hello to the bird")
    events = server.events(path, {"inputs": "Once", **more})
    ids = [*tokenizer.encode("hello to the bird", add_special_tokens=False), 2]
    assert [event["token"]["id"] for event in events] == ids
    assert [event["index"] for event in events] == [1, 2, 3, 4, 5]
    assert "".join(event["token"]["text"] for event in events) == " hello to the bird"
    assert [event["generated_text"] for event in events] == [None] * 4 + [" hello to the bird"]
    assert (events[-1]["finish_reason"], events[-1]["generated_tokens"]) == ("stop", 5)


def test_generate_stream_with_everything(server, engine):
    parameters = {"details": True, "top_n_tokens": 1, "return_logits": True, "return_full_text": True}
    engine.tokens_per_piece = 3
    events = server.events("/generate_stream", {"inputs": "Once", "parameters": parameters})
    assert all(len(event["logits"]) == 1 and len(event["top_tokens"]) == 1 for event in events)
    assert "Once" + "".join(event["token"]["text"] for event in events) == events[-1]["generated_text"]
    assert events[-1]["details"]["generated_tokens"] == len(events) == 6


def test_chat(server, engine, tokenizer):
    engine.say("hello to the bird")
    answer = server.post("/chat", {"request_id": "abc", "query": "who?", "role": "user", "history": []}).json()
    assert answer == {
        "request_id": "abc",
        "response": "hello to the bird",
        "finish_reason": "stop",
        "flag": "end",
        "usage": {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12},
    }
    text = "<s><|user|>who?</s><|assistant|>"
    assert engine.submitted[0].prompt_token_ids == tokenizer.encode(text, add_special_tokens=False)
    assert engine.submitted[0].sampling.temperature == 0.0


@pytest.mark.parametrize(
    "history",
    [
        [["a", "b"], ["c", "d"]],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, ["c", "d"]],
    ],
)
def test_both_kinds_of_history(server, engine, tokenizer, history):
    server.post("/chat", {"request_id": 5, "query": "e", "history": history})
    text = tokenizer.decode(engine.submitted[0].prompt_token_ids, skip_special_tokens=False)
    assert text.replace("|> ", "|>") == (
        "<s><|user|>a</s><|assistant|>b</s><|user|>c</s><|assistant|>d</s><|user|>e</s><|assistant|>"
    )


def test_the_querys_role_and_the_request_id(server, engine, tokenizer):
    answer = server.post("/chat", {"query": "e", "role": "system"}).json()
    assert answer["request_id"] == engine.submitted[0].request_id
    assert tokenizer.encode("<|system|>", False)[0] == engine.submitted[0].prompt_token_ids[1]
    assert server.post("/chat", {"query": "e", "request_id": 17}).json()["request_id"] == "17"
    without = server.post("/chat", {"query": "e", "request_id": None}).json()
    assert without["request_id"] == engine.submitted[-1].request_id
    assert server.post("/chat", {"query": "e", "request_id": "x" * 257}).status_code == 400


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_length": 10, "max_new_tokens": 9}, 5),
        ({"max_length": 14, "max_new_tokens": 5}, 5),
        ({"max_length": 12}, 7),
        ({"max_length": 128}, 123),
        ({"max_new_tokens": 6}, 6),
        ({}, 123),
    ],
)
def test_max_length_counts_the_prompt_of_five_tokens_too(server, engine, limits, expected):
    assert server.post("/chat", {"query": "fox", "gen_kwargs": limits}).status_code == 200
    assert len(engine.submitted[0].prompt_token_ids) == 5
    assert engine.submitted[0].sampling.max_tokens == expected


@pytest.mark.parametrize("path", ["/chat", "/stream_chat_post"])
def test_a_prompt_that_reaches_max_length_is_refused(server, engine, path):
    response = server.post(path, {"query": "fox", "gen_kwargs": {"max_length": 5, "max_new_tokens": 3}})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "gen_kwargs.max_length")
    assert "is 5 tokens for prompt and output together, and the prompt has 5." in error["message"]
    assert engine.submitted == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (0.0, 1.0)),
        ({"temperature": 0.5}, (0.5, 1.0)),
        ({"top_p": 0.8}, (1.0, 0.8)),
        ({"temperature": 0.5, "top_p": 0.8, "do_sample": False}, (0.0, 1.0)),
    ],
)
def test_which_settings_make_chat_sample(server, engine, settings, expected):
    server.post("/chat", {"query": "fox", "gen_kwargs": settings})
    assert (engine.submitted[0].sampling.temperature, engine.submitted[0].sampling.top_p) == expected


def test_the_reply_continues_the_prefix_and_does_not_repeat_it(server, engine, tokenizer):
    engine.say("to the bird")
    body = {"query": "who?", "gen_kwargs": {"prefix_text": "I said hello"}}
    answer = server.post("/chat", body).json()
    prompt = tokenizer.decode(engine.submitted[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith("<|assistant|> I said hello")
    assert answer["response"] == " to the bird"
    events = server.events("/stream_chat_post", body)
    assert "".join(event["delta"] for event in events) == " to the bird"


def test_stream_chat(server, engine):
    engine.say("hello to the bird")
    for path, more in (("/stream_chat_post", {}), ("/chat", {"stream": True})):
        events = server.events(path, {"request_id": "r", "query": "fox", **more})
        assert {event["request_id"] for event in events} == {"r"}
        assert "".join(event["delta"] for event in events) == events[-1]["response"] == "hello to the bird"
        assert [event["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["stop"]
        assert events[-1]["usage"]["completion_tokens"] == 5
        assert [event.get("flag") for event in events] == [None] * (len(events) - 1) + ["end"]


def test_logits_of_every_step(server, engine):
    engine.say("the fox")
    body = {"query": "fox", "gen_kwargs": {"return_logits": True}}
    whole = server.post("/chat", body).json()["logits"]
    streamed = [step for event in server.events("/stream_chat_post", body) for step in event["logits"]]
    assert streamed == whole
    assert [len(step["top_token_ids"]) for step in whole] == [32] * 3
    assert [len(step["top_logits"]) for step in whole] == [32] * 3


@pytest.mark.parametrize(
    ("path", "body"), [("/generate_stream", {"inputs": "a"}), ("/stream_chat_post", {"query": "a"})]
)
def test_an_error_in_a_stream_is_its_last_event(server, engine, path, body):
    engine.fail_after = 2
    events = server.events(path, body)
    assert events[-1]["error"]["message"] == FAILURE_TEXTS["engine_error"]
    assert len(events) >= 2


def test_a_prefix_of_token_ids_follows_the_prompt(server, engine):
    server.post("/chat", {"query": "who?"})
    body = {"query": "who?", "gen_kwargs": {"prefix_text": [300, 301]}}
    assert server.post("/chat", body).json()["flag"] == "end"
    plain, prefixed = engine.submitted
    assert prefixed.prompt_token_ids == [*plain.prompt_token_ids, 300, 301]
    body["gen_kwargs"]["prefix_text"] = [10**6]
    error = server.post("/chat", body).json()["error"]
    assert (error["param"], error["code"]) == ("gen_kwargs.prefix_text", "invalid_value")


def test_an_observation_is_the_result_of_a_tool(server, engine, tokenizer):
    history = [["weather?", "I look."]]
    for role in ("observation", "user"):
        server.post("/chat", {"query": "sunny", "role": role, "history": history})
    observed, said = (tokenizer.decode(each.prompt_token_ids, skip_special_tokens=False) for each in engine.submitted)
    assert "<tool_response>\nsunny\n</tool_response>" in observed
    assert "<tool_response>" not in said
    assert _observation_role("{% if role == 'observation' %}") == "observation"
    assert server.post("/chat", {"query": "a", "role": "tool"}).json()["error"]["param"] == "role"


def test_a_request_id_in_use_is_refused_until_its_request_has_ended(server, engine):
    # The response begins with the first piece of the text. Then the text stops.
    engine.say("hello to the bird " * 20)
    engine.delay_s = 0.05
    body = {"request_id": "twice", "query": "a"}
    with server.http.stream("POST", "/stream_chat_post", json=body) as response:
        assert response.status_code == 200
        engine.delay_s = 30
        wait_until(lambda: len(engine.submitted) == 1)
        for path in ("/chat", "/stream_chat_post"):
            refused = server.post(path, body)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"], error["param"]) == (409, "duplicate_request_id", "request_id")
        assert len(server.app.state.chat_ids) == 1
    wait_until(lambda: len(server.app.state.chat_ids) == 0)
    engine.delay_s = 0
    assert server.post("/chat", body).status_code == 200
    assert server.post("/chat", {**body, "gen_kwargs": {"max_new_tokens": 10**6}}).status_code == 400
    assert len(server.app.state.chat_ids) == 0


@pytest.mark.parametrize("whole", [[], ["--whole"]])
def test_the_mock_client_prints_replies_and_characters_per_second(server, engine, capsys, whole):
    engine.say("hello to the bird")
    arguments = ["--url", server.url, "--parallel", "2", "--rounds", "3", "--max-new-tokens", "8", *whole]
    assert mock_chat.main(arguments) == 0
    shown = capsys.readouterr().out
    assert shown.count(": 'hello to the bird'") == 6
    assert "all 2 users: 102 characters in" in shown
    assert {len(each.prompt_token_ids) for each in engine.submitted} != {len(engine.submitted[0].prompt_token_ids)}
    engine.refuse = RequestError("no more")
    # One user: another one would still print after the error of the first.
    assert mock_chat.main([*arguments, "--parallel", "1"]) == 1
    assert "no more" in capsys.readouterr().err
