"""Tests files and batches over HTTP with a scripted engine: results, broken lines, limits, tenants and restarts."""

from __future__ import annotations

import json
import re
import stat
import time
from collections import Counter
from contextlib import contextmanager

import pytest

from llm_serving.config.batch_section import BatchConfig
from llm_serving.errors import ConfigError, QueueFullError
from llm_serving.server.batches.disk import cut_partial_line, lines_of
from llm_serving.server.batches.multipart import FormParser, InvalidFormError, PartBegin, PartData
from llm_serving.server.batches.store import BatchStore
from llm_serving.server.limits import MAX_PRIORITY
from support.access_keys import access_for, secret_of
from support.fake_engine import FakeEngine
from support.http_server import running, wait_until
from support.lazy_module import LazyModule
from support.time_limits import time_limit

openai = LazyModule("openai")
CHAT = "/v1/chat/completions"


def line(custom_id, url=CHAT, method="POST", **body):
    shown = body or {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": shown})


@contextmanager
def batch_server(tokenizer, folder, access=None, **limits):
    warnings = []
    store = BatchStore(BatchConfig(folder=str(folder), **limits), warnings.append)
    with running(FakeEngine(tokenizer), access, batches=store) as server:
        server.warnings = warnings
        yield server


@pytest.fixture
def batches(tokenizer, tmp_path):
    with batch_server(tokenizer, tmp_path / "batches") as server:
        server.folder = tmp_path / "batches"
        yield server


def client_of(server, key="none"):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def upload(client, lines, name="in.jsonl"):
    return client.files.create(file=(name, "\n".join(lines).encode()), purpose="batch").id


def begin(client, lines, endpoint=CHAT, **more):
    file = upload(client, lines)
    return client.batches.create(input_file_id=file, endpoint=endpoint, completion_window="24h", **more)


def ended(client, batch, states=("completed",)):
    deadline = time.monotonic() + time_limit(10)
    while True:
        found = client.batches.retrieve(batch.id)
        if found.status in ("completed", "failed", "cancelled", "expired"):
            assert found.status in states, found
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.01)


def entries(client, file_id):
    return [json.loads(text) for text in client.files.content(file_id).read().splitlines()]


def error_of(call):
    with pytest.raises(openai.APIStatusError) as caught:
        call()
    return caught.value.status_code, caught.value.code, caught.value.param


def test_a_batch_answers_each_line_and_broken_lines_are_errors(batches):
    client = client_of(batches)
    lines = [
        line("a"),
        "{broken",
        line("b", temperature=9),
        "[1]",
        line("a"),  # a repeated custom_id
        line("c", url="/v1/completions"),
        line("d", method="GET"),
        json.dumps({"method": "POST", "url": CHAT, "body": {}}),
        "",
        line("e", messages=[{"role": "user", "content": "Hi"}], stream=True),
        line("f", messages=[{"role": "user", "content": "x" * 70_000}]),
        line("g"),
    ]
    batch = begin(client, lines, metadata={"who": "me"})
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"who": "me"})
    done = ended(client, batch)
    assert done.request_counts.model_dump() == {"total": 11, "completed": 2, "failed": 9}
    output, errors = entries(client, done.output_file_id), entries(client, done.error_file_id)
    assert sorted(entry["custom_id"] for entry in output) == ["a", "g"]
    for entry in output:
        assert entry["error"] is None
        assert entry["response"]["status_code"] == 200
        assert entry["response"]["body"]["choices"][0]["message"]["content"]
    codes = Counter(entry["error"]["code"] for entry in errors if entry["error"])
    assert codes == {
        "invalid_json_line": 1, "invalid_request": 1, "duplicate_custom_id": 1, "mismatched_endpoint": 1,
        "invalid_method": 1, "invalid_custom_id": 1, "unsupported_parameter": 1, "line_too_long": 1,
    }  # fmt: skip
    [refused] = [entry for entry in errors if entry["response"]]
    assert (refused["custom_id"], refused["response"]["status_code"]) == ("b", 400)
    assert refused["response"]["body"]["error"]["param"] == "temperature"
    [broken] = [entry for entry in errors if (entry["error"] or {}).get("code") == "invalid_json_line"]
    assert broken["error"]["message"].startswith("Line 2 is not valid JSON")
    for entry in errors:
        if entry["error"]:
            assert entry["error"].keys() == {"message", "type", "param", "code", "line"}
            assert entry["error"]["type"] == "invalid_request_error"
            assert entry["error"]["message"].startswith(f"Line {entry['error']['line']} ")
    found = {entry["error"]["line"]: entry["error"]["param"] for entry in errors if entry["error"]}
    assert found == {
        2: "line", 4: "line", 5: "custom_id", 6: "url", 7: "method", 8: "custom_id", 10: "body.stream", 11: "line",
    }  # fmt: skip
    [long] = [entry["error"]["message"] for entry in errors if (entry["error"] or {}).get("code") == "line_too_long"]
    assert re.search(r"more than \d+ bytes \(serving_config.max_body_bytes\)", long)
    assert {request.scheduling.priority for request in batches.engine.submitted} == {MAX_PRIORITY}
    [event] = batches.log.named("batch_end")
    assert (event["status"], event["lines"], event["failed"]) == ("completed", 11, 9)


