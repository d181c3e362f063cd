"""Endpoints that generate no text: models, health, metrics, state of the server, and the tokenizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.access.control import Visit
from llm_serving.errors import RequestError
from llm_serving.sampling_params import PARAMETERS
from llm_serving.server.fields.prompt_end import NO_TEMPLATE, PromptEndFields
from llm_serving.server.fields.shared import Messages, Name, TemplateValues
from llm_serving.server.fields.tools import Tools
from llm_serving.server.fields.validation import StrictModel
from llm_serving.server.generation.images import read_images
from llm_serving.server.generation.prompts import check_vocabulary, encode_chat, encode_text, template_messages
from llm_serving.server.generation.scheduling import visit_of
from llm_serving.server.generation.work import off_loop
from llm_serving.server.http.body import json_response, read_request
from llm_serving.server.http.guard import is_on_this_machine
from llm_serving.server.http.lifecycle import ActiveRequests, run_while_connected
from llm_serving.server.limits import MAX_CHOICES, MAX_DETOKENIZE, MAX_LOGPROBS, MAX_PROMPTS, MAX_SEQUENCES
from llm_serving.server.models.lookup import present, served
from llm_serving.server.operations.model_list import model_entries
from llm_serving.server.state import Endpoint, ServerState
from llm_serving.telemetry.metrics import CONTENT_TYPE
from llm_serving.version import __version__

RECENT_STEP_S = 0.5
"""If a step completed within this number of seconds, the agents work, and ``/health/ready`` does not probe them."""
PROBE_TIMEOUT_S = 1.0
"""Maximum wait in seconds for the agents' replies. ``AsyncEngine.probe`` waits longer if the agents are slow but alive.
"""

_PUBLIC_FACTS = frozenset(
    {"rank", "replica", "tensor_parallel_index", "pipeline_stage", "state", "restarts", "steps", "queued"}
)
"""The members of an agent's status that ``/server_info`` shows to all clients. Clients on this machine see all members.
"""


class TokenizeRequest(PromptEndFields):
    """Request body of ``/tokenize``: a text or a conversation."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"chat_template": (None,)}
    remedies: ClassVar[Mapping[str, str]] = {"chat_template": NO_TEMPLATE}

    model: Name = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools = Field(default=None, description="Functions that the model may call.")
    chat_template_kwargs: TemplateValues = Field(default_factory=dict)
    add_special_tokens: bool | None = Field(
        default=None,
        description="Add the special tokens at the start of a text (default: true for a prompt, false for messages).",
    )


class DetokenizeRequest(StrictModel):
    """Request body of ``/detokenize``: tokens to turn into text."""

    model: Name = None
    tokens: Annotated[list[int], Field(fail_fast=True, max_length=MAX_DETOKENIZE)]
    skip_special_tokens: bool = True


async def _list_models(state: ServerState, request: Request) -> Response:
    return json_response({"object": "list", "data": _usable_models(state, visit_of(request))})


def _usable_models(state: ServerState, visit: Visit | None) -> list[dict[str, Any]]:
    """Returns the entries of the models that the key of ``visit`` may use."""
    if visit is None:
        return model_entries(state, shows_folders=True)
    return [model for model in model_entries(state, shows_folders=visit.is_admin) if visit.may_use(model["id"])]


async def _get_model(state: ServerState, request: Request) -> Response:
    name, visit = request.path_params["name"], visit_of(request)
    if visit is not None:
        visit.check_model(name)
    entry = next((each for each in _usable_models(state, visit) if each["id"] == name), None)
    if entry is None:
        raise state.unknown_model(name, visit)
    return json_response(entry)


async def _health_live(state: ServerState, request: Request) -> Response:
    """Handles ``/health/live``. Responds with 200 until the server has ended, even while agents restart."""
    is_live = not state.has_ended
    return json_response({"status": "live" if is_live else "stopped"}, status=200 if is_live else 503)


async def is_ready(find: Callable[[], ServerState]) -> tuple[bool, str]:
    """Returns whether a model would serve a request now, and the name of its state.

    ``find`` returns the view of the model's present version. If a reload replaces the version during the call, the
    function asks the agents of the new version.
    """
    while True:
        state = find()
        ready, name = await _is_version_ready(state)
        if ready or find() is state:
            return ready, name


async def is_ready_for(request: Request, find: Callable[[], ServerState]) -> tuple[bool, str]:
    """Calls ``is_ready`` for a request. Raises ClientGoneError if the client closes the connection before the result.

    The server does not count this request as active. Otherwise a stopping server would wait for slow agents.
    """
    return await run_while_connected(ActiveRequests(), request.receive, is_ready(find))


async def _is_version_ready(state: ServerState) -> tuple[bool, str]:
    """Returns whether a version of a model would serve a request now, and the name of its state.

    The version is ready if a step completed recently, or if all agents reply to a status request.
    """
    status = state.engine.status()
    ready = status.state == "ready" and not state.active.stopping
    age = status.last_step_age_s
    if ready and (age is None or age > RECENT_STEP_S):
        ready = await state.engine.probe(PROBE_TIMEOUT_S)
    name = "stopping" if state.active.stopping else status.state
    if status.state == "ready" and not ready and not state.active.stopping:
        name = "agents do not answer"
    return ready, name


async def _health_ready(state: ServerState, request: Request) -> Response:
    """Handles ``/health/ready``. Responds with 200 if the server would serve a request now, otherwise with 503."""
    ready, name = await is_ready_for(request, lambda: present(state))
    return json_response({"status": name, "ready": ready}, status=200 if ready else 503)


