"""Tests that a server serves ``/chat`` with a config that was made from the file of an older server."""

from __future__ import annotations

import json
from pathlib import Path

from support.server_process import running_server
from support.small_configs import TINY_LLAMA
from tools.chat_import.main import main


def test_a_server_with_an_imported_config_completes_a_chat(tmp_path: Path) -> None:
    document = {
        "server": {"host": "127.0.0.1", "port": 11111},
        "model": {"model_name": "older", "checkpoint_path": str(TINY_LLAMA), "compute_dtype": "fp32", "device_num": 1},
        "default_generation_args": {"do_sample": False, "max_length": 96},
    }
    file, output = tmp_path / "configuration.json", tmp_path / "chat.yaml"
    file.write_text(json.dumps(document))
    assert main([str(file), "--output", str(output)]) == 0
    with running_server(tmp_path / "server", config=str(output)) as server:
        assert server.get("/v1/models")["data"][0]["id"] == "older"
        body = {"request_id": "7", "query": "Hello!", "gen_kwargs": {"max_new_tokens": 4}}
        answer = server.post("/chat", body)
        assert (answer["request_id"], answer["flag"]) == ("7", "end")
        assert answer["response"]
        assert 1 <= answer["usage"]["completion_tokens"] <= 4
        assert server.get("/server_info")["model"]["max_model_len"] == 96