def test_completions_are_possible_too(batches):
    client = client_of(batches)
    lines = [line(str(i), "/v1/completions", prompt="a", max_tokens=2, n=2) for i in range(5)]
    done = ended(client, begin(client, lines, "/v1/completions"))
    assert done.error_file_id is None
    assert [len(entry["response"]["body"]["choices"]) for entry in entries(client, done.output_file_id)] == [2] * 5
    refused = ended(client, begin(client, [line("x", "/v1/embeddings", input="a")], "/v1/embeddings"))
    [entry] = entries(client, refused.error_file_id)
    assert entry["response"]["body"]["error"]["code"] == "unsupported_task"


def test_lines_run_in_parallel_up_to_the_limit(tokenizer, tmp_path):
    with batch_server(tokenizer, tmp_path, max_parallel=3) as server:
        client, most = client_of(server), 0
        server.engine.delay_s = 0.005
        batch = begin(client, [line(str(i)) for i in range(30)])
        while client.batches.retrieve(batch.id).status != "completed":
            most = max(most, server.engine.num_open)
        assert most == 3


def test_a_full_queue_delays_lines_and_fails_none(batches):
    client = client_of(batches)
    batches.engine.full = QueueFullError("full", retry_after_s=0.01)
    batch = begin(client, [line("a"), line("b")])
    wait_until(lambda: len(batches.engine.asked_for) >= 2)
    assert client.batches.retrieve(batch.id).status == "in_progress"
    batches.engine.full = None
    assert ended(client, batch).request_counts.completed == 2


def test_a_batch_can_be_cancelled(batches):
    client = client_of(batches)
    batches.engine.delay_s = 30
    batch = begin(client, [line(str(i)) for i in range(40)])
    wait_until(lambda: batches.engine.num_open > 0)
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = ended(client, batch, ("cancelled",))
    assert done.cancelled_at is not None
    assert (done.output_file_id, done.request_counts.completed) == (None, 0)
    wait_until(lambda: batches.engine.num_open == 0)
    assert all(request.aborted for request in batches.engine.submitted)
    assert error_of(lambda: client.batches.cancel(batch.id)) == (400, "invalid_value", "batch_id")


def test_lines_of_an_expired_batch_are_errors(batches, monkeypatch):
    client = client_of(batches)
    batches.engine.delay_s = 30
    monkeypatch.setattr("llm_serving.server.batches.endpoints._HOUR_S", 0.02)
    done = ended(client, begin(client, [line(str(i)) for i in range(20)]), ("expired",))
    found = entries(client, done.error_file_id)
    assert sorted(int(entry["custom_id"]) for entry in found) == list(range(20))
    assert {entry["error"]["code"] for entry in found} == {"batch_expired"}
    assert {entry["error"]["param"] for entry in found} == {"completion_window"}


def test_a_restart_computes_only_lines_without_a_result(tokenizer, tmp_path):
    lines = [line(str(i)) for i in range(60)]
    with batch_server(tokenizer, tmp_path, max_parallel=4) as server:
        server.engine.delay_s = 0.002
        batch = begin(client_of(server), lines)
        wait_until(lambda: len(server.engine.submitted) > 20)
    [output] = [path for path in tmp_path.glob("*/files/*.data") if not path.with_suffix(".json").exists()
                and path.stat().st_size]  # fmt: skip
    before = output.read_bytes()
    assert 0 < before.count(b"\n") < 60
    output.write_bytes(before + b'{"id":"batch_req_0_59","cus')  # as after a server was killed during a write
    with batch_server(tokenizer, tmp_path, max_parallel=4) as server:
        client = client_of(server)
        done = ended(client, batch)
        names = [entry["custom_id"] for entry in entries(client, done.output_file_id)]
        assert sorted(map(int, names)) == list(range(60))
        assert len(server.engine.submitted) == 60 - before.count(b"\n")
        assert done.request_counts.model_dump() == {"total": 60, "completed": 60, "failed": 0}
        assert client.files.content(done.output_file_id).read().startswith(before)
        assert server.warnings == []