async def _version(state: ServerState, request: Request) -> Response:
    return json_response({"version": __version__})


async def _metrics(state: ServerState, request: Request) -> Response:
    state.metrics.event_loop_stall(*state.loop_watch.take_longest())
    return Response(state.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})


def _engine_json(state: ServerState, *, is_local: bool) -> dict[str, Any]:
    """Returns the status of a model's engine. Only a client on this machine gets the whole status of the agents."""
    engine = state.engine.status().as_json()
    if not is_local:
        engine["agents"] = [
            {name: fact for name, fact in agent.items() if name in _PUBLIC_FACTS} for agent in engine["agents"]
        ]
    return engine


def _models_json(state: ServerState, *, is_local: bool) -> dict[str, Any]:
    """Returns the member ``models``: the state and the engine of each model. Empty if the server has only one model."""
    if state.models is None or not state.models.has_several:
        return {}
    found = []
    for model in state.models.models:
        view = None if model.version is None else model.version.view
        engine = None if view is None else _engine_json(view, is_local=is_local)
        found.append({"name": model.name, **model.status().as_json(), "engine": engine})
    return {"models": found}


async def _server_info(state: ServerState, request: Request) -> Response:
    """Responds with model, limits and state. Only clients on this machine see processes, addresses and files."""
    tokenizer, formats = state.engine.tokenizer, state.output_format
    is_local = is_on_this_machine(request)
    engine = _engine_json(state, is_local=is_local)
    return json_response(
        {
            "name": "llm-serving",
            "version": __version__,
            "uptime_s": round(time.time() - state.started_at, 3),
            "model": {
                "name": state.engine.model_name,
                "max_model_len": state.settings.max_context,
                "max_prompt_tokens": state.settings.max_prompt_tokens,
                "chat_template": not tokenizer.chat_template.is_missing,
                "tool_format": None if formats.tools is None else formats.tools.name,
                "reasoning_format": None if formats.reasoning is None else formats.reasoning.name,
                "bos_token_id": tokenizer.bos_token_id,
                "eos_token_ids": list(tokenizer.eos_token_ids),
                **state.settings.info,
            },
            "limits": {
                "body_bytes": state.settings.max_body_bytes,
                "prompts": MAX_PROMPTS,
                "n": MAX_CHOICES,
                "sequences": MAX_SEQUENCES,
                "request_tokens": state.settings.request_token_limit,
                "stop_strings": PARAMETERS["stop"].max_items,
                "logprobs": MAX_LOGPROBS,
            },
            "settings": state.settings.settings if is_local else {},
            **_models_json(state, is_local=is_local),
            "engine": engine,
        }
    )


async def _tokenize(state: ServerState, request: Request) -> Response:
    body = await read_request(TokenizeRequest, request, state.settings.max_body_bytes)
    state = await served(state, request, body.model, body)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Give either 'prompt' or 'messages'.", param="prompt", code="invalid_value")
    if body.messages is not None:
        body.check_prompt_end(body.messages, state.output_format)
        images = await read_images(state, body.messages)
        messages = await template_messages(body.messages)
        prompt = await encode_chat(
            state,
            messages,
            add_generation_prompt=body.opens_message,
            continues=bool(body.continue_final_message),
            add_special_tokens=body.add_special_tokens is True,
            tools=[tool.for_template() for tool in body.tools or ()],
            template_values=body.chat_template_kwargs,
            images=images,
        )
        ids = list(prompt.token_ids)
    else:
        text = body.prompt or ""
        ids = await encode_text(state, text, "prompt", add_special_tokens=body.add_special_tokens is not False)
    return json_response({"tokens": ids, "count": len(ids), "max_model_len": state.settings.max_context})


async def _detokenize(state: ServerState, request: Request) -> Response:
    """Responds with the text of tokens.

    The text is in both fields, ``text`` and ``prompt``, because some clients read one and some the other.
    """
    body = await read_request(DetokenizeRequest, request, state.settings.max_body_bytes)
    state = await served(state, request, body.model, body)
    check_vocabulary(body.tokens, state.settings.vocab_size, "tokens")
    decode = partial(state.engine.tokenizer.decode, body.tokens, body.skip_special_tokens)
    text = await off_loop(len(body.tokens), decode)
    return json_response({"text": text, "prompt": text})


ENDPOINTS = (
    Endpoint("GET", "/v1/models", _list_models, "The served model, in OpenAI's format."),
    Endpoint("GET", "/v1/models/{name:path}", _get_model, "The served model by its name."),
    Endpoint(
        "POST", "/tokenize", _tokenize, "The tokens of a text or a conversation.",
        TokenizeRequest, '{"prompt": "Once upon a time"}',
    ),
    Endpoint(
        "POST", "/detokenize", _detokenize, "The text of tokens.", DetokenizeRequest, '{"tokens": [1, 300, 301]}'
    ),
    Endpoint("GET", "/health", _health_ready, "The same as `/health/ready`."),
    Endpoint("GET", "/ping", _health_ready, "The same as `/health/ready`."),
    Endpoint("GET", "/version", _version, "The version of the server."),
    Endpoint("GET", "/health/live", _health_live, "200 while the engine runs, 503 afterwards."),
    Endpoint("GET", "/health/ready", _health_ready, "200 while requests are served, 503 otherwise."),
    Endpoint("GET", "/metrics", _metrics, "Metrics for Prometheus.", admin=True),
    Endpoint("GET", "/server_info", _server_info, "The model, the limits, and the state of the engine.", admin=True),
)  # fmt: skip
