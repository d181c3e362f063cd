"""The endpoints ``/v1/files``: upload, list, read and delete files."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llm_serving.errors import RequestError
from llm_serving.server.batches.multipart import FormParser, InvalidFormError, PartBegin, boundary_of
from llm_serving.server.batches.records import INPUT_PURPOSE, StoredFile
from llm_serving.server.batches.store import BatchStore, Upload
from llm_serving.server.errors import BatchesOffError, ClientGoneError
from llm_serving.server.fields.validation import StrictModel, clip, short
from llm_serving.server.generation.scheduling import tenant_of
from llm_serving.server.http.body import drain_body, json_response
from llm_serving.server.http.list_pages import in_order, page_of
from llm_serving.server.limits import MAX_NAME_CHARS
from llm_serving.server.state import AnyResponse, Endpoint, ServerState

MAX_PAGE = 10_000
"""Maximum number of files that one request lists."""
_MAX_FIELD_BYTES = 1024
"""Maximum size of a form field other than the file."""
_READ_BYTES = 256 * 1024
"""Bytes that are read at a time while a file is sent."""


class UploadForm(StrictModel):
    """The form of ``POST /v1/files``. It is sent as ``multipart/form-data`` and not as JSON."""

    file: str = Field(description="The file: one request on each line.", json_schema_extra={"format": "binary"})
    purpose: str = Field(description="`batch`.")


def store_of(state: ServerState) -> BatchStore:
    """Returns the store of files and batches. Raises BatchesOffError if the server has no store."""
    if state.batches is None:
        raise BatchesOffError
    return state.batches


async def _create_file(state: ServerState, request: Request) -> AnyResponse:
    """Handles ``POST /v1/files``: writes the uploaded file to disk while the body arrives."""
    store = store_of(state)
    parser = FormParser(boundary_of(request.headers.get("content-type", "")))
    upload = await store.run(store.begin_upload, tenant_of(request))
    form = _Form(store, upload)
    try:
        await _receive_form(request, parser, form)
        file = await store.run(upload.finish, *form.names())
    except BaseException as error:
        await asyncio.shield(store.run(upload.abort))
        if isinstance(error, RequestError):
            await drain_body(request.receive)
        raise
    return json_response(file.shown())


async def _receive_form(request: Request, parser: FormParser, form: _Form) -> None:
    """Reads the body until its last boundary. Raises RequestError or ClientGoneError."""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        for event in parser.feed(message.get("body", b"")):
            if isinstance(event, PartBegin):
                form.begin(event)
            else:
                await form.add(event.data)
        if not message.get("more_body"):
            break
    if not parser.is_complete:
        raise InvalidFormError("The form ends before its last boundary.")


class _Form:
    """Receives the parts of an upload's form: writes the file to disk, and keeps the other fields in memory."""

    def __init__(self, store: BatchStore, upload: Upload) -> None:
        self._store, self._upload = store, upload
        self._filename: str | None = None
        self._fields: dict[str, bytes] = {}
        self._name = ""

    def begin(self, part: PartBegin) -> None:
        """Begins a part. Raises RequestError for an unknown or repeated field."""
        self._name = part.name
        if part.name not in ("file", "purpose"):
            raise RequestError(
                f"Unrecognized request argument supplied: {clip(part.name)}", param=clip(part.name),
                code="unknown_parameter",
            )  # fmt: skip
        if (part.name == "file" and self._filename is not None) or part.name in self._fields:
            raise InvalidFormError(f"The form has the field '{part.name}' twice.", param=part.name)
        if part.name == "file":
            self._filename = _clean_name(part.filename or "")
        else:
            self._fields[part.name] = b""

    async def add(self, data: bytes) -> None:
        """Adds content to the part that began last."""
        if self._name == "file":
            await self._store.run(self._upload.write, data)
            return
        self._fields[self._name] += data
        if len(self._fields[self._name]) > _MAX_FIELD_BYTES:
            raise InvalidFormError(f"'{self._name}' has more than {_MAX_FIELD_BYTES} bytes.", param=self._name)

    def names(self) -> tuple[str, str]:
        """Returns the file's name and purpose. Raises RequestError if the form is not complete."""
        for name, value in (("file", self._filename), ("purpose", self._fields.get("purpose"))):
            if value is None:
                raise RequestError(
                    f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter"
                )
        purpose = self._fields["purpose"].decode("utf-8", "replace")
        if purpose != INPUT_PURPOSE:
            raise RequestError(
                f"'purpose' is {short(purpose)}; only '{INPUT_PURPOSE}' is supported.",
                param="purpose",
                code="invalid_value",
            )
        return self._filename or "upload.jsonl", purpose


def _clean_name(name: str) -> str:
    """Returns the last part of a client's file name. The server only shows this name. No file on disk has it."""
    last = name.replace("\\", "/").rpartition("/")[2]
    return "".join(char for char in last if char.isprintable())[:MAX_NAME_CHARS]


async def _list_files(state: ServerState, request: Request) -> Response:
    store = store_of(state)
    files = await store.run(store.files, tenant_of(request))
    purpose = request.query_params.get("purpose")
    chosen = in_order(request, [file for file in files if purpose in (None, file.purpose)])
    return json_response(page_of(request, [file.shown() for file in chosen], MAX_PAGE, MAX_PAGE))


async def _get_file(state: ServerState, request: Request) -> Response:
    return json_response((await _file(state, request)).shown())


async def _file(state: ServerState, request: Request) -> StoredFile:
    store = store_of(state)
    return await store.run(store.file, tenant_of(request), request.path_params["file_id"])


async def _get_content(state: ServerState, request: Request) -> AnyResponse:
    file = await _file(state, request)
    return FileContent(store_of(state).path_of(file), file.num_bytes)


async def _delete_file(state: ServerState, request: Request) -> Response:
    store, file_id = store_of(state), request.path_params["file_id"]
    await store.run(store.delete_file, tenant_of(request), file_id)
    return json_response({"id": file_id, "object": "file", "deleted": True})


class FileContent:
    """A response with the content of a file.

    A thread reads the file part by part. It reads the next part only after the client has accepted the previous one.
    """

    status_code = 200

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size = path, size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        file = await loop.run_in_executor(None, partial(open, self._path, "rb"))
        try:
            size = b"%d" % self._size
            headers = [(b"content-type", b"application/octet-stream"), (b"content-length", size)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            left, is_complete = self._size, False
            while not is_complete:
                data = await loop.run_in_executor(None, file.read, min(left, _READ_BYTES))
                if left and not data:
                    raise OSError(f"{self._path} is shorter than its record states")
                left -= len(data)
                # The message with the last bytes also ends the response, because a client that has all bytes may
                # immediately send its next request.
                is_complete = left == 0
                await send({"type": "http.response.body", "body": data, "more_body": not is_complete})
        finally:
            file.close()


ENDPOINTS = (
    Endpoint("POST", "/v1/files", _create_file, "OpenAI: upload a file.", UploadForm, media_type="multipart/form-data"),
    Endpoint("GET", "/v1/files", _list_files, "OpenAI: the files of the API key."),
    Endpoint("GET", "/v1/files/{file_id}", _get_file, "OpenAI: facts about a file."),
    Endpoint("GET", "/v1/files/{file_id}/content", _get_content, "OpenAI: the content of a file."),
    Endpoint("DELETE", "/v1/files/{file_id}", _delete_file, "OpenAI: delete a file."),
)