def test_files_are_listed_read_and_deleted(batches):
    client = client_of(batches)
    first, second = upload(client, ["1"], "../../evil\n.jsonl"), upload(client, ["22"])
    assert client.files.retrieve(first).filename == "evil%0A.jsonl"
    assert client.files.retrieve(second).bytes == 2
    assert {file.id for file in client.files.list()} == {first, second}
    page = client.files.list(limit=1, order="asc")
    assert [file.id for file in page] == [file.id for file in client.files.list(order="asc")]
    assert client.files.content(second).read() == b"22"
    assert client.files.delete(second).deleted
    assert error_of(lambda: client.files.content(second)) == (404, "file_not_found", "file_id")
    batches.engine.delay_s = 30
    batch = client.batches.create(input_file_id=first, endpoint=CHAT, completion_window="7d")
    assert error_of(lambda: client.files.delete(first)) == (409, "file_in_use", "file_id")
    ended(client, batch)  # its only line is no JSON object
    assert client.files.delete(first).deleted


def test_everything_on_disk_is_private_and_named_by_the_server(batches):
    client = client_of(batches)
    ended(client, begin(client, [line("a"), "x"]))
    paths = list(batches.folder.rglob("*"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_file()} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_dir()} == {0o700}
    assert not list(batches.folder.rglob("*.part"))


@pytest.mark.parametrize("name", ["..%2f..%2fetc%2fpasswd", "file-..", "..", "%2e%2e", "file-" + "0" * 24, "a" * 500])
def test_ids_of_clients_never_become_paths(batches, name):
    for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/batches/{name}"):
        assert batches.http.get(path).status_code == 404
    body = {"input_file_id": name[:200], "endpoint": CHAT, "completion_window": "24h"}
    response = batches.post("/v1/batches", body)
    assert response.status_code == 404, response.text


def test_keys_do_not_see_each_others_files_and_lines_count_for_their_key(tokenizer, tmp_path):
    access = access_for(tmp_path, "alice requests_per_minute=200", "bob")
    with batch_server(tokenizer, tmp_path / "batches", access) as server:
        alice, bob = client_of(server, secret_of("alice")), client_of(server, secret_of("bob"))
        batch = begin(alice, [line(str(i)) for i in range(3)])
        assert error_of(lambda: bob.batches.retrieve(batch.id)) == (404, "batch_not_found", "batch_id")
        assert error_of(lambda: bob.batches.cancel(batch.id)) == (404, "batch_not_found", "batch_id")
        assert error_of(lambda: bob.files.content(batch.input_file_id))[0] == 404
        assert error_of(lambda: bob.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT,
                                                   completion_window="24h")) == (404, "file_not_found", "input_file_id")
        assert list(bob.files.list()) == list(bob.batches.list()) == []
        done = ended(alice, batch)
        assert {request.scheduling.tenant for request in server.engine.submitted} == {"alice"}
        assert done.request_counts.completed == 3
        assert error_of(lambda: client_of(server).files.list())[0] == 401


def test_limits_name_their_setting(tokenizer, tmp_path):
    limits = {"max_file_bytes": 1024, "max_files": 3, "max_lines": 2, "max_waiting_batches": 1}
    with batch_server(tokenizer, tmp_path, **limits) as server:
        client = client_of(server)
        with pytest.raises(openai.APIStatusError, match="max_file_bytes") as caught:
            upload(client, ["x" * 2000])
        assert caught.value.status_code == 413
        for lines, code in (([line("a")] * 3, "too_many_lines"), (["", "  "], "empty_file")):
            done = ended(client, begin(client, lines), ("failed",))
            assert [error.code for error in done.errors.data] == [code]
        server.engine.delay_s = 30
        batch = begin(client, [line("a")])
        with pytest.raises(openai.BadRequestError, match="max_files"):
            upload(client, [line("a")])
        with pytest.raises(openai.BadRequestError, match="max_waiting_batches"):
            client.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
    assert not list(tmp_path.rglob("*.part"))


