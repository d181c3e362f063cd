"""Kills a real server in the middle of a batch. The next server computes only the lines without a result."""

from __future__ import annotations

import json
import signal
import time

from support.lazy_module import LazyModule
from support.processes import has_ended
from support.server_process import ServerProcess, running_server
from support.time_limits import time_limit

openai = LazyModule("openai")
CHAT = "/v1/chat/completions"
LINES = 120


def line(number):
    body = {
        "messages": [{"role": "user", "content": f"Count to {number}."}], "max_tokens": 24, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    return json.dumps({"custom_id": str(number), "method": "POST", "url": CHAT, "body": body})


def client_of(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def until(condition):
    deadline = time.monotonic() + time_limit(60)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def results(folder, input_id):
    """Returns the contents of the files of results, by id."""
    paths = (folder / "batches").glob("*/files/*.data")
    return {path.stem: path.read_bytes() for path in paths if path.stem != input_id}


def num_lines(content):
    return content.count(b"\n")


def test_a_killed_server_leaves_each_line_exactly_once(tmp_path):
    settings = [f"batch_config.folder={tmp_path / 'batches'}", "batch_config.max_parallel=6"]
    first = ServerProcess(tmp_path, settings).wait_ready()
    client = client_of(first)
    lines = [line(number) for number in range(LINES)]
    lines[50] = "broken"
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    until(lambda: sum(map(num_lines, results(tmp_path, file.id).values())) >= LINES // 4)
    agents = first.agents()
    first.stop(signal.SIGKILL)
    assert not [agent for agent in agents if not has_ended(agent)]
    done = results(tmp_path, file.id)
    assert LINES // 4 <= sum(map(num_lines, done.values())) < LINES
    with running_server(tmp_path / "second", settings) as second:
        client = client_of(second)
        until(lambda: client.batches.retrieve(batch.id).status == "completed")
        ended = client.batches.retrieve(batch.id)
        assert ended.request_counts.model_dump() == {"total": LINES, "completed": LINES - 1, "failed": 1}
        output = client.files.content(ended.output_file_id).read()
        entries = [json.loads(text) for text in output.splitlines()]
        assert sorted(int(entry["custom_id"]) for entry in entries) == [n for n in range(LINES) if n != 50]
        kept = done[ended.output_file_id]
        assert output.startswith(kept[: kept.rfind(b"\n") + 1])
        arrivals = [event for event in second.events("request_arrival") if event["api"] == "chat.completions"]
        assert len(arrivals) == LINES - 1 - num_lines(kept)
        # The tokens do not depend on the crash, the batch and the priority.
        for entry in entries[:: LINES // 6]:
            alone = second.post(CHAT, json.loads(line(int(entry["custom_id"])))["body"])
            assert alone["choices"][0]["token_ids"] == entry["response"]["body"]["choices"][0]["token_ids"]
