"""Tests KServe's open inference protocol: health, model, tensors, the generate extension and errors."""

from __future__ import annotations

import threading

import pytest

from llm_serving.server.kserve import endpoints
from llm_serving.server.limits import INLINE_ITEMS
from support.fake_engine import MODEL_NAME, FakeEngine, make_status
from support.http_server import running

MODEL = f"/v2/models/{MODEL_NAME}"


def tensor(name, data, datatype="BYTES", shape=None):
    return {"name": name, "shape": shape or [len(data)], "datatype": datatype, "data": data}


def prompts(*texts):
    return tensor("text_input", list(texts))


def test_server_health_and_model(server, engine):
    get = server.http.get
    assert get("/v2").json()["extensions"] == ["generate"]
    assert get("/v2/health/live").json() == {"live": True}
    assert get("/v2/health/ready").json() == {"ready": True}
    assert get(f"{MODEL}/ready").json() == {"name": MODEL_NAME, "ready": True}
    assert [each["name"] for each in get(MODEL).json()["inputs"]] == ["text_input", "input_ids"]
    engine.current = make_status(state="recovering")
    for path, key in (("/v2/health/ready", "ready"), (f"{MODEL}/ready", "ready")):
        assert (get(path).status_code, get(path).json()[key]) == (503, False)
    assert get("/v2/health/live").status_code == 200


def test_infer_continues_each_prompt(server, engine):
    engine.say("hello")
    body = {"id": "7", "inputs": [prompts("a", "the bird"), tensor("max_tokens", [5], "INT32"),
                                  tensor("temperature", [0.5], "FP32"), tensor("stop", ["x", "y"])],
            "parameters": {"seed": 3}}  # fmt: skip
    response = server.post(f"{MODEL}/infer", body).json()
    assert (response["id"], response["model_name"], response["model_version"]) == ("7", MODEL_NAME, "1")
    text, reason = response["outputs"]
    assert text == {"name": "text_output", "datatype": "BYTES", "shape": [2], "data": ["a hello", "the bird hello"]}
    assert reason["data"] == ["stop", "stop"]
    for request in engine.submitted:
        sampling = request.sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.seed, sampling.stop) == (5, 0.5, 3, ("x", "y"))
    same = server.post("/v1/completions", {"prompt": ["a", "the bird"], "max_tokens": 5}).json()
    body["parameters"]["exclude_input_in_output"] = True
    body["outputs"] = [{"name": "text_output"}]
    [only] = server.post(f"{MODEL}/infer", body).json()["outputs"]
    assert only["data"] == [choice["text"] for choice in same["choices"]]


@pytest.mark.parametrize("nested", [False, True])
def test_infer_takes_token_ids(server, engine, nested):
    data = [[1, 5, 6], [1, 7, 8]] if nested else [1, 5, 6, 1, 7, 8]
    body = {"inputs": [tensor("input_ids", data, "INT64", [2, 3])]}
    assert server.post(f"{MODEL}/infer", body).status_code == 200
    assert [request.prompt_token_ids for request in engine.submitted] == [[1, 5, 6], [1, 7, 8]]


