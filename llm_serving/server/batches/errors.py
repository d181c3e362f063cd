"""The errors of files and batches."""

from __future__ import annotations

from llm_serving.errors import RequestError


class BatchesOffError(RequestError):
    """The server has no folder for files, so it has neither files nor batches."""

    code = "batches_off"

    def __init__(self) -> None:
        super().__init__(
            "This server keeps no files and runs no batches. The operator can turn them on with "
            "batch_config.folder, for example --set batch_config.folder=output/batches."
        )


class UnknownFileError(RequestError):
    """The file does not exist, or it belongs to another tenant."""

    status = 404
    code = "file_not_found"


class UnknownBatchError(RequestError):
    """The batch does not exist, or it belongs to another tenant."""

    status = 404
    code = "batch_not_found"


class FileInUseError(RequestError):
    """The file is the input of a batch that has not ended."""

    status = 409
    code = "file_in_use"


class StorageLimitError(RequestError):
    """The files or batches of a tenant, or of all tenants, reach a limit of ``batch_config``."""

    code = "storage_limit_exceeded"
