"""Tests downloads by name from a hub on loopback.

Downloads are complete, interrupted, corrupted or missing, or there is no network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llm_serving.errors import HubError
from llm_serving.hub.hugging_face import HuggingFace
from llm_serving.hub.model_scope import ModelScope
from llm_serving.hub.names import ModelName
from support.hub_server import REPOSITORY, HubServer, hub_server

Hub = HuggingFace | ModelScope
MakeHub = Callable[[], Hub]
WEIGHTS = bytes(range(256)) * 4000
FILES = {
    "config.json": b'{"a": 1}',
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
    "modeling_tiny.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickle",
    "README.md": b"# read me",
    "original/consolidated.00.safetensors": b"x",
}
NEEDED = ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.fixture
def server() -> Iterator[HubServer]:
    with hub_server(dict(FILES)) as hub:
        yield hub


@pytest.fixture(params=["hf", "ms"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_hub(kind: str, server: HubServer, tmp_path: Path) -> MakeHub:
    """Returns a function that makes a new client with the same cache, as a later start of the program does."""
    cls = HuggingFace if kind == "hf" else ModelScope
    return lambda: cls(server.url, tmp_path / "cache")


@pytest.fixture
def name(kind: str) -> ModelName:
    return ModelName(kind, REPOSITORY)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_only_the_needed_files_are_downloaded_and_only_once(
    make_hub: MakeHub, name: ModelName, server: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_hub().fetch(name)
    assert contents(folder) == {each: FILES[each] for each in NEEDED}
    assert server.downloaded() == NEEDED
    shown = capsys.readouterr().err
    assert f"downloading {name} (1000.0 KiB) into " in shown
    assert "  model.safetensors (1000.0 KiB)\n" in shown
    server.downloads.clear()
    assert make_hub().fetch(name) == folder
    assert server.downloads == []
    assert capsys.readouterr().err == ""


def test_an_interrupted_download_continues_where_it_stopped(
    make_hub: MakeHub, name: ModelName, kind: str, server: HubServer
) -> None:
    large = server.files["model.safetensors"] = WEIGHTS * 12
    chunk = 10 * 1024 * 1024 if kind == "hf" else 64 * 1024
    server.cut["model.safetensors"] = [chunk + 5] if kind == "hf" else [chunk + 5, 0, chunk, 0, 5]
    kept = chunk if kind == "hf" else 2 * chunk
    with pytest.raises(
        HubError, match=r"model.safetensors: the download stopped: .*start again, and it continues there"
    ):
        make_hub().fetch(name)
    assert contents(make_hub().fetch(name))["model.safetensors"] == large
    assert server.downloads[-1] == ("model.safetensors", f"bytes={kept}-")


def test_a_dropped_connection_is_continued_at_once(tmp_path: Path, server: HubServer) -> None:
    server.cut["model.safetensors"] = [2 * 65536, 65536 + 5]
    folder = ModelScope(server.url, tmp_path).fetch(ModelName("ms", REPOSITORY))
    assert contents(folder)["model.safetensors"] == WEIGHTS
    assert [ranges for path, ranges in server.downloads if path == "model.safetensors"] == [
        None, "bytes=131072-", "bytes=196608-",
    ]  # fmt: skip


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_corrupted_file_is_refused_and_removed(
    make_hub: MakeHub, name: ModelName, server: HubServer, file: str, tmp_path: Path
) -> None:
    server.corrupt.add(file)
    with pytest.raises(HubError, match=rf"{file}: the (SHA-256|git hash) of the downloaded file is \w+, and the hub"):
        make_hub().fetch(name)
    wrong = server.content(file)
    assert all(path.read_bytes() != wrong for path in (tmp_path / "cache").rglob("*") if path.is_file())
    server.corrupt.clear()
    assert contents(make_hub().fetch(name)) == {each: FILES[each] for each in NEEDED}


def test_offline_and_without_a_network_the_cache_is_used(
    make_hub: MakeHub, name: ModelName, kind: str, server: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(HubError, match=r"is not in the cache .*copy the folder .*here.*instead of the name"):
        make_hub().find(name)
    assert server.requests == 0
    folder = make_hub().fetch(name)
    requests = server.requests
    assert make_hub().find(name) == folder
    assert server.requests == requests
    cls = HuggingFace if kind == "hf" else ModelScope
    nowhere = cls("http://127.0.0.1:9", tmp_path / "cache")
    capsys.readouterr()
    assert nowhere.fetch(name) == folder
    assert capsys.readouterr().err == f"http://127.0.0.1:9 cannot be reached; {name} is taken from the cache\n"
    with pytest.raises(
        HubError, match=r"http://127.0.0.1:9 cannot be reached \(.*on a machine with a network, download"
    ):
        cls("http://127.0.0.1:9", tmp_path / "empty").fetch(name)


def test_an_unknown_repository_or_revision_is_refused(make_hub: MakeHub, kind: str) -> None:
    with pytest.raises(HubError, match=r"there is no such folder here, and http://127.0.0.1:.* has no such repository"):
        make_hub().fetch(ModelName(kind, "Tiny-Org/Other"))
    with pytest.raises(HubError, match=r"has no (such repository or )?revision"):
        make_hub().fetch(ModelName(kind, REPOSITORY, "v9"))


def test_a_gated_repository_needs_a_token(tmp_path: Path, server: HubServer) -> None:
    server.is_gated = True
    with pytest.raises(HubError, match=r"accept its conditions at .* and set HF_TOKEN"):
        HuggingFace(server.url, tmp_path).fetch(ModelName("hf", REPOSITORY))


def test_a_disk_that_is_too_small_is_noticed_before_the_download(
    make_hub: MakeHub, name: ModelName, server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llm_serving.hub.checking._SPARE_BYTES", 1 << 60)
    with pytest.raises(
        HubError, match=r"the download needs 1000\.0 KiB, and .* of free space; free some, or set HF_HOME"
    ):
        make_hub().fetch(name)
    assert server.downloads == []


def test_a_gguf_file_by_its_name(make_hub: MakeHub, kind: str, server: HubServer) -> None:
    server.files = {"a-Q4_0.gguf": b"a" * 9, "q8/b-Q8_0.gguf": b"b" * 9, "config.json": b"{}"}
    with pytest.raises(HubError, match=rf"has 2 GGUF files; name one, as {kind}:{REPOSITORY}/a-Q4_0.gguf, of: "):
        make_hub().fetch(ModelName(kind, REPOSITORY))
    with pytest.raises(HubError, match="the repository has no such file; name one, as"):
        make_hub().fetch(ModelName(kind, REPOSITORY, None, "c.gguf"))
    file = make_hub().fetch(ModelName(kind, REPOSITORY, None, "q8/b-Q8_0.gguf"))
    assert (file.name, file.read_bytes()) == ("b-Q8_0.gguf", b"b" * 9)
    assert server.downloaded() == ["q8/b-Q8_0.gguf"]
    assert make_hub().find(ModelName(kind, REPOSITORY)) == file  # this file is the only one in the cache


@pytest.mark.parametrize("path", ["../evil.safetensors", "/tmp/evil.safetensors", "a/../../evil.gguf"])
def test_a_hub_cannot_write_outside_the_cache(
    make_hub: MakeHub, name: ModelName, server: HubServer, path: str, tmp_path: Path
) -> None:
    server.files = {path: b"evil"}
    with pytest.raises(HubError):
        make_hub().fetch(name)
    assert server.downloads == []
    assert list(tmp_path.rglob("evil*")) == []
