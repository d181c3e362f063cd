"""``POST /profile/start`` and ``POST /profile/stop``: profiles of the agents while the server runs."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.errors import LLMServingError, RequestError
from llm_serving.server.errors import UnavailableError
from llm_serving.server.fields.validation import StrictModel
from llm_serving.server.http.body import json_response, read_request
from llm_serving.server.http.guard import is_on_this_machine
from llm_serving.server.state import Endpoint, ServerState

__all__ = ["ENDPOINTS"]

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 300.0
"""Maximum seconds to stop a profile. The agents write its files then, which takes longer with more operators."""
MAX_PROFILE_S = 600

logger = logging.getLogger("llm_serving.server.operations.profile")


class ProfileRequest(StrictModel):
    """Options of a profile. The body may also be empty."""

    max_seconds: int = Field(
        default=60, ge=1, le=MAX_PROFILE_S, description="The profile stops by itself after this number of seconds."
    )


class ProfileConflictError(RequestError):
    """A profile cannot start because another profile runs, or cannot stop because no profile runs."""

    status = 409
    code = "profile_conflict"


async def _start(state: ServerState, request: Request) -> Response:
    body = ProfileRequest()
    if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
        body = await read_request(ProfileRequest, request, state.settings.max_body_bytes)
    state.check_ready()
    running = state.profile
    if running.lock.locked() or running.folder is not None:
        raise ProfileConflictError("A profile is running or being written. POST /profile/stop ends it.")
    async with running.lock:
        folder = str(Path(state.settings.profile_folder).absolute() / time.strftime("%Y%m%d-%H%M%S"))
        agents = await _tell(state, folder, START_TIMEOUT_S)
        if any(agent["error"] for agent in agents):
            # If one agent failed, stop the profile on the agents that have started it.
            await _tell(state, None, STOP_TIMEOUT_S)
            reasons = "; ".join(str(agent["error"]) for agent in agents if agent["error"])
            logger.warning("a profile could not start: %s", reasons)
            is_local = is_on_this_machine(request)
            raise UnavailableError(
                reasons if is_local else "The agents could not start a profile; see the server's log.", "profile_failed"
            )
        running.folder, running.last, loop = folder, None, asyncio.get_running_loop()
        running.timer = loop.call_later(body.max_seconds, lambda: loop.create_task(_stop_late(state)))
    state.log.event("profile_start", folder=folder, agents=len(agents), max_seconds=body.max_seconds)
    return json_response({"folder": folder, "agents": len(agents), "max_seconds": body.max_seconds})


async def _stop(state: ServerState, request: Request) -> Response:
    if state.profile.folder is None and state.profile.last is not None:
        last, state.profile.last = state.profile.last, None  # the timer stopped the profile and stored its result
        return json_response(last)
    return json_response(await _finish(state))


async def _finish(state: ServerState) -> dict[str, Any]:
    running = state.profile
    async with running.lock:
        folder, running.folder = running.folder, None
        if running.timer is not None:
            running.timer.cancel()
            running.timer = None
        if folder is None:
            raise ProfileConflictError("No profile is running. POST /profile/start starts one.")
        agents = await _tell(state, None, STOP_TIMEOUT_S)
    failed = [str(agent["error"]) for agent in agents if agent["error"]]
    state.log.event("profile_stop", folder=folder, agents=len(agents), message="; ".join(failed))
    return {"folder": folder, "agents": agents}


async def _stop_late(state: ServerState) -> None:
    """Stop a profile at its maximum time. The result is kept until ``POST /profile/stop`` asks for it."""
    try:
        state.profile.last = await _finish(state)
    except LLMServingError as error:
        logger.warning("a profile could not be stopped: %s", error)


async def _tell(state: ServerState, folder: str | None, timeout: float) -> list[dict[str, object]]:
    """Start a profile of all agents with files in ``folder``. If ``folder`` is None, stop the profile.

    Raises UnavailableError if the agents do not reply within ``timeout`` seconds, or if no agent is ready.
    """
    try:
        agents = await state.engine.profile(folder, timeout)
    except asyncio.TimeoutError:
        raise UnavailableError(
            f"The agents did not reply within {timeout:g} seconds; see their logs.", "profile_failed"
        ) from None
    if not agents:
        raise UnavailableError("No agent is ready, so nothing can be profiled.", "profile_failed")
    return agents


ENDPOINTS = (
    Endpoint(
        "POST", "/profile/start", _start, "Start a profile of the agents.",
        ProfileRequest, '{"max_seconds": 60}', admin=True,
    ),
    Endpoint("POST", "/profile/stop", _stop, "Stop the profile; files and slowest operators.", admin=True),
)  # fmt: skip
