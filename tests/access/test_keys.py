"""Tests the lines of a key file, the store that reloads the file, and the command that writes it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from llm_serving.access.__main__ import main
from llm_serving.access.control import AccessControl
from llm_serving.access.key_store import KeyStore
from llm_serving.access.keys import (
    MAX_KEY_CHARS,
    ApiKey,
    KeyLineError,
    KeyRights,
    digest_of,
    key_line,
    new_secret,
    parse_keys,
    parse_line,
)
from llm_serving.errors import ConfigError
from support.small_configs import REPOSITORY

HASH = "sha256:" + "ab" * 32
OTHER = "sha256:" + "cd" * 32


class Log:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def event(self, name: str, /, *, level: str = "info", **fields: object) -> None:
        self.events.append((name, fields))

    def error(self, message: str, /, *, event: str = "error", **fields: object) -> None:
        self.events.append((event, {"message": message, **fields}))


def test_a_line_states_name_hash_and_rights():
    limits = "requests_in_flight=8 requests_per_minute=60 tokens_per_minute=1000"
    line = f"alice {HASH} admin {limits} priority=-2 models=a,b"
    key = parse_line(line)
    assert key == ApiKey(
        "alice",
        bytes.fromhex("ab" * 32),
        KeyRights(True, 8, 60, 1000, -2, frozenset({"a", "b"})),
    )
    assert key_line(key) == line
    assert key_line(parse_line(f"bob  {HASH}")) == f"bob {HASH}"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("alice", "after the name comes sha256:"),
        ("alice sk-llm-0123456789", "never holds a key itself"),
        ("sk-llm-0123456789/+", "the name must begin"),
        (f"{'x' * 65} {HASH}", "64 at most"),
        (f"alice {HASH}00", "64 hexadecimal digits"),
        (f"alice {HASH.upper()}", "64 hexadecimal digits"),
        (f"alice {HASH} root", "word 3 is unknown"),
        (f"alice {HASH} admin=1", "word 3 is unknown"),
        (f"alice {HASH} admin admin", "admin appears twice"),
        (f"alice {HASH} requests_in_flight=0", "from 1 to"),
        (f"alice {HASH} requests_per_minute=1e3", "must be an integer"),
        (f"alice {HASH} tokens_per_minute=", "must be an integer"),
        (f"alice {HASH} tokens_per_minute=٣", "must be an integer"),
        (f"alice {HASH} models=a,,b", "names of models"),
    ],
)
def test_wrong_lines_are_refused(line, problem):
    with pytest.raises(KeyLineError, match=problem):
        parse_line(line)
    with pytest.raises(KeyLineError, match="line 3: "):
        parse_keys(f"# keys\n\n{line}\n")


def test_an_error_never_shows_the_secret_of_a_line():
    secret = new_secret()
    for line in (f"alice {secret}", secret, f"alice {HASH} {secret}"):
        with pytest.raises(KeyLineError) as caught:
            parse_line(line)
        assert secret not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "there is no key"),
        ("# alice\n", "there is no key"),
        (f"alice {HASH}\nbob {HASH}\n", "line 2: this key is already that of 'alice'"),
        (f"alice {HASH}\nalice {OTHER} admin\n", "line 2: .* other rights"),
    ],
)
def test_wrong_files_are_refused(text, problem):
    with pytest.raises(KeyLineError, match=problem):
        parse_keys(text)


def test_a_name_may_have_two_keys_while_they_are_exchanged():
    assert [key.name for key in parse_keys(f"alice {HASH}\nalice {OTHER}\n").values()] == ["alice", "alice"]


def test_new_keys_are_long_and_differ():
    secrets = {new_secret() for _ in range(100)}
    assert len(secrets) == 100
    assert min(map(len, secrets)) >= 43 + len("sk-llm-")


def write(path, *keys, mode=0o600):
    path.write_text("".join(f"{name} sha256:{digest_of(secret).hex()}\n" for name, secret in keys))
    path.chmod(mode)


def test_the_store_finds_a_key_by_its_secret(tmp_path):
    write(tmp_path / "keys", ("alice", "a" * 40), ("bob", "b" * 40))
    store = KeyStore(str(tmp_path / "keys"), f"carol sha256:{digest_of('c' * 40).hex()}; ", Log())
    assert [store.find(letter * 40).name for letter in "abc"] == ["alice", "bob", "carol"]
    wrong = ("", "a" * 39, "a" * 41, "A" * 40, "é", "x" * (MAX_KEY_CHARS + 1))
    assert [store.find(text) for text in wrong] == [None] * 6


def test_only_a_key_file_is_looked_at_periodically(tmp_path):
    write(tmp_path / "keys", ("alice", "a" * 40))
    of_file = KeyStore(str(tmp_path / "keys"), "", Log())
    of_environment = KeyStore(None, f"carol sha256:{digest_of('c' * 40).hex()}", Log())
    for keys, looks in ((of_file, True), (of_environment, False), (None, False)):
        access = AccessControl(keys, None, lambda reason: None)
        assert (access.watch is not None) is looks


def test_a_changed_file_replaces_the_keys(tmp_path):
    path, log = tmp_path / "keys", Log()
    write(path, ("alice", "a" * 40))
    store = KeyStore(str(path), "", log)
    assert store.refresh() is False
    write(tmp_path / "next", ("bob", "b" * 40))
    (tmp_path / "next").rename(path)
    assert store.refresh() is True
    assert (store.find("a" * 40), store.find("b" * 40).name) == (None, "bob")
    assert log.events == [("api_keys_loaded", {"keys": 1, "file": str(path)})]


@pytest.mark.parametrize("broken", ["alice sk-llm-1", "", None, b"\xff", 0o666])
def test_a_broken_file_keeps_the_old_keys_and_logs_one_error(tmp_path, broken):
    path, log = tmp_path / "keys", Log()
    write(path, ("alice", "a" * 40))
    store = KeyStore(str(path), "", log)
    if broken is None:
        path.unlink()
    elif isinstance(broken, int):
        path.chmod(broken)
    else:
        path.write_bytes(broken if isinstance(broken, bytes) else broken.encode())
    assert (store.refresh(), store.refresh()) == (False, False)
    assert store.find("a" * 40).name == "alice"
    [(event, fields)] = log.events
    assert event == "api_keys_refused"
    assert fields["message"].endswith("; the earlier keys stay valid")
    write(tmp_path / "next", ("bob", "b" * 40))
    (tmp_path / "next").rename(path)
    assert store.refresh() is True


@pytest.mark.parametrize(
    ("text", "mode", "problem"),
    [
        ("alice x", 0o600, "line 1: after the name"),
        (f"alice {HASH}", 0o620, "others may write"),
        (f"alice {HASH}", 0o602, "others may write"),
        (None, 0, "No such file"),
    ],
)
def test_a_wrong_file_stops_the_start(tmp_path, text, mode, problem):
    path = tmp_path / "keys"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=f"serving_config.api_keys_file: .*{problem}"):
        KeyStore(str(path), "", Log())


def test_a_file_that_others_can_read_is_a_warning(tmp_path):
    log = Log()
    write(tmp_path / "keys", ("alice", "a" * 40), mode=0o644)
    KeyStore(str(tmp_path / "keys"), "", log)
    [(event, fields)] = log.events
    assert (event, "chmod 600" in fields["message"]) == ("api_keys_readable", True)


def test_a_wrong_environment_names_the_variable():
    with pytest.raises(ConfigError, match="LLM_SERVING_API_KEYS: line 2: "):
        KeyStore(None, f"alice {HASH}; bob", Log())


def test_file_and_environment_may_not_contradict_each_other(tmp_path):
    write(tmp_path / "keys", ("alice", "a" * 40))
    with pytest.raises(ConfigError, match="LLM_SERVING_API_KEYS also has this key, or other rights, of 'alice'"):
        KeyStore(str(tmp_path / "keys"), f"alice {HASH} admin", Log())


def test_new_prints_the_key_and_its_line(capsys):
    assert main(["new", "alice", "--admin", "--tokens-per-minute", "5000", "--models", "a,b"]) == 0
    secret, line = capsys.readouterr().out.splitlines()
    key = parse_line(line)
    assert key.digest == digest_of(secret)
    assert key.rights == KeyRights(admin=True, tokens_per_minute=5000, models=frozenset({"a", "b"}))


def test_new_adds_the_line_to_a_private_file(tmp_path, capsys):
    path = tmp_path / "keys"
    assert main(["new", "alice", "--file", str(path)]) == 0
    assert main(["new", "bob", "--file", str(path)]) == 0
    first, second = capsys.readouterr().out.split()
    store = KeyStore(str(path), "", Log())
    assert (store.find(first).name, store.find(second).name) == ("alice", "bob")
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_text()
    assert main(["new", "alice", "--admin", "--file", str(path)]) == 2
    assert "other rights" in capsys.readouterr().err
    assert path.read_text() == before
    assert main(["check", str(path)]) == 0
    assert "2 valid key(s)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["new", "a b"], ["new", ""], ["new", "x", "--priority", "1 admin"], ["check", "/nonexistent"]]
)
def test_wrong_commands_are_refused(arguments, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_hash_reads_a_key_from_standard_input():
    def run(secret: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "llm_serving.access", "hash", "alice"]
        return subprocess.run(
            command, input=secret, capture_output=True, text=True, cwd=REPOSITORY, env={**os.environ}, check=False
        )

    done = run("k" * 32 + "\n")
    assert (done.returncode, done.stdout) == (0, f"alice sha256:{digest_of('k' * 32).hex()}\n")
    done = run("secret")
    assert (done.returncode, done.stdout) == (2, "")
    assert "the key has 6 characters; use 32 to 512" in done.stderr
