"""The endpoints ``/v1/batches``: create, show, list and cancel batches."""

from __future__ import annotations

import re
import time
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.server.batches import files
from llm_serving.server.batches.files import store_of
from llm_serving.server.batches.records import Batch
from llm_serving.server.batches.store import new_batch_id, new_file_id
from llm_serving.server.fields.validation import StrictModel, short
from llm_serving.server.generation.scheduling import tenant_of
from llm_serving.server.http.body import json_response, read_request
from llm_serving.server.http.list_pages import page_of
from llm_serving.server.limits import MAX_NAME_CHARS
from llm_serving.server.openai import chat, completions
from llm_serving.server.pooling import embeddings
from llm_serving.server.state import Endpoint, ServerState

MAX_METADATA = 16
"""Maximum number of values in the metadata of a batch."""
MAX_METADATA_CHARS = 512
"""Maximum length of a value in the metadata of a batch."""
MAX_WINDOW_HOURS = 24 * 14
"""Maximum completion window of a batch: two weeks."""
_MAX_PAGE = 100
"""Maximum number of batches that one request lists."""
_HOUR_S = 3600
"""Seconds of an hour."""
_WINDOW = re.compile(r"([0-9]{1,4})([hd])")

BATCH_ENDPOINTS = {
    endpoint.path: endpoint for endpoint in (*chat.ENDPOINTS, *completions.ENDPOINTS, *embeddings.ENDPOINTS)
}
"""Maps a path to its endpoint, for all endpoints that the lines of a batch may call."""


def _check_window(text: str) -> str:
    if not 1 <= _hours(text) <= MAX_WINDOW_HOURS:
        problem = f"should be hours or days, for example '24h', up to {MAX_WINDOW_HOURS} hours"
        raise PydanticCustomError("completion_window", problem)
    return text


def _hours(text: str) -> int:
    """Returns the length of a completion window, such as ``24h`` or ``2d``, in hours. 0 if the text has another form.
    """
    found = _WINDOW.fullmatch(text)
    return 0 if found is None else int(found[1]) * (24 if found[2] == "d" else 1)


def _check_metadata(value: dict[str, str] | None) -> dict[str, str] | None:
    if value is not None and len(value) > MAX_METADATA:
        problem = f"should hold at most {MAX_METADATA} texts, not {len(value)}"
        raise PydanticCustomError("metadata", problem)
    for name, text in (value or {}).items():
        if len(name) > 64 or len(text) > MAX_METADATA_CHARS:
            problem = f"holds {short(name)}; names have at most 64 and texts {MAX_METADATA_CHARS} characters"
            raise PydanticCustomError("metadata", "{problem}", {"problem": problem})
    return value


class BatchRequest(StrictModel):
    """Request body of ``/v1/batches``."""

    input_file_id: str = Field(max_length=MAX_NAME_CHARS, description="Id of a file with the purpose `batch`.")
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"] = Field(
        description="Path of all requests of the file."
    )
    completion_window: Annotated[str, AfterValidator(_check_window)] = Field(
        description="Time after which the batch expires, for example `24h`."
    )
    metadata: Annotated[dict[str, str] | None, AfterValidator(_check_metadata)] = Field(
        default=None, description="Texts that the responses show."
    )


async def _create_batch(state: ServerState, request: Request) -> Response:
    store = store_of(state)
    body = await read_request(BatchRequest, request, state.settings.max_body_bytes)
    now = int(time.time())
    batch = Batch(
        id=new_batch_id(),
        owner=tenant_of(request),
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        created_at=now,
        expires_at=int(now + _HOUR_S * _hours(body.completion_window)),
        output_id=new_file_id(),
        error_id=new_file_id(),
        metadata=body.metadata or {},
    )
    await store.run(store.add_batch, batch)
    response = json_response(batch.shown())
    store.changed.set()
    return response


async def _list_batches(state: ServerState, request: Request) -> Response:
    store = store_of(state)
    batches = await store.run(store.batches, tenant_of(request))
    return json_response(page_of(request, [batch.shown() for batch in batches], 20, _MAX_PAGE))


async def _get_batch(state: ServerState, request: Request) -> Response:
    store = store_of(state)
    batch = await store.run(store.batch, tenant_of(request), request.path_params["batch_id"])
    return json_response(batch.shown())


async def _cancel_batch(state: ServerState, request: Request) -> Response:
    store = store_of(state)
    batch = await store.run(store.cancel_batch, tenant_of(request), request.path_params["batch_id"])
    store.changed.set()
    return json_response(batch.shown())


ENDPOINTS = (
    *files.ENDPOINTS,
    Endpoint(
        "POST", "/v1/batches", _create_batch, "OpenAI: run the requests of a file later.", BatchRequest,
        '{"input_file_id": "FILE", "endpoint": "/v1/chat/completions", "completion_window": "24h"}',
    ),
    Endpoint("GET", "/v1/batches", _list_batches, "OpenAI: the batches of the API key."),
    Endpoint("GET", "/v1/batches/{batch_id}", _get_batch, "OpenAI: the state of a batch."),
    Endpoint("POST", "/v1/batches/{batch_id}/cancel", _cancel_batch, "OpenAI: cancel a batch."),
)  # fmt: skip
