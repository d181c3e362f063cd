"""Tests a table of bad requests over HTTP.

Each has an exact status, type and param, and a phrase of its message. No bad request reaches the engine.
"""

import contextlib
import json
import socket
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.datastructures import Headers

from llm_serving.server.errors import ForbiddenError
from llm_serving.server.fields.validation import request_error
from llm_serving.server.http.guard import check_origin
from llm_serving.server.openai.chat import ChatRequest
from llm_serving.server.state import ServerSettings
from support.http_server import MAX_BODY_BYTES, http_request, read_response
from support.small_configs import small_config

LONG = "hello " * 40
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": "a", **fields}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": USER, **fields}


def generate(**parameters: Any) -> tuple[str, dict[str, Any]]:
    return "/generate", {"inputs": "a", "parameters": parameters}


def dialect(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/chat", {"query": "a", **fields}


# each case: (path, body), expected param, phrase of the expected message
BAD_REQUESTS = [
    # fields that are missing or unknown
    ((COMPLETIONS, {}), "prompt", "Missing required parameter: 'prompt'."),
    ((CHAT, {"model": "fake-llama"}), "messages", "Missing required parameter: 'messages'."),
    (completion(temprature=1), "temprature", "argument supplied: temprature; did you mean 'temperature'?"),
    (chat(max_token=1), "max_token", "did you mean 'max_tokens'?"),
    (chat(colour=1), "colour", "Unrecognized request argument supplied: colour"),
    (completion(guided_json={}), "guided_json", "supplied: guided_json; use 'structured_outputs.json'"),
    (chat(functions=[{"name": "a"}]), "functions", "is not supported by this server; use 'tools' (got"),
    (completion(stream=True, stream_options={"usage": True}), "stream_options.usage", "Unrecognized request argument"),
    (completion(**{"x" * 5000: 1}), "x" * 80 + "...", "Unrecognized request argument supplied: xxxx"),
    # values of a wrong type
    (completion(temperature="1"), "temperature", 'should be a valid number; got "1".'),
    (completion(max_tokens=1.5), "max_tokens", "should be a valid integer; got 1.5."),
    (completion(max_tokens=True), "max_tokens", "should be a valid integer; got true."),
    (completion(stream="yes"), "stream", "should be a valid boolean"),
    (completion(stop=5), "stop", "should be a string or a list of strings; got 5."),
    (completion(stop=["a", 1]), "stop", "should be a string or a list of strings"),
    (completion(stop_token_ids=[1, "b"]), "stop_token_ids[1]", 'should be a valid integer; got "b".'),
    (completion(seed=1e30), "seed", "should be an integer of at most 64 bits; got 1e+30."),
    (completion(seed=1e15), "seed", "should be a valid integer; got 1000000000000000.0."),
    ((CHAT, {"messages": ["a"]}), "messages[0]", "'messages[0]' should be an object; got \"a\"."),
    (chat(response_format="json"), "response_format", "'response_format' should be an object; got \"json\"."),
    ((COMPLETIONS, {"prompt": 5}), "prompt", "should be text, token ids, or a list of either; got 5."),
    ((COMPLETIONS, {"prompt": None}), "prompt", "should be text, token ids, or a list of either; got null."),
    ((COMPLETIONS, {"prompt": ["a", 5]}), "prompt[1]", "should be text, token ids"),
    ((COMPLETIONS, {"prompt": [1, "a"]}), "prompt", "'prompt[1]' should be a token id; got \"a\"."),
    ((COMPLETIONS, {"prompt": [[1], [True]]}), "prompt[1]", "'prompt[1][0]' should be a token id; got true."),
    # numbers and lengths outside their range
    (completion(temperature=-0.1), "temperature", "greater than or equal to 0; got -0.1."),
    (completion(temperature=2.1), "temperature", "less than or equal to 2; got 2.1."),
    (completion(top_p=1.01), "top_p", "less than or equal to 1; got 1.01."),
    (completion(top_k=-2), "top_k", "greater than or equal to -1; got -2."),
    (completion(min_p=1.5), "min_p", "less than or equal to 1"),
    (completion(repetition_penalty=0), "repetition_penalty", "greater than 0; got 0."),
    (completion(presence_penalty=2.5), "presence_penalty", "less than or equal to 2"),
    (completion(frequency_penalty=-3), "frequency_penalty", "greater than or equal to -2"),
    (completion(max_tokens=0), "max_tokens", "greater than or equal to 1; got 0."),
    (completion(n=0), "n", "greater than or equal to 1"),
    (completion(n=65), "n", "less than or equal to 64; got 65."),
    (completion(seed=2**64), "seed", "should be an integer of at most 64 bits; got 1.8446744073709552e+19."),
    (completion(logprobs=21), "logprobs", "less than or equal to 20; got 21."),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs", "less than or equal to 20"),
    (completion(stop=["a"] * 17), "stop", "should hold at most 16 strings, not 17"),
    (completion(stop="a" * 257), "stop", "should hold strings of 1 to 256 characters, not 257"),
    (completion(stop=[""]), "stop", "should hold strings of 1 to 256 characters, not 0"),
    (completion(stop_token_ids=[1] * 65), "stop_token_ids", "at most 64 items"),
    (completion(model="x" * 300), "model", "at most 256 characters"),
    (completion(min_tokens=-1), "min_tokens", "greater than or equal to 0; got -1."),
    (completion(min_tokens=9, max_tokens=8), "min_tokens", "is 9 and the output has at most 8 tokens"),
    (completion(allowed_token_ids=[]), "allowed_token_ids", "at least 1 item"),
    (completion(allowed_token_ids=[5, 360]), "allowed_token_ids", "'allowed_token_ids[1]' is token id 360"),
    (completion(allowed_token_ids=[5] * 16385), "allowed_token_ids", "at most 16384 items"),
    (completion(allowed_token_ids=[2], min_tokens=1), "min_tokens", "together leave no token"),
    (completion(allowed_token_ids=[300], stop_token_ids=[300], min_tokens=1), "min_tokens", "together leave no token"),
    (completion(logit_bias=[5]), "logit_bias", "should be an object with token ids as names"),
    (completion(logit_bias={"a": 1}), "logit_bias", 'holds "a", which is not a token id, or occurs twice'),
    (completion(logit_bias={"5": 1, "05": 1}), "logit_bias", "occurs twice"),
    (completion(logit_bias={"5": 100.5}), "logit_bias", "holds 100.5 for token 5; it should be -100 to 100"),
    (completion(logit_bias={"5": True}), "logit_bias", "holds true for token 5"),
    (completion(logit_bias={str(one): 1 for one in range(1025)}), "logit_bias", "at most 1024 tokens, not 1025"),
    (chat(logit_bias={"360": 1}), "logit_bias", "has a value for token id 360; the model"),
    (chat(logit_bias={"5": 1}, use_beam_search=True), "logit_bias", "a beam search does not use it"),
    (completion(bad_words=["a"] * 257), "bad_words", "should hold at most 256 strings, not 257"),
    (completion(bad_words=[""]), "bad_words", "should hold strings of 1 to 256 characters, not 0"),
    (completion(bad_words=[5]), "bad_words", "should be a string or a list of strings"),
    (completion(use_beam_search=True, min_tokens=1), "min_tokens", "a beam search does not use it"),
    (chat(use_beam_search=True, bad_words=["a"]), "bad_words", "a beam search does not use it"),
    (chat(use_beam_search=True, allowed_token_ids=[5]), "allowed_token_ids", "a beam search does not use it"),
    # prompts that are empty, too long, or have unknown token ids
    ((COMPLETIONS, {"prompt": []}), "prompt", "'prompt' is an empty list"),
    ((COMPLETIONS, {"prompt": [[]]}), "prompt[0]", "'prompt[0]' holds no tokens."),
    ((COMPLETIONS, {"prompt": ["a"] * 257}), "prompt", "holds 257 prompts; the maximum is 256."),
    ((COMPLETIONS, {"prompt": ["a"] * 200, "n": 2}), "n", "make 400 sequences; the maximum for one request is 256."),
    ((COMPLETIONS, {"prompt": [1, 360]}), "prompt", "'prompt[1]' is token id 360; the model's vocabulary has ids 0 to"),
    ((COMPLETIONS, {"prompt": [-1]}), "prompt", "is token id -1"),
    ((COMPLETIONS, {"prompt": "x" * 5000}), "prompt", "has 5000 characters; more than"),
    # fields that contradict each other
    (completion(best_of=2), "best_of", "'best_of' is 2 and n is 1; only equal values are supported."),
    (completion(echo=True, logprobs=1, stream=True), "stream", "'stream' with 'echo' is not supported"),
    (completion(prompt_logprobs=1, use_beam_search=True), "use_beam_search", "with 'prompt_logprobs' is not supported"),
    (completion(prompt_logprobs=21), "prompt_logprobs", "less than or equal to 20; got 21."),
    (completion(echo=True, max_tokens=0), "max_tokens", "greater than or equal to 1; got 0."),
    (completion(stream_options={"include_usage": True}), "stream_options", "only allowed when 'stream' is true."),
    (chat(top_logprobs=2), "top_logprobs", "only allowed when 'logprobs' is true."),
    (chat(max_tokens=4, max_completion_tokens=5), "max_tokens", "is 4 and 'max_completion_tokens' is 5; give one."),
    # fields that ask for a feature that this server does not support
    (completion(suffix="z"), "suffix", "'suffix' is not supported by this server; leave it out (got \"z\")."),
    (chat(tools=[{"type": "function"}]), "tools[0].function", "Missing required parameter"),
    (chat(functions=[{}]), "functions", "'functions' is not supported"),
    (chat(response_format={"type": "xml"}), "response_format.type", "'json_object'"),
    (chat(structured_outputs={"json": {"not": {}}}), "structured_outputs.json", "Unimplemented keys"),
    (chat(structured_outputs={"json": f'{{"multipleOf": {10**399}}}'}), "structured_outputs.json", "out of range"),
    (
        chat(structured_outputs={"grammar": f'start: %json {{"multipleOf": {10**399}}}\n'}),
        "structured_outputs.grammar",
        "out of range",
    ),
    (chat(modalities=["text", "audio"]), "modalities", "'modalities' is not supported"),
    (chat(reasoning_effort="much"), "reasoning_effort", "'minimal'"),
    # chats whose messages are missing or malformed
    ((CHAT, {"messages": []}), "messages", "should have at least 1 item"),
    ((CHAT, {"messages": "hi"}), "messages", "should be a valid list"),
    ((CHAT, {"messages": [{"content": "hi"}]}), "messages[0].role", "Missing required parameter: 'messages[0].role'."),
    ((CHAT, {"messages": [{"role": "user"}]}), "messages[0].content", "Missing required parameter"),
    ((CHAT, {"messages": [*USER, {"role": "robot", "content": "x"}]}), "messages[1].role", "'system', 'developer',"),
    ((CHAT, {"messages": [{"role": "user", "content": None}]}), "messages[0].content", "should be a valid string"),
    (
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}),
        "messages[0].content[0].image_url",
        "is an image, and this model reads only text",
    ),
    (
        (CHAT, {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}]}),
        "messages[0].tool_calls[0].function",
        "Missing required parameter",
    ),
    # requests to /generate and /chat, the routes of the published MindSpore serving project
    (("/generate", {"inputs": ["a"]}), "inputs", "should be a valid string"),
    (generate(max_new_tokens="many"), "parameters.max_new_tokens", "should be a valid integer"),
    (generate(top_p="nan"), "parameters.top_p", "should be a finite number"),
    (generate(best_of=2), "parameters.best_of", "'parameters.best_of' is not supported"),
    (generate(beams=2), "parameters.beams", "Unrecognized request argument supplied: parameters.beams"),
    (dialect(history=[["a"]]), "history", "holds an entry [0] that is not a [query, answer] pair of strings"),
    (dialect(history=[{"role": "robot", "content": "x"}]), "history[0].role", "'assistant' or 'observation'"),
    (dialect(gen_kwargs={"num_beams": 4}), "gen_kwargs.num_beams", "'gen_kwargs.num_beams' is not supported"),
    (dialect(gen_kwargs={"max_length": 0}), "gen_kwargs.max_length", "greater than or equal to 1"),
    (("/stream_chat_post", {"request_id": "1"}), "query", "Missing required parameter: 'query'."),
    # requests to /tokenize and /detokenize
    (("/tokenize", {}), "prompt", "Give either 'prompt' or 'messages'."),
    (("/tokenize", {"prompt": "a", "messages": USER}), "prompt", "Give either 'prompt' or 'messages'."),
    (("/detokenize", {"tokens": [5, 360]}), "tokens", "'tokens[1]' is token id 360"),
    (("/detokenize", {"tokens": [5, "a"]}), "tokens[1]", "should be a valid integer"),
    (("/detokenize", {"tokens": "5"}), "tokens", "should be a valid list"),
]  # fmt: skip


