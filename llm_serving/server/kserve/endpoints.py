"""The endpoints ``/v2``: health, descriptions of server and model, ``infer``, ``generate``, ``generate_stream``."""

from __future__ import annotations

from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.errors import RequestError
from llm_serving.request import RequestOutput
from llm_serving.server.error_replies import ErrorReply
from llm_serving.server.generation.sampling import Choice
from llm_serving.server.generation.scheduling import tenant_of, visit_of
from llm_serving.server.generation.sequences import Answer, Generation, count_items, count_prompt_items
from llm_serving.server.generation.work import off_loop
from llm_serving.server.http.body import json_response, read_request, whole_response
from llm_serving.server.http.json_structure import count_values
from llm_serving.server.http.lifecycle import run_while_connected
from llm_serving.server.http.sse import EventStream
from llm_serving.server.kserve.fields import (
    FINISH_REASON,
    INPUT_IDS,
    TEXT_INPUT,
    TEXT_OUTPUT,
    GenerateExtensionRequest,
    InferRequest,
    completion_of,
    completion_of_tensors,
    named_by_parameters,
    wanted_outputs,
)
from llm_serving.server.limits import INLINE_ITEMS
from llm_serving.server.models.lookup import present, served
from llm_serving.server.openai.completions import CompletionRequest, start_completion
from llm_serving.server.operations.admin import is_ready_for
from llm_serving.server.state import AnyResponse, Endpoint, ServerState
from llm_serving.version import __version__

MODEL_VERSION = "1"
"""The only version of the served model."""


async def _server(state: ServerState, request: Request) -> Response:
    return json_response({"name": "llm-serving", "version": __version__, "extensions": ["generate"]})


async def _live(state: ServerState, request: Request) -> Response:
    is_live = not state.has_ended
    return json_response({"live": is_live}, status=200 if is_live else 503)


async def _ready(state: ServerState, request: Request) -> Response:
    ready, _ = await is_ready_for(request, lambda: present(state))
    return json_response({"ready": ready}, status=200 if ready else 503)


async def _model_ready(state: ServerState, request: Request) -> Response:
    name = request.path_params["name"]
    state.check_model(name, visit_of(request))
    ready = await _is_model_ready(state, request, name)
    return json_response({"name": name, "ready": ready}, status=200 if ready else 503)


async def _is_model_ready(state: ServerState, request: Request, name: str) -> bool:
    """Returns whether a model serves requests now. The call does not start a model that is not in memory."""
    model = None if state.models is None else state.models.find(name)
    if model is None:
        return (await is_ready_for(request, lambda: present(state)))[0]
    if model.version is None or not model.status().is_serving:
        return False
    view = model.version.view
    return (await is_ready_for(request, lambda: view if model.version is None else model.version.view))[0]


async def _model(state: ServerState, request: Request) -> Response:
    name = request.path_params["name"]
    state.check_model(name, visit_of(request))
    text = {"datatype": "BYTES", "shape": [-1]}
    return json_response(
        {
            "name": name,
            "versions": [MODEL_VERSION],
            "platform": "llm-serving",
            "inputs": [
                {"name": TEXT_INPUT, **text},
                {"name": INPUT_IDS, "datatype": "INT64", "shape": [-1, -1]},
            ],
            "outputs": [{"name": TEXT_OUTPUT, **text}, {"name": FINISH_REASON, **text}],
        }
    )


async def _infer(state: ServerState, request: Request) -> AnyResponse:
    """Handles ``infer``: continues each prompt of the input tensors."""
    body = await _body(state, request, InferRequest)
    wanted = wanted_outputs(body)
    num_values = count_values([body.parameters, *(tensor.data for tensor in body.inputs)], INLINE_ITEMS)
    read = partial(completion_of_tensors, request.path_params["name"], body)
    completion, excludes = await off_loop(num_values, read)
    generation, answers = await _answers(state, request, completion)

    def build() -> dict[str, Any]:
        data = {
            TEXT_OUTPUT: [_text(generation, answer, excludes) for answer in answers],
            FINISH_REASON: [answer.finish_reason for answer in answers],
        }
        outputs = [{"name": name, "datatype": "BYTES", "shape": [len(answers)], "data": data[name]} for name in wanted]
        return {**_head(request, body.id), "outputs": outputs}

    num_items = count_items(answers) + (0 if excludes else count_prompt_items(answers))
    return await whole_response(generation.request_id, num_items, build)


