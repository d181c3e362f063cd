"""Tests ``doctor.py bundle``: the files that it packs. None of them may contain a secret, a prompt or an output."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from llm_serving.hub.hugging_face import HuggingFace
from llm_serving.hub.names import ModelName
from llm_serving.telemetry.events import EVENTS
from support.hub_server import REPOSITORY as MODEL
from support.hub_server import folder_files, hub_server
from support.small_configs import REPOSITORY, TINY_LLAMA
from tools.diagnosis import bundle
from tools.diagnosis.host import CommandResult, Host
from tools.diagnosis.main import main
from tools.diagnosis.redaction import PROMPT_FIELDS, REMOVED, redact_log, redact_text

PROMPT = "My doctor says that I have the flu"
SECRETS = [
    "hunter2hunter2",
    "sk-abcdefghijklmnopqrstuvwx",
    "hf_ABCDEFGHIJKLMNOPQRSTUVWX",
    "AKIAABCDEFGHIJKLMNOP",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
]
LINES = [
    {"event": "request_arrival", "prompt": PROMPT, "prompt_tokens": 8, "max_tokens": 5, "tenant": "5f3a"},
    {"event": "request_refused", "code": "invalid_value", "message": f"'stop' should be text; got {PROMPT}"},
    {"event": "error", "message": f"Authorization: Bearer {SECRETS[1]}", "nested": [{"content": PROMPT}]},
    {"event": "error", "message": f"cannot reach https://user:{SECRETS[0]}@example.org/x", "api_key": SECRETS[2]},
    {"event": "agent_lost", "message": "agent 0 was killed by signal 9", "final": False},
]


def written_log(folder: Path) -> Path:
    log = folder / "logs"
    log.mkdir()
    text = "".join(json.dumps(line) + "\n" for line in LINES) + '{"event": "cut off, "prompt": "' + PROMPT
    (log / "server.log").write_text(text)
    (log / "agent_0.log").write_text(
        f"export AWS_KEY={SECRETS[3]} password={SECRETS[0]} max_tokens=17\njwt {SECRETS[4]}\n"
    )
    return log


def files_of(archive: Path) -> dict[str, str]:
    with tarfile.open(archive) as opened:
        return {each.name: opened.extractfile(each).read().decode() for each in opened.getmembers()}  # type: ignore[union-attr]


def test_the_archive_has_the_facts_and_no_secrets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, logs = tmp_path / "report.tar.gz", written_log(tmp_path)
    environment = {"MS_PASSWORD": SECRETS[0], "HCCL_TOKEN": SECRETS[1], "ASCEND_HOME_PATH": "/cann", "OTHER": "x"}
    host = Host(tmp_path / "root", environment, lambda *_: CommandResult(0, f"ok token={SECRETS[2]}\n"))
    arguments = ["bundle", "--out", str(out), "--logs", str(logs), "--set", "pa_config.num_blocks=300"]
    assert main(arguments, host) == 0
    files = files_of(out)
    shown = capsys.readouterr().out
    assert all(f"  {name}\n" in shown for name in files)
    assert out.stat().st_mode & 0o777 == 0o600
    whole = "\n".join(files.values())
    assert PROMPT not in whole
    assert not [secret for secret in SECRETS if secret in whole]
    assert str(Path.home()) not in whole or str(Path.home()) == "/"
    assert json.loads(files["environment.json"]) == {
        "ASCEND_HOME_PATH": "/cann",
        "HCCL_TOKEN": REMOVED,
        "MS_PASSWORD": REMOVED,
    }
    assert json.loads(files["config/resolved.json"])["pa_config"]["num_blocks"] == 300
    assert any(finding["subject"] == "config" for finding in json.loads(files["findings.json"]))
    events = [json.loads(line) for line in files["logs/server.log"].splitlines()[:5]]
    assert (events[0]["prompt"], events[0]["prompt_tokens"], events[0]["max_tokens"]) == (REMOVED, 8, 5)
    assert events[1] == {"event": "request_refused", "code": "invalid_value", "message": REMOVED}
    assert events[4] == LINES[4]
    assert "max_tokens=17" in files["logs/agent_0.log"]
    assert json.loads(files["contents.json"])["files"] == [name for name in files if name != "contents.json"]


def test_the_archive_has_the_pages_of_a_running_server_and_attached_outputs(tmp_path: Path) -> None:
    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            pages = {"/server_info": json.dumps({"device": "Ascend", "api_key": SECRETS[2]}), "/metrics": "steps 17\n"}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(pages[self.path].encode())

        def log_message(self, *_: object) -> None:
            pass

    (tmp_path / "step.txt").write_text(f"FAIL decode\npassword={SECRETS[0]}\n")
    host = Host(tmp_path, {}, lambda *_: CommandResult(None, failure="not found"))
    given = ["bundle", "--logs", str(tmp_path), "--attach", str(tmp_path / "step.txt")]
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            given += ["--set", f"serving_config.server_port={server.server_port}"]
            assert main([*given, "--out", str(tmp_path / "running.tar.gz")], host) == 0
        finally:
            server.shutdown()
    assert main([*given, "--out", str(tmp_path / "stopped.tar.gz")], host) == 0
    running, stopped = files_of(tmp_path / "running.tar.gz"), files_of(tmp_path / "stopped.tar.gz")
    assert json.loads(running["server/server_info.txt"]) == {"device": "Ascend", "api_key": REMOVED}
    assert running["server/metrics.txt"] == "steps 17\n"
    assert not [name for name in stopped if name.startswith("server/")]
    assert running["attached/1_step.txt"].startswith("FAIL decode\n")
    assert SECRETS[0] not in running["attached/1_step.txt"]


def test_a_file_that_cannot_be_attached_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.tar.gz"
    assert main(["bundle", "--out", str(out), "--attach", str(tmp_path / "absent.txt")], Host(tmp_path)) == 2
    assert "absent.txt: No such file" in capsys.readouterr().err
    assert not out.exists()


def test_an_existing_file_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.tar.gz"
    out.write_text("mine")
    host = Host(tmp_path, {}, lambda *_: CommandResult(None, failure="not found"))
    assert main(["bundle", "--out", str(out), "--logs", str(tmp_path)], host) == 2
    assert "File exists" in capsys.readouterr().err
    assert out.read_text() == "mine"


def test_a_wrong_config_is_a_part_of_the_bundle(tmp_path: Path) -> None:
    out = tmp_path / "report.tar.gz"
    host = Host(tmp_path, {}, lambda *_: CommandResult(None, failure="not found"))
    assert main(["bundle", "--out", str(out), "--logs", str(tmp_path), "--set", "pa_config.num_blocks=x"], host) == 0
    assert "pa_config.num_blocks = 'x'" in files_of(out)["config/error.txt"]


def test_a_draft_model_is_found_in_the_cache_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle also contains the server's log if the draft model is not in the cache, as after a failed download."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)  # without the config's log folder, the bundle has the logs of output/
    log = written_log(tmp_path) / "server.log"
    host = Host(tmp_path / "root", {}, lambda *_: CommandResult(None, failure="not found"))
    settings = ["speculative_config.method=draft", f"speculative_config.model={MODEL}", f"log_config.path={log}"]
    given = ["bundle", "--config", "llama_tiny_cpu.yaml", *(part for each in settings for part in ("--set", each))]
    assert main([*given, "--out", str(tmp_path / "absent.tar.gz")], host) == 0
    with hub_server(folder_files(TINY_LLAMA)) as hub:
        HuggingFace(hub.url, tmp_path / "hf").fetch(ModelName("hf", MODEL))
    assert main([*given, "--out", str(tmp_path / "cached.tar.gz")], host) == 0
    absent, cached = files_of(tmp_path / "absent.tar.gz"), files_of(tmp_path / "cached.tar.gz")
    assert "logs/server.log" in absent
    assert "logs/server.log" in cached
    assert f"hf:{MODEL} is not in the cache" in absent["config/error.txt"]
    assert json.loads(cached["config/resolved.json"])["speculative_config"]["method"] == "draft"
    [finding] = [each for each in json.loads(absent["findings.json"]) if each["subject"] == "config"]
    assert (finding["level"], finding["advice"].partition(";")[0]) == (
        "problem",
        "correct the name, or let a server download the model",
    )
    levels = [each["level"] for each in json.loads(cached["findings.json"]) if each["subject"] == "config"]
    assert levels
    assert "problem" not in levels


def test_long_logs_keep_their_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MAX_FILE_BYTES", 1000)
    (tmp_path / "server.log").write_text("".join(f"line {number}\n" for number in range(1000)))
    [(name, text)] = bundle._logs(tmp_path, "logs")
    assert name == "logs/server.log"
    assert text.endswith("line 999\n")
    assert text.startswith("line ")
    assert 900 < len(text) <= 1000


def test_every_field_of_the_log_with_text_of_a_request_is_known() -> None:
    fields = {name for event in EVENTS.values() for name, meaning in event.fields.items() if "log_prompts" in meaning}
    assert fields
    assert fields <= PROMPT_FIELDS


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens: 17",
        "end_token=2",
        "total_tokens = 12.5",
        "tokenizer: LlamaTokenizer",
        "agent 0, token 5",
        "tokenizer:\n  type: x",
    ],
)
def test_figures_stay(text: str) -> None:
    assert redact_text(text) == text
    assert redact_log(f"{text}\n") == f"{text}\n"


def test_the_program_writes_a_bundle_of_this_machine(tmp_path: Path) -> None:
    out = tmp_path / "bundle.tar.gz"
    command = [sys.executable, str(REPOSITORY / "tools" / "doctor.py"), "bundle", "--out", str(out)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert {"findings.json", "packages.json", "config/stated.yaml"} <= set(files_of(out))
