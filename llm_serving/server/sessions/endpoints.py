"""The endpoints ``/v1/sessions``: list the sessions of a key, export one as a file, import a file, forget a session."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llm_serving.errors import CheckpointError, RequestError
from llm_serving.kvstore.identity import BlockIdentity
from llm_serving.kvstore.setup import KvTiers
from llm_serving.kvstore.transfers import BlockTransfers
from llm_serving.server.errors import ClientGoneError, MediaTypeError, PayloadTooLargeError, UnavailableError
from llm_serving.server.fields.validation import clip, short
from llm_serving.server.generation.scheduling import tenant_of, visit_of
from llm_serving.server.http.body import drain_body, json_response
from llm_serving.server.http.lifecycle import ReadAhead, run_while_connected
from llm_serving.server.models.lookup import served
from llm_serving.server.sessions.errors import SessionsOffError, UnknownSessionError
from llm_serving.server.state import AnyResponse, Endpoint, ServerState
from llm_serving.sessions.book import SESSION_ID, Session
from llm_serving.sessions.exporting import PIECE_BYTES, SessionChangedError, SessionExport
from llm_serving.sessions.importing import ImportResult, SessionImport

MAX_TRANSFERS = 4
"""Maximum number of exports and imports at the same time. Each of them keeps a few pieces of its file in memory."""
READ_AHEAD_BYTES = 2 * PIECE_BYTES
"""Bytes of a file that an import may keep while it does not process them. As long as the limit is not reached, the
import ends when its client closes the connection.
"""
MEDIA_TYPE = "application/octet-stream"
_POLL_S = 0.1
"""Seconds between two checks whether the digests of the weights are known."""
_MAX_POLLS = 300
"""An import polls every ``_POLL_S`` for the digests of the weights, at most this number of times.

The server and its nodes must first have read their weights. A longer wait would end with status 408, because the body
must arrive within ``MESSAGE_TIMEOUT_S``.
"""
_POLLS_PER_GB = 40
"""Additional polls of an export for each GB of weights. The server and each node need about a second to read a GB."""


async def _list_sessions(state: ServerState, request: Request) -> Response:
    sessions = state.sessions.of_tenant(tenant_of(request))
    return json_response({"object": "list", "data": [_shown(session) for session in sessions]})


async def _export(state: ServerState, request: Request) -> AnyResponse:
    """Handles ``GET /v1/sessions/{session_id}``: send a session as a file."""
    _check_right(request)
    session = _found(state, request)
    state = await served(state, request, session.model)
    tiers, transfers = _tiers_of(state)
    state.check_ready()
    with _transfer(state):
        identity = await run_while_connected(state.active, request.receive, _identity(tiers, _POLLS_PER_GB))
    return _SessionFile(state, SessionExport(state.engine.config, identity, transfers, session).pieces(), session)


async def _import(state: ServerState, request: Request) -> Response:
    """Handles ``PUT /v1/sessions/{session_id}``: read a session from the body, while it arrives.

    If the client closes the connection, the import ends immediately, so that another one may begin.
    """
    _check_right(request)
    session_id, body = _session_id(request), ReadAhead(request.receive, READ_AHEAD_BYTES)
    try:
        state = await served(state, request, request.query_params.get("model"))
        tiers, transfers = _tiers_of(state)
        _check_body(state, request)
        state.check_ready()
        with _transfer(state):
            receiving = _receive(state, body.receive, tiers, transfers)
            work, result = await run_while_connected(state.active, body.watch, receiving)
    except RequestError:
        if not body.is_complete:
            await drain_body(request.receive)
        raise
    assert work.head is not None
    manifest = work.head.manifest
    session = Session(
        session_id, state.engine.model_name, work.head.tokens, work.salt, manifest.adapter, state.sessions.clock(),
        nonce=work.nonce,
    )  # fmt: skip
    state.sessions.put(tenant_of(request), session)
    state.log.event(
        "session_imported",
        session_id=session_id,
        tokens=session.num_tokens,
        blocks=result.num_blocks,
        differences=result.differences,
    )
    return json_response({**_shown(session), **_result(result)})


async def _delete(state: ServerState, request: Request) -> Response:
    session_id = _found(state, request).session_id
    state.sessions.remove(tenant_of(request), session_id)
    return json_response({"id": session_id, "object": "session", "deleted": True})


async def _receive(
    state: ServerState, receive: Receive, tiers: KvTiers, transfers: BlockTransfers
) -> tuple[SessionImport, ImportResult]:
    """Passes the body to an import while it arrives. Returns the import and its result. Raises RequestError."""
    identity = await _identity(tiers)
    work = SessionImport(state.engine.config, identity, transfers, tiers.block_bytes)
    size, limit = 0, state.settings.max_session_bytes
    while True:
        message = await receive()
        size += len(message["body"])
        if size > limit:
            raise _too_large(f"more than {limit}", limit)
        if message["body"] and not await work.feed(message["body"]):
            await drain_body(receive)
            break
        if not message["more_body"]:
            break
    return work, work.finish()


class _SessionFile:
    """The response with a session file, sent piece by piece. While it waits for a slow client, it keeps no blocks of
    the KV cache in use.

    If the agents are lost, the response ends without its last chunk. So the client sees that the file is incomplete.
    If the client closes the connection, the export ends immediately, so that another one may begin.
    """

    def __init__(self, state: ServerState, pieces: AsyncIterator[bytes], session: Session) -> None:
        self.status_code = 200
        self._state = state
        self._pieces = pieces
        self._session = session

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with _transfer(self._state):
            try:
                await run_while_connected(self._state.active, receive, self._send_file(send))
            except ClientGoneError:
                self.status_code = 499

    async def _send_file(self, send: Send) -> None:
        name = self._session.session_id
        disposition = f'attachment; filename="{name}.session"'.encode()
        headers = [(b"content-type", MEDIA_TYPE.encode()), (b"content-disposition", disposition)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for piece in self._pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except SessionChangedError as error:
            self._state.log.warning(str(error), event="session_cut_off", session_id=name)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _check_right(request: Request) -> None:
    visit = visit_of(request)
    if visit is not None:
        visit.check_sessions()


def _check_body(state: ServerState, request: Request) -> None:
    """Checks the headers of an import before the body is read. Raises RequestError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != MEDIA_TYPE:  # a form on a foreign web page cannot declare this type
        raise MediaTypeError(f"The content type is {clip(kind) or 'not given'!r}; send 'Content-Type: {MEDIA_TYPE}'.")
    declared, limit = request.headers.get("content-length", ""), state.settings.max_session_bytes
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(declared, limit)


