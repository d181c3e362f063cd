"""``POST /profile/start`` and ``POST /profile/stop``: profiles of the agents while the server runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from pathlib import Path
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import AgentLostError, LLMServingError, RequestError
from llm_serving.server.errors import UnavailableError
from llm_serving.server.fields.validation import StrictModel
from llm_serving.server.http.body import json_response, read_request
from llm_serving.server.http.guard import is_on_this_machine
from llm_serving.server.models.lookup import main_model
from llm_serving.server.state import Endpoint, RunningProfile, ServerState

__all__ = ["ENDPOINTS"]

START_TIMEOUT_S = 60.0
"""Maximum seconds until the agents have started a profile. ``AgentQuestions.profile`` adds time for slow agents."""
STOP_TIMEOUT_S = 300.0
"""Maximum seconds to wait until the agents have stopped a profile. Meanwhile, the agents write the files of the
profile, which takes long if many operators ran.
"""
MAX_PROFILE_S = 600
"""Maximum length of a profile in seconds."""

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


class NoReplyError(UnavailableError):
    """The agents did not reply in time to the command that starts or stops a profile."""


_BUSY = "A profile is running or being written. POST /profile/stop ends it."


async def _start(state: ServerState, request: Request) -> Response:
    body = ProfileRequest()
    if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
        body = await read_request(ProfileRequest, request, state.settings.max_body_bytes)
    state = main_model(state, request)
    state.check_ready()
    running = state.profile
    if running.lock.locked() or _is_on(running):
        raise ProfileConflictError(_BUSY)
    async with running.lock:
        if _is_on(running):  # another request has begun while this one waited for the lock
            raise ProfileConflictError(_BUSY)
        folder = _new_folder(state)
        running.engine, running.folder = state.engine, folder
        agents = await _started(state, folder, is_local=is_on_this_machine(request))
        running.last = None
        _stop_after(state, body.max_seconds)
    state.log.event("profile_start", folder=folder, agents=len(agents), max_seconds=body.max_seconds)
    return json_response({"folder": folder, "agents": len(agents), "max_seconds": body.max_seconds})


def _new_folder(state: ServerState) -> str:
    """Returns the path of a folder that no other profile has.

    The name has random digits, because two profiles can start in the same millisecond. The server cannot reserve the
    name by making the folder, because agents on other machines write to their own disks.
    """
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
    return str(Path(state.settings.profile_folder).absolute() / name)


async def _started(state: ServerState, folder: str, *, is_local: bool) -> list[dict[str, object]]:
    """Starts the profile in all agents. If one agent cannot start it, stops it in all agents and raises
    UnavailableError.
    """
    running = state.profile
    try:
        agents = await _tell(state.engine, folder, START_TIMEOUT_S)
    except NoReplyError:
        _stop_after(state, 0)  # the agents may still start the profile, which this command then stops
        raise
    except BaseException:
        running.folder = None
        raise
    if any(agent["error"] for agent in agents):
        with contextlib.suppress(UnavailableError):
            await _tell(state.engine, None, STOP_TIMEOUT_S)
        running.folder = None
        reasons = "; ".join(str(agent["error"]) for agent in agents if agent["error"])
        logger.warning("a profile could not start: %s", reasons)
        text = reasons if is_local else "The agents could not start a profile; see the server's log."
        raise UnavailableError(text, "profile_failed")
    return agents


async def _stop(state: ServerState, request: Request) -> Response:
    running = main_model(state, request).profile
    if running.folder is None and running.last is not None:
        last, running.last = running.last, None  # the timer stopped the profile and stored its result
        return json_response(last)
    return json_response(await _finish(state))


async def _finish(state: ServerState, folder: str | None = None) -> dict[str, Any]:
    """Stops the running profile and returns its result. If ``folder`` is given, stops only the profile of this folder.
    """
    running = state.profile
    async with running.lock:
        if running.folder is None or folder not in (None, running.folder):
            raise ProfileConflictError("No profile is running. POST /profile/start starts one.")
        folder, engine, running.folder, running.engine = running.folder, running.engine, None, None
        if running.timer is not None:
            running.timer.cancel()
            running.timer = None
        assert engine is not None, "a running profile has an engine"
        try:
            agents = await _tell(engine, None, STOP_TIMEOUT_S)
        except AgentLostError:
            raise ProfileConflictError(
                "The profile has no result, because its agents have ended, for example after a reload of the model."
            ) from None
    failed = [str(agent["error"]) for agent in agents if agent["error"]]
    state.log.event("profile_stop", folder=folder, agents=len(agents), message="; ".join(failed))
    return {"folder": folder, "agents": agents}


def _stop_after(state: ServerState, seconds: float) -> None:
    """Stops the running profile after ``seconds`` seconds, if it still runs then."""
    loop, folder = asyncio.get_running_loop(), state.profile.folder
    assert folder is not None, "only a running profile is stopped"
    state.profile.timer = loop.call_later(seconds, lambda: loop.create_task(_stop_late(state, folder)))


async def _stop_late(state: ServerState, folder: str) -> None:
    """Stops a profile at its maximum time. The result is kept until ``POST /profile/stop`` asks for it."""
    try:
        state.profile.last = await _finish(state, folder)
    except LLMServingError as error:
        logger.warning("a profile could not be stopped: %s", error)


def _is_on(running: RunningProfile) -> bool:
    """Returns whether a profile runs or is being started. Returns False if the engine has ended, because the profile
    ended with it.
    """
    if running.engine is not None and running.engine.state == "stopped":
        running.folder = running.engine = None
    return running.folder is not None


async def _tell(engine: AsyncEngine, folder: str | None, timeout: float) -> list[dict[str, object]]:
    """Starts a profile of all agents with files in ``folder``. If ``folder`` is None, stops the profile.

    Raises NoReplyError if the agents do not reply within ``timeout`` seconds, UnavailableError if no agent is ready,
    and AgentLostError if the engine has ended.
    """
    try:
        agents = await engine.profile(folder, timeout)
    except asyncio.TimeoutError:
        raise NoReplyError(
            "The agents did not reply in time; see their logs.", "profile_failed"
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