def error_of(response) -> dict[str, Any]:
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    return body["error"]


@pytest.mark.parametrize(("request_", "param", "phrase"), BAD_REQUESTS)
def test_a_bad_request(server, request_, param, phrase, record_property):
    path, body = request_
    response = server.post(path, body)
    record_property("wrong_statuses", f"{response.status_code != 400:d} of 1")
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert phrase in error["message"]
    assert server.engine.submitted == []


def test_a_very_long_field_is_not_compared_with_known_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison takes time and memory for each of the field's characters, of which a body can have millions."""
    monkeypatch.setattr("difflib.get_close_matches", lambda word, *_, **__: pytest.fail(f"{len(word)} characters"))
    with pytest.raises(ValidationError) as wrong:
        ChatRequest.model_validate({"messages": USER, "x" * 5000: 1})
    assert str(request_error(wrong.value, ChatRequest)).startswith("Unrecognized request argument supplied: xxxx")


# each case: path, body, expected param, phrase of the expected message
TOO_LONG = [
    (
        *completion(max_tokens=127),
        "max_tokens",
        "However, you requested 129 tokens (2 in the prompt, 127 in the output).",
    ),
    (*completion(prompt=[5] * 101), "prompt", "has 101 tokens; the maximum is 100"),
    (*completion(prompt=LONG * 3), "prompt", "tokens; the maximum is 100"),
    (*completion(prompt=["a", [5] * 101]), "prompt[1]", "has 101 tokens"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 3000}]}, "messages", "more than"),
    (*chat(max_completion_tokens=200), "max_completion_tokens", "maximum context length is 128 tokens"),
    (*generate(max_new_tokens=127), "parameters.max_new_tokens", "maximum context length is 128 tokens"),
    (*dialect(gen_kwargs={"max_length": 500}), "gen_kwargs.max_length", "lower gen_kwargs.max_length."),
]


