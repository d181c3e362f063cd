"""Stores the files and batches of all tenants in one folder. A tenant can use only its own files and batches.

    FOLDER/lock                          held by the server that uses the folder
    FOLDER/TENANT/files/file-ID.data     content of a file; TENANT is a hash of the tenant's name
    FOLDER/TENANT/files/file-ID.json     record of a file; without the record, the file does not exist
    FOLDER/TENANT/batches/batch_ID.json  record of a batch

A record is replaced atomically, so a killed server leaves either the old or the new record. The names of files on disk
come from ids that the server creates, never from a client's text.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from llm_serving.config.batch_section import BatchConfig
from llm_serving.errors import ConfigError, RequestError
from llm_serving.server.batches.disk import (
    cut_partial_line,
    make_folder,
    open_appending,
    open_new,
    replace_file,
    sync_folder,
    write_all,
)
from llm_serving.server.batches.records import (
    INPUT_PURPOSE,
    OUTPUT_PURPOSE,
    Batch,
    StoredFile,
    decoded,
    encoded,
)
from llm_serving.server.errors import (
    FileInUseError,
    PayloadTooLargeError,
    StorageLimitError,
    UnknownBatchError,
    UnknownFileError,
)
from llm_serving.server.fields.validation import short

T = TypeVar("T")
MIN_FILE_BYTES = 4096
"""For the storage limits, a smaller file counts as this number of bytes. The record of each batch counts as this
number, too.

