"""The errors of the HTTP edge: for requests that it refuses itself, for files and for batches."""

from __future__ import annotations

from llm_serving.errors import LLMServingError, RequestError


class InvalidJSONError(RequestError):
    """The request body is not a JSON object, or is nested too deep."""

    code = "invalid_json"


class MediaTypeError(RequestError):
    """The headers do not declare the request body as uncompressed JSON in UTF-8."""

    status = 415
    code = "unsupported_media_type"


class PayloadTooLargeError(RequestError):
    """The request body is larger than ``serving_config.max_body_bytes``."""

    status = 413
    code = "payload_too_large"


class BodyTimeoutError(RequestError):
    """The request body did not arrive in time."""

    status = 408
    code = "request_timeout"


class ForbiddenError(RequestError):
    """The request comes from a web page of another origin, or names a host that is not this server."""

    status = 403
    code = "forbidden"


class UnavailableError(LLMServingError):
    """The server cannot serve requests now. ``code`` is the reason: starting, recovering, stopping or stopped."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class ClientGoneError(Exception):
    """The client has closed the connection."""


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