def test_results_beyond_the_space_of_a_key_end_the_batch(tokenizer, tmp_path):
    with batch_server(tokenizer, tmp_path, max_bytes_per_key=4096 * 2 + 700) as server:
        client = client_of(server)
        done = ended(client, begin(client, [line(str(i)) for i in range(8)]), ("failed",))
        assert [error.code for error in done.errors.data] == ["storage_limit_exceeded"]
        assert len(entries(client, done.output_file_id)) == done.request_counts.completed == 1
        with pytest.raises(openai.BadRequestError, match="max_bytes_per_key"):
            upload(client, [line("a")] * 4)


def test_a_folder_has_one_server_and_foreign_records_are_ignored(tokenizer, tmp_path):
    with batch_server(tokenizer, tmp_path) as server:
        upload(client_of(server), ["1"])
        with pytest.raises(ConfigError, match="used by another server"):
            BatchStore(BatchConfig(folder=str(tmp_path)), print)
    [record] = tmp_path.glob("*/files/*.json")
    record.with_name("file-x.json").write_text("{}")
    record.with_name("file-y.part").write_text("rest of a killed upload")
    with batch_server(tokenizer, tmp_path) as server:
        assert len(list(client_of(server).files.list())) == 1
        assert [text.rpartition("/")[2] for text in server.warnings] == [
            "file-x.json is not a record of this server; it is ignored"
        ]
        assert not list(tmp_path.rglob("*.part"))


def test_wrong_requests_are_refused(batches):
    client, url = client_of(batches), "/v1/files"
    file = upload(client, ["1"])
    good = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    for change, param in (({"completion_window": "0h"}, "completion_window"), ({"endpoint": "/chat"}, "endpoint"),
                          ({"metadata": {"a": "b" * 600}}, "metadata"), ({"x": 1}, "x")):  # fmt: skip
        response = batches.post("/v1/batches", {**good, **change})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert error_of(lambda: client.files.create(file=b"1", purpose="fine-tune"))[2] == "purpose"
    post = batches.http.post
    assert post(url, json={}).json()["error"]["code"] == "invalid_form"
    assert post(url, files={"file": b"1"}).json()["error"]["param"] == "purpose"
    assert post(url, data={"purpose": "batch"}, files={"other": b"1"}).json()["error"]["param"] == "other"
    headers = {"content-type": "multipart/form-data; boundary=B"}
    assert post(url, content=b"--B\r\nnonsense", headers=headers).json()["error"]["code"] == "invalid_form"
    assert batches.http.get(f"{url}?limit=0").json()["error"]["param"] == "limit"
    assert batches.http.get(f"{url}?after=x").json()["error"]["param"] == "after"


def test_without_a_folder_the_error_shows_how_to_turn_it_on(server):
    for response in (server.http.get("/v1/files"), server.http.get("/v1/batches"), server.post("/v1/files", {})):
        assert (response.status_code, response.json()["error"]["code"]) == (400, "batches_off")
        assert "--set batch_config.folder=" in response.json()["error"]["message"]


FORM = (
    b'preamble\r\n--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--B\r\n'
    b'content-disposition: form-data; name="file"; filename="a.jsonl"\r\nContent-Type: text/plain\r\n\r\n'
    b"one\r\n--Bx\r\n\r\n--B--\r\nepilogue"
)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 11, 1000])
def test_a_form_is_the_same_in_chunks_of_any_size(size):
    parser, parts = FormParser(b"B"), []
    broken = FORM.replace(b"\r\n--Bx\r\n\r\n--B--", b"\r\n--C\r\n\r\n--B--")
    for at in range(0, len(broken), size):
        for event in parser.feed(broken[at : at + size]):
            if isinstance(event, PartBegin):
                parts.append([event.name, event.filename, b""])
            else:
                assert isinstance(event, PartData)
                parts[-1][2] += event.data
    assert parser.is_complete
    assert parts == [["purpose", None, b"batch"], ["file", "a.jsonl", b"one\r\n--C\r\n"]]
    with pytest.raises(InvalidFormError):
        list(FormParser(b"B").feed(FORM))


def test_lines_have_numbers_and_a_partial_last_line_is_cut(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"ab\n\n" + b"x" * 3_000_000 + b"\r\n cd \nrest")
    assert list(lines_of(path, 10)) == [(1, b"ab"), (3, None), (4, b"cd"), (5, b"rest")]
    assert cut_partial_line(path) == 3_000_011
    assert path.read_bytes().endswith(b" cd \n")
    path.write_bytes(b"x" * 3_000_000)
    assert cut_partial_line(path) == path.stat().st_size == 0