def test_generate_returns_prompt_and_text(server, engine):
    engine.say("hello")
    parameters = {"max_tokens": 4, "temperature": 0}
    body = {"text_input": "a", "parameters": parameters}
    assert server.post(f"{MODEL}/generate", body).json() == {
        "model_name": MODEL_NAME, "model_version": "1", "text_output": "a hello", "finish_reason": "stop",
    }  # fmt: skip
    parameters["exclude_input_in_output"] = True
    assert server.post(f"{MODEL}/generate", {"id": "x", **body}).json()["text_output"] == " hello"
    events = server.events(f"{MODEL}/generate_stream", {**body, "id": "9"})
    assert "".join(event["text_output"] for event in events) == " hello"
    assert {event["id"] for event in events} == {"9"}
    assert [event.get("finish_reason") for event in events] == [None] * (len(events) - 1) + ["stop"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("generate", {"text_input": "a", "parameters": {"temperature": 9}}, "parameters.temperature"),
        ("generate", {"text_input": "a", "parameters": {"n": 2}}, "parameters.n"),
        ("generate", {"text_input": "a", "parameters": {"stream": True}}, "parameters.stream"),
        ("generate", {"text_input": "a", "parameters": {"nonsense": 1}}, "parameters.nonsense"),
        ("generate", {"text_input": "a", "parameters": {"max_tokens": 0}}, "parameters.max_tokens"),
        ("generate", {"text_input": "a", "parameters": {"exclude_input_in_output": 1}},
         "parameters.exclude_input_in_output"),
        ("generate", {"text_input": 5}, "text_input"),
        ("infer", {"inputs": []}, "inputs"),
        ("infer", {"inputs": [tensor("max_tokens", [1], "INT32")]}, "inputs"),
        ("infer", {"inputs": [prompts("a"), prompts("b")]}, "inputs"),
        ("infer", {"inputs": [tensor("text_input", ["a"], shape=[2])]}, "inputs[0]"),
        ("infer", {"inputs": [tensor("text_input", ["a"], shape=[1, 1, 1])]}, "inputs[0]"),
        ("infer", {"inputs": [tensor("text_input", [1])]}, "inputs[0].data"),
        ("infer", {"inputs": [tensor("text_input", [None])]}, "inputs[0].data"),
        ("infer", {"inputs": [tensor("text_input", ["a"], "COMPLEX")]}, "inputs[0].datatype"),
        ("infer", {"inputs": [tensor("input_ids", [], "INT32", [1, 0])]}, "inputs[0]"),
        ("infer", {"inputs": [tensor("input_ids", [True], "INT32", [1, 1])]}, "inputs[0].data"),
        ("infer", {"inputs": [prompts("a"), tensor("seed", [1, 2], "INT64")]}, "inputs[1]"),
        ("infer", {"inputs": [{**prompts("a"), "parameters": {"binary_data_size": 3}}]}, "inputs[0].parameters"),
        ("infer", {"inputs": [prompts("a")], "outputs": [{"name": "logits"}]}, "outputs[0]"),
        ("infer", {"inputs": [prompts(*["a"] * 300)]}, "inputs"),
    ],
)  # fmt: skip
def test_wrong_requests_have_the_protocols_form_of_errors(server, engine, path, body, param):
    response = server.post(f"{MODEL}/{path}", body)
    error = response.json()
    assert response.status_code == 400, error
    assert isinstance(error["error"], str)
    assert (error["param"], set(error)) == (param, {"error", "type", "param", "code"})
    assert engine.submitted == []


def infer_body(count):
    return {"inputs": [tensor("input_ids", [300] * count, "INT32", [-(-count // 64), 64]),
                       tensor("max_tokens", [1], "INT32")]}  # fmt: skip


@pytest.mark.parametrize("count", [64, 64 * 64])
@pytest.mark.parametrize("watched", ["completion_of_tensors", "_text"])
def test_many_elements_are_converted_in_another_thread(tokenizer, monkeypatch, count, watched):
    """The conversion checks each element, and the response repeats the text of each prompt."""
    threads = []
    original = getattr(endpoints, watched)

    def watch(*args):
        threads.append(threading.current_thread())
        return original(*args)

    monkeypatch.setattr(endpoints, watched, watch)
    with running(FakeEngine(tokenizer)) as server:
        assert server.post(f"{MODEL}/infer", infer_body(count)).status_code == 200
        assert {thread is server._thread for thread in threads} == {count == 64}


@pytest.mark.parametrize("count", [2, INLINE_ITEMS + 1])
def test_many_parameters_are_converted_in_another_thread(server, monkeypatch, count):
    threads = []
    original = endpoints.completion_of

    def watch(*args, **named):
        threads.append(threading.current_thread())
        return original(*args, **named)

    monkeypatch.setattr(endpoints, "completion_of", watch)
    for path in ("generate", "generate_stream"):
        server.post(f"{MODEL}/{path}", {"text_input": "a", "parameters": {"stop_token_ids": [[1] * count]}})
    assert [thread is server._thread for thread in threads] == [count == 2] * 2


def test_other_models_and_paths_are_unknown(server):
    for path in ("/v2/models/other", "/v2/models/other/ready"):
        response = server.http.get(path)
        assert (response.status_code, response.json()["code"]) == (404, "model_not_found")
    assert server.post("/v2/models/other/infer", {"inputs": [prompts("a")]}).status_code == 404
    assert "detail" not in server.http.get("/v2/nothing").json()
