"""A hub of models on loopback with the routes of Hugging Face and of ModelScope. It can fail in chosen ways."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

REPOSITORY = "Tiny-Org/Tiny.Model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class HubServer:
    """One repository of a hub.

    ``cut`` interrupts downloads. It has a list of byte counts for each file. The n-th download of the file ends after
    the n-th number of bytes.
    """

    files: dict[str, bytes]
    url: str = ""
    cut: dict[str, list[int]] = field(default_factory=dict)
    corrupt: set[str] = field(default_factory=set)
    is_gated: bool = False
    downloads: list[tuple[str, str | None]] = field(default_factory=list)
    """Path and ``Range`` of every download."""
    requests: int = 0

    def downloaded(self) -> list[str]:
        return sorted({path for path, _ in self.downloads})

    def content(self, path: str) -> bytes:
        """Returns the bytes that the hub sends for a file. For a corrupt file, the first byte is wrong."""
        data = self.files[path]
        return bytes(255 - data[0] for _ in data[:1]) + data[1:] if path in self.corrupt else data


@contextmanager
def hub_server(files: dict[str, bytes]) -> Iterator[HubServer]:
    """Serves a repository from threads, on a free port of 127.0.0.1."""
    hub = HubServer(files)

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def folder_files(folder: Path) -> dict[str, bytes]:
    """Returns the content of every file of a model folder, by its path in the repository."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    state: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        self.state.requests += 1
        url = urlsplit(self.path)
        path, query = unquote(url.path), {key: values[0] for key, values in parse_qs(url.query).items()}
        if path.startswith("/api/v1/models/"):
            self._model_scope(path, query)
        elif path.startswith("/api/models/"):
            self._info(path)
        elif (found := re.fullmatch(rf"/{REPOSITORY}/resolve/(?:main|{COMMIT})/(.+)", path)) is not None:
            self._file(found[1], with_body=with_body)
        else:
            self._error(404, "RepoNotFound")

    def _info(self, path: str) -> None:
        """Sends Hugging Face's description of a repository, with the sizes and hashes of its files."""
        if not re.fullmatch(rf"/api/models/{REPOSITORY}(/revision/(main|{COMMIT}))?", path):
            known = path.startswith(f"/api/models/{REPOSITORY}/")
            self._error(404, "RevisionNotFound" if known else "RepoNotFound")
        elif self.state.is_gated:
            self._error(403, "GatedRepo")
        else:
            siblings = [_sibling(name, data) for name, data in self.state.files.items()]
            self._json({"_id": "1", "id": REPOSITORY, "sha": COMMIT, "private": False, "siblings": siblings})

    def _model_scope(self, path: str, query: dict[str, str]) -> None:
        route = path.removeprefix(f"/api/v1/models/{REPOSITORY}/")
        if route == "repo/files" and query["Revision"] == "master":
            entries = [
                {"Path": name, "Name": name, "Size": len(data), "Type": "blob", "Sha256": _sha256(data)}
                for name, data in self.state.files.items()
            ]
            entries.append({"Path": "folder", "Name": "folder", "Size": 0, "Type": "tree", "Sha256": ""})
            self._json({"Code": 200, "Data": {"Files": entries}, "Success": True})
        elif route == "repo" and query["FilePath"] in self.state.files:
            self._file(query["FilePath"], with_body=True)
        else:
            self._error(404, "")

    def _file(self, name: str, *, with_body: bool) -> None:
        if name not in self.state.files:
            self._error(404, "EntryNotFound")
            return
        data, wanted = self.state.content(name), self.headers.get("Range")
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and with_body else 0
        self.send_response(206 if start else 200)
        true = self.state.files[name]
        tag = _sha256(true) if name.endswith((".safetensors", ".gguf")) else git_sha1(true)
        self.send_header("ETag", f'"{tag}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if not with_body:
            return
        self.state.downloads.append((name, wanted))
        cuts = self.state.cut.get(name)
        if cuts:
            self.wfile.write(data[start : start + cuts.pop(0)])
            self.close_connection = True
        else:
            self.wfile.write(data[start:])

    def _json(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _error(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _sibling(name: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": git_sha1(data)}
    if name.endswith((".safetensors", ".gguf")):
        entry["blobId"] = git_sha1(b"pointer")
        entry["lfs"] = {"sha256": _sha256(data), "size": len(data), "pointerSize": 130}
    return entry


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
