"""Tests a server with a hostile model folder.

An audit inside the processes shows that they use only loopback connections and run no code of the folder.
"""

from __future__ import annotations

import ipaddress
import json
import pickle
from pathlib import Path

import psutil
import pytest

from support.fault_environment import fault_environment
from support.server_process import running_server
from support.small_configs import TINY_LLAMA


class _Canary:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self):
        return Path.touch, (self._path,)


def write_hostile_folder(folder: Path, canary: Path) -> Path:
    """Writes the embedded model together with hostile code.

    The code is remote code of the model, a pickle, and modules with the names of libraries.
    """
    folder.mkdir()
    for file in TINY_LLAMA.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    code = f"import pathlib\npathlib.Path({str(canary)!r}).touch()\n"
    for name in ("modeling_hostile.py", "configuration_hostile.py", "mindspore.py", "agent.py", "numpy.py"):
        (folder / name).write_text(code)
    config = json.loads((TINY_LLAMA / "config.json").read_text())
    config["auto_map"] = {
        "AutoModelForCausalLM": "modeling_hostile.Model",
        "AutoConfig": "configuration_hostile.Config",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Canary(canary)))
    return folder


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """Provides a running server, the file that its hostile model would create, and the audit file."""
    folder = tmp_path_factory.mktemp("isolation")
    canary, audit = folder / "canary", folder / "audit.txt"
    model = write_hostile_folder(folder / "model", canary)
    audit.touch()
    with (
        fault_environment(AUDIT_FILE=str(audit)),
        running_server(folder / "server", [f"model_config.model_path={model}"], forks=False) as server,
    ):
        yield server, canary, audit


def test_a_model_folder_runs_no_code(watched, record_property):
    server, canary, audit = watched
    answer = server.post("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 4})
    assert answer["choices"]
    unpickled = [line for line in audit.read_text().splitlines() if ": unpickle " in line]
    files = [file for file in (canary.parent / "model").iterdir() if file.suffix in (".py", ".bin")]
    record_property("runs_of_code", f"{canary.exists() + len(unpickled)} of {len(files)}")
    assert not canary.exists()
    assert unpickled == []


def test_it_listens_on_loopback_only(watched, record_property):
    server, _, _ = watched
    processes = [psutil.Process(server.pid), *server.agents()]
    sockets = [each for process in processes for each in process.net_connections("inet")]
    listening = [each.laddr for each in sockets if each.status == psutil.CONN_LISTEN]
    assert any(each.port == int(server.url.rsplit(":", 1)[1]) for each in listening)
    others = [each for each in listening if not ipaddress.ip_address(each.ip).is_loopback]
    record_property("other_listeners", f"{len(others)} of {len(listening)}")
    assert others == []


def test_it_connects_to_its_agents_only(watched, record_property):
    server, _, audit = watched
    server.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "http://example.com"}], "max_tokens": 4}
    )
    addresses = {agent["address"] for agent in server.get("/server_info")["engine"]["agents"]}
    allowed = tuple(f"connect ('{address.rsplit(':', 1)[0]}', {address.rsplit(':', 1)[1]})" for address in addresses)
    lines = [line for line in audit.read_text().splitlines() if ": connect " in line]
    others = [line for line in lines if not line.endswith(allowed)]
    record_property("other_connections", f"{len(others)} of {len(lines)}")
    assert others == []