@pytest.mark.parametrize(("path", "body", "param", "phrase"), TOO_LONG)
def test_prompts_longer_than_the_context_are_refused(server, path, body, param, phrase):
    response = server.post(path, body)
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert phrase in error["message"]
    assert server.engine.submitted == []


# each case: body, expected status, expected code, phrase of the expected message
BAD_BODIES = [
    (b"", 400, "invalid_json", "The request body is empty"),
    (b"{", 400, "invalid_json", "is not valid JSON"),
    (b"[1]", 400, "invalid_json", "must be a JSON object, not an array."),
    (b'"a"', 400, "invalid_json", "must be a JSON object, not a string."),
    (b"null", 400, "invalid_json", "must be a JSON object, not null."),
    (b'{"prompt": "a", "temperature": NaN}', 400, "invalid_json", "is not valid JSON"),
    (b'{"prompt": "a", "temperature": Infinity}', 400, "invalid_json", "is not valid JSON"),
    (b'{"prompt": "a", "temperature": 1e999}', 400, "invalid_json", "infinity"),
    (b'{"prompt": "\\ud800"}', 400, "invalid_json", "is not valid JSON"),
    (b'{"prompt": "\xff"}', 400, "invalid_json", "is not UTF-8: byte 0xff at offset 12."),
    (b'{"prompt": "a"} x', 400, "invalid_json", "is not valid JSON"),
    (b'{"prompt": ' + b"[" * 40 + b"]" * 40 + b"}", 400, "invalid_json", "nested deeper than 32 levels"),
    (b'{"prompt": "a", "max_tokens": 1, "max_tokens": 9}', 400, "invalid_json", "duplicate key 'max_tokens', 2 times"),
    (b'{"messages": [{"role": "user", "content": "a", "content": "b:c"}]}', 400, "invalid_json", "duplicate key"),
    (b'{"prompt": "a", "x": {"a": [{"b": 1, "\\u0062": 2}]}}', 400, "invalid_json", "duplicate key 'b'"),
    (b'{"a": ' * 20000 + b"1" + b"}" * 20000, 413, "payload_too_large", f"the maximum is {MAX_BODY_BYTES} bytes"),
    (b'{"a":' * 8000 + b"1" + b"}" * 8000, 400, "invalid_json", "nested deeper than 32 levels"),
    (b"[" * 60000, 400, "invalid_json", "is not valid JSON"),
    (
        b'{"prompt": "' + b"x" * MAX_BODY_BYTES + b'"}',
        413,
        "payload_too_large",
        f"the maximum is {MAX_BODY_BYTES} bytes",
    ),
]


