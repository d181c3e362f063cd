"""Downloads models from ModelScope over its HTTP API, into the cache of ModelScope's library (``MODELSCOPE_CACHE``)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import requests
from rich.console import Console
from rich.progress import DownloadColumn, Progress

from llm_serving.errors import HubError
from llm_serving.hub.checking import check_content, check_free_space
from llm_serving.hub.messages import first_line, how_to_bring, say, unreachable
from llm_serving.hub.names import ModelName
from llm_serving.hub.selection import RemoteFile, choose_files, served_path
from llm_serving.planning.rank_memory import format_bytes

DEFAULT_REVISION = "master"
DEFAULT_ENDPOINT = "https://modelscope.cn"
ENDPOINT_VARIABLE, CACHE_VARIABLE = "MODELSCOPE_ENDPOINT", "MODELSCOPE_CACHE"
_INCOMPLETE = ".incomplete"
_ATTEMPTS = 5
"""Number of attempts to download a file."""
_CHUNK = 64 * 1024
"""Bytes that are read at a time from a download."""
_TIMEOUT_S = 30.0
"""Maximum seconds to wait for an answer of ModelScope."""


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder of ModelScope's models on this machine."""
    root = environment.get(CACHE_VARIABLE) or Path.home() / ".cache" / "modelscope" / "hub"
    return Path(root).expanduser() / "models"


class ModelScope:
    """Finds and downloads models of one hub, with one cache.

    Each model has one folder, ``OWNER/NAME``, as in ModelScope's own library.
    """

    def __init__(self, endpoint: str | None = None, cache: Path | None = None) -> None:
        endpoint = endpoint or os.environ.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT
        self._endpoint = (endpoint if "//" in endpoint else f"https://{endpoint}").rstrip("/")
        self._cache = cache or cache_folder()
        self._session = requests.Session()

    def fetch(self, name: ModelName) -> Path:
        """Downloads the files that the cache lacks. Returns the local folder, or the GGUF file. Raises HubError.

        If the hub cannot be reached, a copy in the cache is used.
        """
        try:
            files = choose_files(name, self._list(name))
        except requests.RequestException as error:
            return self._without_network(name, error)
        folder = self._folder(name)
        missing = [each for each in files if not _is_present(folder / each.path, each)]
        if missing:
            total = sum(each.size for each in missing)
            check_free_space(self._cache, total)
            say(f"downloading {name} ({format_bytes(total)}) into {folder}")
        for each in missing:
            say(f"  {each.path} ({format_bytes(each.size)})")
            self._download(name, each, folder / each.path)
        return served_path(folder, files)

    def find(self, name: ModelName) -> Path:
        """Returns the local folder or GGUF file in the cache, without a request to the hub.

        Raises HubError if there is none.
        """
        folder = self._folder(name)
        present = [each for each in folder.rglob("*") if each.is_file() and each.suffix != _INCOMPLETE]
        if not present:
            raise HubError(f"{name} is not in the cache {self._cache}; {how_to_bring(name)}")
        files = [RemoteFile(str(each.relative_to(folder)), each.stat().st_size) for each in present]
        return served_path(folder, choose_files(name, files))

    def _folder(self, name: ModelName) -> Path:
        return self._cache / name.repository.replace(".", "___")

    def _url(self, name: ModelName, route: str, **query: str) -> str:
        query["Revision"] = name.revision or DEFAULT_REVISION
        return f"{self._endpoint}/api/v1/models/{quote(name.repository)}/{route}?{urlencode(query)}"

    def _list(self, name: ModelName) -> list[RemoteFile]:
        """Returns the files of the repository. Raises HubError if there is no repository of this name."""
        response = self._session.get(self._url(name, "repo/files", Recursive="True"), timeout=_TIMEOUT_S)
        if response.status_code in (401, 403, 404):
            raise HubError(
                f"{name}: there is no such folder here, and {self._endpoint} has no such repository or revision "
                f"(status {response.status_code})"
            )
        response.raise_for_status()
        try:
            found = json.loads(response.content)["Data"]["Files"]
            return [_remote_file(each) for each in found if each.get("Type") != "tree"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise HubError(f"{name}: {self._endpoint} sent a list of files that cannot be read") from error

    def _download(self, name: ModelName, file: RemoteFile, target: Path) -> None:
        """Downloads one file. If an earlier download was interrupted, continues at that position. Raises HubError after
        several failed attempts, or if the content is wrong.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + _INCOMPLETE)
        error: Exception | None = None
        for _ in range(_ATTEMPTS):
            try:
                self._continue(name, file, partial)
            except (requests.RequestException, OSError) as reason:
                error = reason
            if partial.is_file() and partial.stat().st_size >= file.size:
                break
        else:
            why = first_line(error) if error else "the connection closed early"
            raise HubError(f"{file.path}: the download stopped: {why}; start again, and it continues there")
        try:
            check_content(partial, file)
        except HubError:
            partial.unlink()
            raise
        partial.replace(target)

    def _continue(self, name: ModelName, file: RemoteFile, partial: Path) -> None:
        """Downloads the missing part of a file and appends it to ``partial``.

        If the hub ignores the requested range, downloads the whole file again.
        """
        have = partial.stat().st_size if partial.is_file() else 0
        headers = (
            {"Range": f"bytes={have}-", "Accept-Encoding": "identity"} if have else {"Accept-Encoding": "identity"}
        )
        url = self._url(name, "repo", FilePath=file.path)
        with self._session.get(url, headers=headers, stream=True, timeout=_TIMEOUT_S) as response:
            response.raise_for_status()
            resumes = response.status_code == requests.codes.partial_content
            with partial.open("ab" if resumes else "wb") as output:
                for chunk in _shown(response.iter_content(_CHUNK), file, have if resumes else 0):
                    output.write(chunk)

    def _without_network(self, name: ModelName, error: Exception) -> Path:
        try:
            path = self.find(name)
        except HubError:
            raise HubError(unreachable(name, self._endpoint, self._cache, error)) from error
        say(f"{self._endpoint} cannot be reached; {name} is taken from the cache")
        return path


def _remote_file(entry: Mapping[str, Any]) -> RemoteFile:
    digest = entry.get("Sha256") or None
    return RemoteFile(path=str(entry["Path"]), size=int(entry["Size"]), sha256=None if digest is None else str(digest))


def _is_present(path: Path, expected: RemoteFile) -> bool:
    return path.is_file() and path.stat().st_size == expected.size


def _shown(chunks: Iterator[bytes], file: RemoteFile, have: int) -> Iterator[bytes]:
    """Yields the chunks of a download, and shows the progress if standard error is a terminal."""
    with Progress(
        *Progress.get_default_columns(), DownloadColumn(), console=Console(file=sys.stderr), transient=True,
        disable=not sys.stderr.isatty(),
    ) as bar:  # fmt: skip
        task = bar.add_task(file.path, total=file.size, completed=have)
        for chunk in chunks:
            bar.advance(task, len(chunk))
            yield chunk
