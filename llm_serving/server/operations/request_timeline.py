"""``GET /requests/{request_id}/timeline``: the timeline of a request from the flight recording, for operators."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from llm_serving.server.errors import UnavailableError
from llm_serving.server.fields.validation import short
from llm_serving.server.operations.receipts import UnknownRequestError
from llm_serving.server.state import Endpoint, ServerState

READER = "llm_serving.flight.one_request"
"""Name of the module that reads the recording. The server runs it in a separate process."""
READ_TIMEOUT_S = 30.0
"""Maximum seconds for reading the recording."""
MAX_ID_CHARS = 256
"""Maximum length of a request id."""

_PACKAGES = Path(__file__).resolve().parents[3]


async def _get_timeline(state: ServerState, request: Request) -> Response:
    request_id = request.path_params["request_id"]
    folder = state.settings.recordings_folder
    if folder is None:
        raise UnknownRequestError("There are no timelines, because log_config.flight_recorder_mib is 0.")
    timeline = b"null"
    if request_id.isprintable() and len(request_id) <= MAX_ID_CHARS:
        async with state.timeline_lock:  # one process at a time, so that operators use at most one core
            timeline = await asyncio.get_running_loop().run_in_executor(None, _read, folder, request_id)
    if timeline == b"null":
        raise UnknownRequestError(
            f"The flight recording has no request {short(request_id)}. It keeps the latest requests only "
            "(log_config.flight_recorder_mib), and gets new ones after half a second."
        )
    return Response(timeline, media_type="application/json")


def _read(folder: str, request_id: str) -> bytes:
    """Runs ``READER`` for one request and returns its JSON. Raises UnavailableError if it takes too long or fails."""
    command = [sys.executable, "-m", READER, folder, request_id]
    try:
        done = subprocess.run(
            command, cwd=_PACKAGES, stdin=subprocess.DEVNULL, capture_output=True, timeout=READ_TIMEOUT_S, check=True
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(
            f"The recording was not read within {READ_TIMEOUT_S:g} s; use 'llm-serving replay' on its folder.", "slow"
        ) from None
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise UnavailableError(f"The recording cannot be read: {reason[:300]}", "recording_unreadable") from None
    return done.stdout


ENDPOINTS = (
    Endpoint(
        "GET", "/requests/{request_id}/timeline", _get_timeline,
        "The phases and prompt chunks of a request in their order, from the flight recording.", admin=True,
    ),
)  # fmt: skip