@pytest.mark.parametrize(("body", "status", "code", "phrase"), BAD_BODIES, ids=range(len(BAD_BODIES)))
def test_a_bad_body(server, body, status, code, phrase, record_property):
    response = server.http.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    record_property("wrong_statuses", f"{response.status_code != status:d} of 1")
    error = error_of(response)
    assert (response.status_code, error["type"], error["code"]) == (status, "invalid_request_error", code)
    assert phrase in error["message"]
    assert server.engine.submitted == []


def test_brackets_in_strings_are_not_nesting(server):
    prompt = '[{"\\' * 20
    assert server.post(COMPLETIONS, {"prompt": prompt}).status_code == 200


# each case: header, expected status, phrase of the expected message
BAD_HEADERS = [
    ("Content-Type: text/plain", 415, "The content type is 'text/plain'; send 'Content-Type: application/json'."),
    ("Content-Type: application/x-www-form-urlencoded", 415, "send 'Content-Type: application/json'."),
    ("Content-Type: multipart/form-data; boundary=x", 415, "'multipart/form-data'"),
    ("Content-Type: ", 415, "The request has no content type; send"),
    ("Content-Type: application/json; charset=utf-16", 415, "The charset is 'utf-16'; send JSON as UTF-8."),
    ("Content-Encoding: gzip", 415, "send the body uncompressed"),
    ("Content-Length: 99999999", 413, f"has 99999999 bytes; the maximum is {MAX_BODY_BYTES} bytes"),
    ("Origin: https://evil.example", 403, "web pages of another origin ('https://evil.example')"),
    ("Origin: null", 403, "another origin"),
    ("Host: evil.example", 403, "The host 'evil.example' is not a name of this server"),
    ("Host: evil.example:8835", 403, "is not a name of this server"),
]


