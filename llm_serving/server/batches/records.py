"""The records of files and batches as they are on disk, and their JSON in responses."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

import orjson

INPUT_PURPOSE = "batch"
OUTPUT_PURPOSE = "batch_output"
ENDED = ("completed", "failed", "cancelled", "expired")
"""States of a batch that has ended. The state does not change any more."""

_FILE_ID = re.compile(r"file-[0-9a-f]{24}")
_BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")
RecordT = TypeVar("RecordT", "StoredFile", "Batch")


@dataclass(slots=True)
class StoredFile:
    """A file of a tenant. Times are Unix times in seconds."""

    id: str
    owner: str
    filename: str
    purpose: str
    created_at: int
    num_bytes: int

    @property
    def is_valid(self) -> bool:
        return _FILE_ID.fullmatch(self.id) is not None and self.num_bytes >= 0

    def shown(self) -> dict[str, Any]:
        """Returns the file as a JSON object of OpenAI's API."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": None,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(slots=True)
class Batch:
    """A batch of a tenant. Times are Unix times in seconds, or None if the batch has not reached that state."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    output_id: str
    """Id of the file with the responses. The tenant gets the file when the batch has ended."""
    error_id: str
    """Id of the file with the errors of failed lines."""
    metadata: dict[str, str] = field(default_factory=dict)
    status: str = "validating"
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)
    """Reasons why the whole batch failed."""
    has_output: bool = False
    has_errors: bool = False

    @property
    def is_valid(self) -> bool:
        ids = (self.input_file_id, self.output_id, self.error_id)
        return _BATCH_ID.fullmatch(self.id) is not None and all(map(_FILE_ID.fullmatch, ids))

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    def shown(self) -> dict[str, Any]:
        """Returns the batch as a JSON object of OpenAI's API."""
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_id if self.has_output else None,
            "error_file_id": self.error_id if self.has_errors else None,
            "created_at": self.created_at,
            "in_progress_at": self.in_progress_at,
            "expires_at": self.expires_at,
            "finalizing_at": self.finalizing_at,
            "completed_at": self.completed_at,
            "failed_at": self.failed_at,
            "expired_at": self.expired_at,
            "cancelling_at": self.cancelling_at,
            "cancelled_at": self.cancelled_at,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata or None,
        }


def encoded(record: StoredFile | Batch) -> bytes:
    """Returns a record as JSON for the disk."""
    return orjson.dumps(asdict(record))


def decoded(kind: type[RecordT], data: bytes) -> RecordT | None:
    """Returns a record from its JSON. None if the JSON is not a valid record."""
    try:
        value = orjson.loads(data)
        record = kind(**value) if value.keys() == {each.name for each in fields(kind)} else None
    except (ValueError, AttributeError, TypeError):
        return None
    return record if record is not None and record.is_valid else None
