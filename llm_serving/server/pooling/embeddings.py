"""The endpoint ``POST /v1/embeddings`` of OpenAI's API."""

from __future__ import annotations

import base64
from functools import partial
from typing import Any, Literal

from pydantic import Field
from pydantic.config import JsonDict
from starlette.requests import Request

from llm_serving.errors import RequestError
from llm_serving.model.pooling import ANY_DIMENSION, MAX_WIDTH, Pooling
from llm_serving.server.fields.shared import IGNORED, Name
from llm_serving.server.fields.validation import StrictModel, short
from llm_serving.server.generation.prompts import check_choices, check_lengths, parse_prompts, resolve_prompts
from llm_serving.server.generation.scheduling import SchedulingFields, tenant_of
from llm_serving.server.generation.sequences import Generation
from llm_serving.server.generation.work import off_loop
from llm_serving.server.http.body import read_request, whole_response
from llm_serving.server.http.json_pieces import EncodedList
from llm_serving.server.limits import MAX_NAME_CHARS
from llm_serving.server.models.lookup import served
from llm_serving.server.pooling.pooled import finished, pooled_results, pooling_of, receipt_member, usage_of
from llm_serving.server.state import AnyResponse, Endpoint, ServerState

INPUT_SCHEMA: JsonDict = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}
"""The JSON schema of the field ``input``."""


class EmbeddingRequest(SchedulingFields, StrictModel):
    """Request body of ``/v1/embeddings``: one or more texts."""

    ignored = IGNORED

    input: Any = Field(
        description="Text, token ids, or a list of either.",
        json_schema_extra=INPUT_SCHEMA,
    )
    model: Name = Field(default=None, description="Name of the served model; may be left out.")
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="`float`: a list of numbers. `base64`: the bytes of float32 numbers (little endian)."
    )
    dimensions: int | None = Field(
        default=None, ge=1, le=MAX_WIDTH, description="Length of the embeddings, if the model permits shorter ones."
    )
    prompt_name: str | None = Field(
        default=None, max_length=MAX_NAME_CHARS, description="Put this prompt of the model before each text."
    )


async def create_embeddings(state: ServerState, request: Request) -> AnyResponse:
    """Handles ``POST /v1/embeddings``: return an embedding for each input."""
    state.check_queue(tenant_of(request))
    body = await read_request(EmbeddingRequest, request, state.settings.max_body_bytes)
    state = await served(state, request, body.model, body)
    pooling = pooling_of(state, "embed")
    _check_dimensions(pooling, body.dimensions)
    generation = Generation(state, request, "embeddings", "embd", body, stream=False)
    texts = with_prompt(await read_inputs(state, body.input), prompt_text(pooling, body.prompt_name))
    prompts = await resolve_prompts(state, texts, "input")
    vectors = await pooled_results(generation, request, prompts, "input")
    is_text = body.encoding_format == "base64"

    def build() -> dict[str, Any]:
        data: list[dict[str, Any]] = []
        for index, vector in enumerate(vectors):
            embedding = finished(vector, body.dimensions, normalises=pooling.normalises)
            shown = base64.b64encode(embedding.astype("<f4").tobytes()).decode() if is_text else None
            data.append({"object": "embedding", "index": index, "embedding": shown or EncodedList(embedding.tolist())})
        return {
            "object": "list",
            "data": data,
            "model": state.engine.model_name,
            "usage": usage_of(generation),
            **receipt_member(generation),
        }

    num_items = sum(vector.size for vector in vectors) // (16 if is_text else 1)
    return await whole_response(generation.request_id, num_items, build)


ENDPOINTS = (
    Endpoint(
        "POST", "/v1/embeddings", create_embeddings, "OpenAI: embeddings of texts.", EmbeddingRequest,
        '{"input": "The fox lives by the river."}', queued=True,
    ),
)  # fmt: skip


async def read_inputs(state: ServerState, value: object) -> list[str | list[int]]:
    """Returns the inputs of a request: texts or lists of token ids. Raises RequestError."""
    check_lengths(value, 1, state.settings, "input")
    num_items = sum(len(one) if isinstance(one, list) else 1 for one in value) if isinstance(value, list) else 1
    inputs = await off_loop(num_items, partial(parse_prompts, value, "input"))
    check_choices(len(inputs), 1)
    return inputs


def prompt_text(pooling: Pooling, name: str | None) -> str:
    """Returns the text of the model's prompt ``name``. If ``name`` is None, returns the text of the default prompt.

    Raises RequestError if the model has no prompt with this name.
    """
    prompts = {prompt.name: prompt.text for prompt in pooling.prompts}
    if name is None:
        return prompts.get(pooling.default_prompt, "")
    if name not in prompts:
        known = ", ".join(prompts) or "none"
        raise RequestError(
            f"'prompt_name' is {short(name)}; the model's prompts are: {known}.",
            param="prompt_name",
            code="invalid_value",
        )
    return prompts[name]


def with_prompt(inputs: list[str | list[int]], prompt: str) -> list[str | list[int]]:
    """Returns the inputs with ``prompt`` before each text. Token ids and empty texts stay unchanged."""
    return [prompt + each if isinstance(each, str) and each else each for each in inputs]


def _check_dimensions(pooling: Pooling, dimensions: int | None) -> None:
    if dimensions is None or pooling.permits(dimensions):
        return
    if not pooling.dimensions:
        permitted = "the model declares no shorter embeddings (model_config.matryoshka_dimensions); leave it out"
    elif ANY_DIMENSION in pooling.dimensions:
        permitted = f"it must be 1 to {pooling.width}"
    else:
        permitted = f"it must be one of {', '.join(map(str, pooling.dimensions))}"
    raise RequestError(f"'dimensions' is {dimensions}; {permitted}.", param="dimensions", code="invalid_value")