@pytest.mark.parametrize(("header", "status", "phrase"), BAD_HEADERS)
def test_a_bad_header(server, header, status, phrase, record_property):
    with server.raw(http_request(COMPLETIONS, b'{"prompt": "a"}', header)) as connection:
        answered, _, body = read_response(connection)
    record_property("wrong_statuses", f"{answered != status:d} of 1")
    assert answered == status
    assert phrase in json.loads(body)["error"]["message"]
    assert server.engine.submitted == []


HOSTILE_IDS = {
    "plain": b"the-id-of-another-request",
    "empty": b"",
    "long": b"a" * (1 << 20),
    "carriage_return": b"a\rX-Injected: 1",
    "line_feed": b"a\nX-Injected: 1",
    "line_end": b"a\r\nX-Injected: 1",
    "null": b"a\x00b",
    "latin": "\xe9".encode("latin-1"),
    "utf_8": "\u6f22\U0001f600".encode(),
    "bad_utf_8": b"\xff\xfe\x80",
    "log_line": b'"}{"event": "forged"',
}


@pytest.mark.parametrize("value", HOSTILE_IDS.values(), ids=HOSTILE_IDS)
def test_a_hostile_request_id_changes_no_response(server, value, record_property):
    """The server makes its own ids. Eight requests send the same id at once, and a ninth without it runs beside them.

    A request whose header is not valid HTTP, or is too long, gets a 400 or 431.
    """
    body = b'{"prompt": "a"}'
    hostile = http_request(COMPLETIONS, body, "X-Request-Id: VALUE").replace(b"VALUE", value)
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(server.raw(b"")) for _ in range(8)]
        neighbour = stack.enter_context(server.raw(http_request(COMPLETIONS, body)))
        for connection in others:
            with contextlib.suppress(ConnectionError):  # the server may close before it has read a long header
                connection.sendall(hostile)
        status, headers, content = read_response(neighbour)
        expected = json.loads(content)
        responses = [response for connection in others if (response := read_if_open(connection)) is not None]
    assert (status, headers["x-request-id"]) == (200, expected["id"])
    wrong = [reply for reply in responses if not is_right_reply(reply, value, expected["choices"])]
    served = [head["x-request-id"] for code, head, _ in responses if code == 200]
    num_repeated = len(served) + 1 - len({*served, expected["id"]})
    record_property("wrong_responses", f"{len(wrong) + num_repeated} of {len(responses) + 1}")
    assert (wrong, num_repeated) == ([], 0)
    assert len(responses) == 8 or len(value) == 1 << 20


