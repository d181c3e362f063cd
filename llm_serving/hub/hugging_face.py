"""Downloads models from Hugging Face, with the library ``huggingface_hub``, into its cache (``HF_HOME``)."""

from __future__ import annotations

import sys
from pathlib import Path

import requests
from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import disable_progress_bars

from llm_serving.errors import HubError
from llm_serving.hub.checking import check_content, check_free_space
from llm_serving.hub.messages import first_line, how_to_bring, say, unreachable
from llm_serving.hub.names import ModelName
from llm_serving.hub.selection import RemoteFile, choose_files, served_path
from llm_serving.planning.rank_memory import format_bytes


class HuggingFace:
    """Finds and downloads models of one hub, with one cache.

    The defaults are the hub and cache of ``huggingface_hub``.
    """

    def __init__(self, endpoint: str | None = None, cache: Path | None = None) -> None:
        self._endpoint = endpoint or constants.ENDPOINT
        self._cache = cache or Path(constants.HF_HUB_CACHE)

    def fetch(self, name: ModelName) -> Path:
        """Downloads the files that the cache lacks. Returns the local folder, or the GGUF file. Raises HubError.

        If the hub cannot be reached, a copy in the cache is used.
        """
        try:
            info = HfApi(self._endpoint).model_info(
                name.repository, revision=name.revision, files_metadata=True, timeout=30.0
            )
        except OfflineModeIsEnabled:
            return self.find(name)
        except (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError, HfHubHTTPError) as error:
            raise HubError(self._refused(name, error)) from error
        except (requests.RequestException, OSError) as error:
            return self._without_network(name, error)
        files = [_remote_file(sibling) for sibling in info.siblings or ()]
        return self._download(name, str(info.sha), choose_files(name, files))

    def find(self, name: ModelName) -> Path:
        """Returns the local folder or GGUF file in the cache, without a request to the hub.

        Raises HubError if there is none.
        """
        try:
            folder = Path(
                snapshot_download(
                    name.repository,
                    revision=name.revision,
                    cache_dir=self._cache,
                    local_files_only=True,
                )
            )
        except (LocalEntryNotFoundError, OSError) as error:
            raise HubError(f"{name} is not in the cache {self._cache}; {how_to_bring(name)}") from error
        present = [each for each in folder.rglob("*") if each.is_file()]
        paths = [RemoteFile(str(each.relative_to(folder)), each.stat().st_size) for each in present]
        return served_path(folder, choose_files(name, paths))

    def _download(self, name: ModelName, commit: str, files: list[RemoteFile]) -> Path:
        """Downloads those files of one commit that the cache lacks, and checks each of them."""
        missing = [each for each in files if not self._cached(name, commit, each)]
        if missing:
            total = sum(each.size for each in missing)
            check_free_space(self._cache, total)
            say(f"downloading {name} ({format_bytes(total)}) into {self._cache}")
        if not sys.stderr.isatty():
            disable_progress_bars()
        paths = []
        for each in files:
            if each in missing:
                say(f"  {each.path} ({format_bytes(each.size)})")
            paths.append(self._download_file(name, each, is_new=each in missing))
        folders = {path.parents[each.path.count("/")] for path, each in zip(paths, files, strict=True)}
        if {folder.name for folder in folders} != {commit}:
            raise HubError(f"{name}: the repository changed during the download; try again")
        return served_path(folders.pop(), files)

    def _download_file(self, name: ModelName, file: RemoteFile, *, is_new: bool) -> Path:
        try:
            path = hf_hub_download(
                name.repository,
                file.path,
                revision=name.revision,
                cache_dir=self._cache,
                endpoint=self._endpoint,
            )
        except (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError, HfHubHTTPError) as error:
            raise HubError(self._refused(name, error)) from error
        except (requests.RequestException, OSError) as error:
            raise HubError(
                f"{file.path}: the download stopped: {first_line(error)}; start again, and it continues there"
            ) from error
        found = Path(path)
        if is_new:
            _check_or_remove(found, file)
        return found

    def _cached(self, name: ModelName, commit: str, file: RemoteFile) -> bool:
        found = try_to_load_from_cache(name.repository, file.path, cache_dir=self._cache, revision=commit)
        return isinstance(found, str) and Path(found).stat().st_size == file.size

    def _without_network(self, name: ModelName, error: Exception) -> Path:
        try:
            path = self.find(name)
        except HubError:
            raise HubError(unreachable(name, self._endpoint, self._cache, error)) from error
        say(f"{self._endpoint} cannot be reached; {name} is taken from the cache")
        return path

    def _refused(self, name: ModelName, error: Exception) -> str:
        """Returns the error text for a request that the hub refused."""
        page = f"{self._endpoint}/{name.repository}"
        if isinstance(error, GatedRepoError):
            return f"{name}: the model needs a permission; accept its conditions at {page} and set HF_TOKEN"
        if isinstance(error, RevisionNotFoundError):
            return f"{name}: the repository has no revision {name.revision!r}"
        if isinstance(error, RepositoryNotFoundError):
            return (
                f"{name}: there is no such folder here, and {self._endpoint} has no such repository, or it is private "
                "(then set HF_TOKEN)"
            )
        return f"{name}: {self._endpoint} refused the request: {first_line(error)}"


def _remote_file(sibling: object) -> RemoteFile:
    lfs = getattr(sibling, "lfs", None)
    return RemoteFile(
        path=str(getattr(sibling, "rfilename", "")),
        size=int(getattr(sibling, "size", None) or 0),
        sha256=None if lfs is None else str(lfs.sha256),
        git_sha1=getattr(sibling, "blob_id", None),
    )


def _check_or_remove(file: Path, expected: RemoteFile) -> None:
    try:
        check_content(file, expected)
    except HubError:
        file.resolve().unlink(missing_ok=True)
        file.unlink(missing_ok=True)
        raise