So the limits in bytes also limit the number of tiny files.
"""


@dataclass(slots=True)
class _Tenant:
    """The files and batches of one tenant, oldest first."""

    folder: Path
    files: dict[str, StoredFile] = field(default_factory=dict)
    batches: dict[str, Batch] = field(default_factory=dict)
    num_bytes: int = 0


class BatchStore:
    """Keeps files and batches on disk.

    The methods read and write files, so they block their thread. Code on the event loop calls them through ``run``,
    which passes the call to the store's own thread.
    """

    def __init__(self, config: BatchConfig, warn: Callable[[str], None]) -> None:
        """Opens the folder of ``config``, and finds what an earlier server has left there.

        ``warn`` receives a message for each record that cannot be read. Raises ConfigError if the folder cannot be
        used, or if another server uses it.
        """
        assert config.folder is not None
        self.config = config
        self._root = Path(config.folder).absolute()
        self._warn = warn
        self._tenants: dict[str, _Tenant] = {}
        self._num_bytes = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self.changed = asyncio.Event()
        """An event that is set on the event loop when a batch was added or must be cancelled."""
        try:
            self._lock = _locked(self._root)
            self._scan()
        except OSError as error:
            raise ConfigError(f"batch_config.folder: {self._root}: {error.strerror or error}") from None

    async def run(self, call: Callable[..., T], *arguments: Any) -> T:
        """Runs a blocking call in the store's thread, which runs one call at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def close(self) -> None:
        """Waits for running calls and unlocks the folder for other servers. May be called twice."""
        self._thread.shutdown()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # The following methods keep files.

    def begin_upload(self, owner: str) -> Upload:
        """Begins a new file, whose content then arrives in parts. Raises StorageLimitError."""
        tenant = self._tenant(owner)
        if len(tenant.files) >= self.config.max_files:
            raise StorageLimitError(
                f"This API key has {len(tenant.files)} files; the maximum is {self.config.max_files} "
                "(batch_config.max_files). Delete files first."
            )
        return Upload(self, owner, tenant)

    def files(self, owner: str) -> list[StoredFile]:
        """Returns the files of a tenant, oldest first."""
        return sorted(self._found(owner).files.values(), key=lambda file: (file.created_at, file.id))

    def file(self, owner: str, file_id: str, param: str = "file_id") -> StoredFile:
        """Returns a file of a tenant. Raises UnknownFileError, which names the field ``param``."""
        found = self._found(owner).files.get(file_id)
        if found is None:
            raise UnknownFileError(f"The file {short(file_id)} does not exist for this API key.", param=param)
        return found

    def path_of(self, file: StoredFile) -> Path:
        """Returns the path of a file's content."""
        return self.data_path(file.owner, file.id)

    def data_path(self, owner: str, file_id: str) -> Path:
        """Returns the path of the content of the file with this id. The file need not exist yet."""
        return self._tenant(owner).folder / "files" / f"{file_id}.data"

    def delete_file(self, owner: str, file_id: str) -> None:
        """Deletes a file. Raises UnknownFileError, and FileInUseError if a batch still reads the file."""
        file, tenant = self.file(owner, file_id), self._tenant(owner)
        for batch in tenant.batches.values():
            if batch.input_file_id == file_id and not batch.has_ended:
                raise FileInUseError(
                    f"The file {file_id} is the input of {batch.id}, which has not ended. Cancel the batch first.",
                    param="file_id",
                )
        folder = tenant.folder / "files"
        (folder / f"{file_id}.json").unlink()
        (folder / f"{file_id}.data").unlink(missing_ok=True)
        sync_folder(folder)
        del tenant.files[file_id]
        self._count(tenant, -_counted(file.num_bytes))

    def keep_file(self, file: StoredFile, *, is_counted: bool = False) -> None:
        """Adds a file, whose content is already on disk, to its tenant's files.

        ``is_counted`` is True if the tenant's total already includes the bytes of the file.
        """
        tenant = self._tenant(file.owner)
        replace_file(tenant.folder / "files" / f"{file.id}.json", encoded(file))
        if file.id not in tenant.files and not is_counted:
            self._count(tenant, _counted(file.num_bytes))
        tenant.files[file.id] = file

    # The following methods keep batches.

    def add_batch(self, batch: Batch) -> None:
        """Adds a new batch.

        Raises UnknownFileError, StorageLimitError, or RequestError for a file of another purpose.
        """
        tenant, limits = self._tenant(batch.owner), self.config
        file = self.file(batch.owner, batch.input_file_id, "input_file_id")
        if file.purpose != INPUT_PURPOSE:
            raise RequestError(
                f"The file {file.id} has the purpose {short(file.purpose)}; the input of a batch has the purpose "
                f"'{INPUT_PURPOSE}'.",
                param="input_file_id",
                code="invalid_value",
            )
        waiting = sum(not each.has_ended for each in tenant.batches.values())
        if waiting >= limits.max_waiting_batches:
            raise StorageLimitError(
                f"This API key has {waiting} batches that have not ended; the maximum is {limits.max_waiting_batches} "
                "(batch_config.max_waiting_batches). Wait until one ends, or cancel one."
            )
        self._drop_oldest(tenant)
        self._check_space(tenant, MIN_FILE_BYTES)
        self.save_batch(batch)
        tenant.batches[batch.id] = batch
        self._count(tenant, MIN_FILE_BYTES)

    def save_batch(self, batch: Batch) -> None:
        """Writes the record of a batch."""
        replace_file(self._tenant(batch.owner).folder / "batches" / f"{batch.id}.json", encoded(batch))

    def batches(self, owner: str) -> list[Batch]:
        """Returns the batches of a tenant, newest first."""
        found = self._found(owner).batches.values()
        return sorted(found, key=lambda batch: (batch.created_at, batch.id), reverse=True)

    def batch(self, owner: str, batch_id: str) -> Batch:
        """Returns a batch of a tenant. Raises UnknownBatchError."""
        found = self._found(owner).batches.get(batch_id)
        if found is None:
            raise UnknownBatchError(f"The batch {short(batch_id)} does not exist for this API key.", param="batch_id")
        return found

    def cancel_batch(self, owner: str, batch_id: str) -> Batch:
        """Asks the runner to cancel a batch. Raises UnknownBatchError, and RequestError if the batch has ended."""
        batch = self.batch(owner, batch_id)
        if batch.has_ended or batch.status == "finalizing":
            raise RequestError(
                f"The batch {batch_id} is {batch.status} and cannot be cancelled.",
                param="batch_id",
                code="invalid_value",
            )
        if batch.status != "cancelling":
            batch.status, batch.cancelling_at = "cancelling", int(time.time())
            self.save_batch(batch)
        return batch

    def waiting_batches(self) -> list[Batch]:
        """Returns the oldest of each tenant's batches that have not ended, sorted by age, oldest first."""
        oldest = []
        for tenant in self._tenants.values():
            waiting = [batch for batch in tenant.batches.values() if not batch.has_ended]
            oldest += sorted(waiting, key=lambda batch: (batch.created_at, batch.id))[:1]
        return sorted(oldest, key=lambda batch: (batch.created_at, batch.id))

    # The following methods write the results of batches.

    def open_results(self, batch: Batch) -> tuple[int, int]:
        """Opens the output file and the error file for appending after their last complete line.

        Returns their descriptors.
        """
        descriptors = []
        for file_id in (batch.output_id, batch.error_id):
            path = self.data_path(batch.owner, file_id)
            cut_partial_line(path)
            descriptors.append(open_appending(path))
        return descriptors[0], descriptors[1]

    def append(self, batch: Batch, descriptor: int, line: bytes) -> None:
        """Appends one line to a file of results. Raises StorageLimitError."""
        tenant = self._tenant(batch.owner)
        self._check_space(tenant, len(line))
        write_all(descriptor, line)
        self._count(tenant, len(line))

    def end_batch(self, batch: Batch, status: str) -> None:
        """Ends a batch: adds its result files to the tenant's files, and writes its record with the final ``status``.

        Result files without lines are deleted.
        """
        batch.has_output = self._keep_results(batch, batch.output_id, "output")
        batch.has_errors = self._keep_results(batch, batch.error_id, "error")
        setattr(batch, f"{status}_at", int(time.time()))
        batch.status = status
        self.save_batch(batch)

    def _keep_results(self, batch: Batch, file_id: str, name: str) -> bool:
        path = self.data_path(batch.owner, file_id)
        size = path.stat().st_size if path.exists() else 0
        if size == 0:
            path.unlink(missing_ok=True)
            return False
        filename = f"{batch.id}_{name}.jsonl"
        file = StoredFile(file_id, batch.owner, filename, OUTPUT_PURPOSE, int(time.time()), size)
        self.keep_file(file, is_counted=True)
        self._count(self._tenant(batch.owner), _counted(size) - size)
        return True

    # The following methods are parts of the methods above.

    def _tenant(self, owner: str) -> _Tenant:
        """Returns the record of a tenant. If the tenant is new, creates its folder."""
        found = self._tenants.get(owner)
        if found is None:
            folder = self._root / blake2b(owner.encode(), digest_size=16).hexdigest()
            for part in (folder, folder / "files", folder / "batches"):
                make_folder(part)
            found = self._tenants[owner] = _Tenant(folder)
        return found

    def _found(self, owner: str) -> _Tenant:
        """Returns the record of a tenant. For an unknown tenant, returns an empty record and does not store it."""
        return self._tenants.get(owner) or _Tenant(self._root)

    def _drop_oldest(self, tenant: _Tenant) -> None:
        """Removes records of the tenant's ended batches, oldest first, until the tenant may add one more batch.

        The input and output files of a removed batch are kept.
        """
        while len(tenant.batches) >= self.config.max_batches:
            ended = [batch for batch in tenant.batches.values() if batch.has_ended]
            if not ended:
                return
            oldest = min(ended, key=lambda batch: (batch.created_at, batch.id))
            (tenant.folder / "batches" / f"{oldest.id}.json").unlink(missing_ok=True)
            del tenant.batches[oldest.id]
            self._count(tenant, -MIN_FILE_BYTES)

    def _check_space(self, tenant: _Tenant, size: int) -> None:
        limits = self.config
        if tenant.num_bytes + size > limits.max_bytes_per_key:
            raise StorageLimitError(
                f"The files of this API key would have {tenant.num_bytes + size} bytes; the maximum is "
                f"{limits.max_bytes_per_key} (batch_config.max_bytes_per_key). Delete files first."
            )
        if self._num_bytes + size > limits.max_bytes:
            raise StorageLimitError(
                f"The files of all API keys would have {self._num_bytes + size} bytes; the maximum is "
                f"{limits.max_bytes} (batch_config.max_bytes). The operator can raise it."
            )

    def _count(self, tenant: _Tenant, size: int) -> None:
        tenant.num_bytes += size
        self._num_bytes += size

    def _scan(self) -> None:
        """Reads the records of all tenants. Removes content without a record, unless a batch still writes it."""
        for folder in sorted(path for path in self._root.iterdir() if path.is_dir()):
            tenant = _Tenant(folder)
            owners = set()
            for file in self._records(StoredFile, folder / "files"):
                path = folder / "files" / f"{file.id}.data"
                if path.exists():
                    tenant.files[file.id] = file
                    owners.add(file.owner)
            for batch in self._records(Batch, folder / "batches"):
                tenant.batches[batch.id] = batch
                owners.add(batch.owner)
            self._remove_orphans(tenant)
            for owner in owners:
                if blake2b(owner.encode(), digest_size=16).hexdigest() == folder.name:
                    self._tenants[owner] = tenant
                    self._count(tenant, self._size_of(tenant))

    def _records(self, kind: type[Any], folder: Path) -> Iterator[Any]:
        for path in sorted(folder.glob("*.json")):
            record = decoded(kind, path.read_bytes())
            if record is None or record.id != path.stem:
                self._warn(f"{path} is not a record of this server; it is ignored")
            else:
                yield record

    def _remove_orphans(self, tenant: _Tenant) -> None:
        kept = set(tenant.files)
        for batch in tenant.batches.values():
            if not batch.has_ended:
                kept |= {batch.output_id, batch.error_id}
        for path in [*tenant.folder.glob("files/*.data"), *tenant.folder.glob("*/*.part")]:
            if path.suffix == ".part" or path.stem not in kept:
                path.unlink()

    def _size_of(self, tenant: _Tenant) -> int:
        size = sum(_counted(file.num_bytes) for file in tenant.files.values()) + MIN_FILE_BYTES * len(tenant.batches)
        for batch in tenant.batches.values():
            for file_id in (batch.output_id, batch.error_id):
                path = tenant.folder / "files" / f"{file_id}.data"
                if not batch.has_ended and file_id not in tenant.files and path.exists():
                    size += path.stat().st_size
        return size