def _too_large(size: str, limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"The session file has {size} bytes; the maximum is {limit} (kv_tier_config.max_session_bytes)."
    )


def _session_id(request: Request) -> str:
    """Returns the session id in the URL's path. Raises RequestError if it is not a valid id."""
    session_id: str = request.path_params["session_id"]
    if not SESSION_ID.fullmatch(session_id):
        raise RequestError(
            f"The session id {short(session_id)} is not valid: it has 1 to 128 letters, digits, '.', '_' or '-', and "
            "begins with a letter or digit.",
            param="session_id",
        )
    return session_id


def _found(state: ServerState, request: Request) -> Session:
    """Returns the session that the URL's path names. Raises UnknownSessionError, also for a session of another key."""
    session_id = _session_id(request)
    session = state.sessions.find(tenant_of(request), session_id)
    if session is None:
        raise UnknownSessionError(
            f"There is no session {session_id!r}. A request with 'session_id' makes one. The server forgets the oldest "
            "sessions, and all of them when it ends."
        )
    return session


def _tiers_of(state: ServerState) -> tuple[KvTiers, BlockTransfers]:
    tiers, transfers = state.engine.tiers, state.engine.transfers
    if tiers is None or transfers is None:
        raise SessionsOffError(
            "This model has no KV tiers, which sessions need; start it with kv_tier_config.host_blocks above 0."
        )
    return tiers, transfers


async def _identity(tiers: KvTiers, polls_per_gb: int = 0) -> BlockIdentity:
    """Returns the identity of the model's blocks: the model, weights and kernels that determine the values in them.

    Waits until the server has read its weights. If all agents are on nodes, also waits until a node has compared its
    weights with the server's. Raises UnavailableError if this takes too long, or if the weights on disk have changed.
    ``polls_per_gb`` is the additional number of polls for each GB of weights.
    """
    gigabytes = tiers.weights_bytes / 1e9
    num_polls, begun = _MAX_POLLS + int(polls_per_gb * gigabytes), time.monotonic()
    reading = asyncio.wrap_future(tiers.read_identity())
    # Reads the error of ``reading``, so that asyncio does not log it. A later call of this function reports the error.
    reading.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    await asyncio.wait({reading}, timeout=num_polls * _POLL_S)
    if not reading.done():
        raise _unknown("server is", gigabytes)
    try:
        identity = reading.result()
    except (CheckpointError, OSError) as error:
        raise UnavailableError(f"Sessions are not possible now: {error}.", "weights_changed") from None
    num_polls -= int((time.monotonic() - begun) / _POLL_S)
    for _ in range(max(1, num_polls)):  # counts polls and not seconds: the server process may be suspended
        if not tiers.waits_for_nodes:
            return identity
        await asyncio.sleep(_POLL_S)
    raise _unknown("nodes are", gigabytes)


def _unknown(who: str, gigabytes: float) -> UnavailableError:
    return UnavailableError(
        f"Sessions are not possible now: the {who} still reading the weights ({gigabytes:.1f} GB). This usually takes "
        "a second for each GB; try again later.",
        "weights_unknown",
    )


@contextlib.contextmanager
def _transfer(state: ServerState) -> Iterator[None]:
    """Counts an export or an import during the ``with`` block. Raises UnavailableError if too many run."""
    book = state.sessions
    if book.num_transfers >= MAX_TRANSFERS:
        raise UnavailableError(f"{MAX_TRANSFERS} sessions are being exported or imported; try again.", "overloaded")
    book.num_transfers += 1
    try:
        yield
    finally:
        book.num_transfers -= 1


def _shown(session: Session) -> dict[str, Any]:
    return {
        "id": session.session_id,
        "object": "session",
        "model": session.model,
        "tokens": session.num_tokens,
        "updated_at": int(session.updated),
        "imported": bool(session.nonce),
    }


def _result(result: ImportResult) -> dict[str, Any]:
    return {
        "resumed_tokens": result.num_resumed_tokens,
        "recomputed_tokens": result.num_tokens - result.num_resumed_tokens,
        "differences": result.differences,
    }


ENDPOINTS = (
    Endpoint("GET", "/v1/sessions", _list_sessions, "The sessions of the API key."),
    Endpoint("GET", "/v1/sessions/{session_id}", _export, "Export a session as a file: its tokens and KV blocks."),
    Endpoint(
        "PUT", "/v1/sessions/{session_id}", _import, "Import a session file. `model` in the query names the model.",
        media_type=MEDIA_TYPE,
    ),
    Endpoint("DELETE", "/v1/sessions/{session_id}", _delete, "Forget a session."),
)  # fmt: skip