def read_if_open(connection):
    """Returns the response, or None if the server has reset the connection before it was read."""
    try:
        return read_response(connection)
    except ConnectionError:
        return None


def is_right_reply(reply, hostile, choices):
    """Returns True if a reply has the right text and an id of the server, or is a refusal of the header."""
    status, headers, content = reply
    if status != 200:
        return status in (400, 431)
    body = json.loads(content)
    is_own = headers["x-request-id"] == body["id"] and body["id"].encode() != hostile
    return is_own and "x-injected" not in headers and body["choices"] == choices


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:1234", "127.0.0.1", "[::1]:99", "app.localhost:5", "10.1.2.3"]
)
def test_hosts_that_mean_this_machine(server, host):
    with server.raw(
        http_request(COMPLETIONS, b'{"prompt": "a"}', f"Host: {host}", f"Origin: http://{host}")
    ) as connection:
        assert read_response(connection)[0] == 200


@pytest.mark.parametrize(("allow_remote", "allowed", "accepted", "refused"), [
    ("false", "null", ["127.0.0.1"], ["llm.example", socket.gethostname() + ".evil.example"]),
    ("true", "null", [socket.gethostname(), "10.9.8.7"], ["llm.example"]),
    ("true", "[LLM.example]", ["llm.example:8835", "LLM.EXAMPLE"], ["evil.example", "x.llm.example"]),
    ("true", "['*']", ["evil.example"], []),
])  # fmt: skip
def test_allowed_hosts(tmp_path, allow_remote, allowed, accepted, refused):
    overrides = [f"serving_config.allow_remote={allow_remote}", f"serving_config.allowed_hosts={allowed}"]
    overrides.append("serving_config.allow_remote_unprotected=true")
    settings = ServerSettings.from_config(small_config(tmp_path, overrides))
    for host in accepted:
        check_origin(Headers({"host": host}), settings)
    for host in refused:
        with pytest.raises(ForbiddenError, match=r"add the name to serving_config\.allowed_hosts"):
            check_origin(Headers({"host": host}), settings)


def test_a_charset_of_utf_8_is_fine(server):
    with server.raw(
        http_request(COMPLETIONS, b'{"prompt": "a"}', "Content-Type: Application/JSON; Charset=UTF-8")
    ) as connection:
        assert read_response(connection)[0] == 200


# each case: method, path, expected status, phrase of the expected message, expected code
BAD_URLS = [
    ("GET", "/nowhere", 404, "Unknown URL: GET /nowhere", None),
    ("POST", "/v1/images", 404, "Unknown URL: POST /v1/images", None),
    ("POST", "/v1/completions/", 404, "Unknown URL", None),
    ("GET", "/../../etc/passwd", 404, "Unknown URL", None),
    ("GET", "/v1/completions", 405, "does not take GET; use POST.", None),
    ("DELETE", "/v1/models", 405, "does not take DELETE; use ", None),
    ("OPTIONS", "/v1/chat/completions", 405, "does not take OPTIONS; use POST.", None),
    (
        "GET",
        "/v1/models/other",
        404,
        'The model "other" does not exist; this server serves "fake-llama".',
        "model_not_found",
    ),
    ("POST", "/models/other/generate", 404, 'The model "other" does not exist', "model_not_found"),
    ("POST", "/models/other/generate_stream", 404, 'The model "other" does not exist', "model_not_found"),
]


@pytest.mark.parametrize(("method", "path", "status", "phrase", "code"), BAD_URLS)
def test_a_bad_url_is_refused(server, method, path, status, phrase, code):
    with server.raw(http_request(path, b'{"prompt": "a"}', method=method)) as connection:
        answered, headers, body = read_response(connection)
    error = json.loads(body)["error"]
    assert (answered, error["type"], error["code"]) == (status, "invalid_request_error", code)
    assert phrase in error["message"]
    assert ("allow" in headers) == (status == 405)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_model_that_is_not_served(server, path):
    body = {"model": "gpt-4", "prompt": "a"} if path == COMPLETIONS else {"model": "gpt-4", "messages": USER}
    response = server.post(path, body)
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")


def test_the_server_is_unharmed_by_all_of_it(server):
    response = server.post(COMPLETIONS, {"prompt": "a"})
    assert response.status_code == 200
    assert response.json()["choices"][0]["finish_reason"] == "stop"
    assert server.log.named("internal_error") == []