async def _generate(state: ServerState, request: Request) -> AnyResponse:
    """Handles ``generate``: continues one prompt."""
    body = await _body(state, request, GenerateExtensionRequest)
    completion, excludes = await _completion(request, body, stream=False)
    generation, [answer] = await _answers(state, request, completion)
    text = _text(generation, answer, excludes)
    reply = {**_head(request, body.id), TEXT_OUTPUT: text, FINISH_REASON: answer.finish_reason}
    return await whole_response(generation.request_id, count_items([answer]), lambda: reply)


async def _generate_stream(state: ServerState, request: Request) -> AnyResponse:
    """Handles ``generate_stream``: continues one prompt, piece by piece."""
    body = await _body(state, request, GenerateExtensionRequest)
    completion, _ = await _completion(request, body, stream=True)
    generation = await _started(state, request, completion)
    return EventStream(generation, GenerateExtensionEvents(generation, _head(request, body.id)))


async def _body(state: ServerState, request: Request, kind: type[Any]) -> Any:
    state.check_model(request.path_params["name"], visit_of(request))
    state.check_queue(tenant_of(request))
    return await read_request(kind, request, state.settings.max_body_bytes)


async def _completion(
    request: Request, body: GenerateExtensionRequest, *, stream: bool
) -> tuple[CompletionRequest, bool]:
    """Returns what ``completion_of`` returns. If there are many parameters, another thread checks them."""
    convert = partial(completion_of, request.path_params["name"], body.text_input, body.parameters, stream=stream)
    return await off_loop(count_values(body.parameters, INLINE_ITEMS), convert)


async def _started(state: ServerState, request: Request, completion: CompletionRequest) -> Generation:
    state = await served(state, request, completion.model, completion)
    try:
        return await start_completion(state, request, completion, "kserve", "infer")
    except RequestError as error:
        if type(error) is RequestError:
            raise named_by_parameters(error) from None
        raise


async def _answers(
    state: ServerState, request: Request, completion: CompletionRequest
) -> tuple[Generation, list[Answer]]:
    generation = await _started(state, request, completion)
    return generation, await run_while_connected(state.active, request.receive, generation.answers())


def _text(generation: Generation, answer: Answer, excludes: bool) -> str:
    """Returns the text of an answer. The prompt comes before it, unless ``excludes`` is True."""
    prompt = "" if excludes else answer.choice.prompt.as_text(generation.state.engine.tokenizer)
    return prompt + answer.text


def _head(request: Request, request_id: str | None) -> dict[str, Any]:
    """Returns the members that every response has: the model's name and version, and the id if the client sent one."""
    named = {} if request_id is None else {"id": request_id}
    return {**named, "model_name": request.path_params["name"], "model_version": MODEL_VERSION}


class GenerateExtensionEvents:
    """Formats the events of ``generate_stream``. Each event has new text. The last event has the finish reason."""

    def __init__(self, generation: Generation, head: dict[str, Any]) -> None:
        self._generation, self._head = generation, head

    def events(self, choice: Choice, piece: RequestOutput) -> bytes:
        if not piece.text and piece.finish_reason is None:
            return b""
        event = {**self._head, TEXT_OUTPUT: piece.text}
        if piece.finish_reason is not None:
            event[FINISH_REASON] = piece.finish_reason.value
        return b"data: " + orjson.dumps(event) + b"\n\n"

    def last(self) -> bytes:
        return b""

    def error(self, reply: ErrorReply) -> bytes:
        return b"data: " + reply.body() + b"\n\n"


_GENERATE = '{"text_input": "Once upon a time", "parameters": {"max_tokens": 16, "temperature": 0}}'
_INFER = (
    '{"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["Once upon a time"]}, '
    '{"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [16]}]}'
)
ENDPOINTS = (
    Endpoint("GET", "/v2", _server, "KServe: facts about the server."),
    Endpoint("GET", "/v2/health/live", _live, "KServe: 200 while the engine runs."),
    Endpoint("GET", "/v2/health/ready", _ready, "KServe: 200 while requests are served."),
    Endpoint("GET", "/v2/models/{name}", _model, "KServe: the tensors of the model."),
    Endpoint("GET", "/v2/models/{name}/ready", _model_ready, "KServe: 200 while the model serves requests."),
    Endpoint("POST", "/v2/models/{name}/infer", _infer, "KServe: continue prompts.", InferRequest, _INFER),
    Endpoint(
        "POST", "/v2/models/{name}/generate", _generate, "KServe: continue a prompt.", GenerateExtensionRequest,
        _GENERATE,
    ),
    Endpoint(
        "POST", "/v2/models/{name}/generate_stream", _generate_stream, "KServe: continue a prompt, piece by piece.",
        GenerateExtensionRequest, _GENERATE,
    ),
)  # fmt: skip