class Upload:
    """A file whose content arrives in parts. End it with ``finish`` or ``abort``. All methods block."""

    def __init__(self, store: BatchStore, owner: str, tenant: _Tenant) -> None:
        self._store, self._owner, self._tenant = store, owner, tenant
        self._id = new_file_id()
        self._path = tenant.folder / "files" / f"{self._id}.part"
        self._descriptor = open_new(self._path)
        self._size = 0

    def write(self, data: bytes) -> None:
        """Appends content. Raises PayloadTooLargeError or StorageLimitError."""
        limit = self._store.config.max_file_bytes
        if self._size + len(data) > limit:
            raise PayloadTooLargeError(
                f"The file has more than {limit} bytes (batch_config.max_file_bytes). Send several files."
            )
        self._store._check_space(self._tenant, len(data))
        write_all(self._descriptor, data)
        self._size += len(data)
        self._store._count(self._tenant, len(data))

    def finish(self, filename: str, purpose: str) -> StoredFile:
        """Makes the content a file of the tenant."""
        os.fsync(self._descriptor)
        self._close()
        self._path.replace(self._path.with_suffix(".data"))
        file = StoredFile(self._id, self._owner, filename, purpose, int(time.time()), self._size)
        self._store._count(self._tenant, _counted(self._size) - self._size)
        self._store.keep_file(file, is_counted=True)
        return file

    def abort(self) -> None:
        """Removes the content of the upload."""
        self._close()
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        self._store._count(self._tenant, -self._size)

    def _close(self) -> None:
        os.close(self._descriptor)


def new_file_id() -> str:
    """Returns a new id of a file."""
    return f"file-{secrets.token_hex(12)}"


def new_batch_id() -> str:
    """Returns a new id of a batch."""
    return f"batch_{secrets.token_hex(12)}"


def _counted(size: int) -> int:
    return max(size, MIN_FILE_BYTES)


def _locked(root: Path) -> int:
    """Makes the folder and locks it for this process. Returns the descriptor of the lock. Raises ConfigError."""
    make_folder(root)
    descriptor = open_appending(root / "lock")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ConfigError(
            f"batch_config.folder: {root} is used by another server; give each server a folder of its own"
        ) from None
    return descriptor
