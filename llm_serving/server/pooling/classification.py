"""The endpoints ``/classify`` (vLLM's API) and ``/v1/classify``: the classes of texts, with a classifier."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import Field
from starlette.requests import Request

from llm_serving.model.pooling import IDENTITY, SOFTMAX
from llm_serving.server.fields.shared import IGNORED, Name
from llm_serving.server.fields.validation import StrictModel
from llm_serving.server.generation.prompts import resolve_prompts
from llm_serving.server.generation.scheduling import SchedulingFields, tenant_of
from llm_serving.server.generation.sequences import Generation
from llm_serving.server.http.body import read_request, whole_response
from llm_serving.server.http.json_pieces import EncodedList
from llm_serving.server.models.lookup import served
from llm_serving.server.pooling.embeddings import INPUT_SCHEMA, read_inputs
from llm_serving.server.pooling.pooled import Vector, pooled_results, pooling_of, receipt_member, usage_of
from llm_serving.server.state import AnyResponse, Endpoint, ServerState


class ClassifyRequest(SchedulingFields, StrictModel):
    """Request body of ``/classify``: one or more texts."""

    ignored = IGNORED

    input: Any = Field(description="Text, token ids, or a list of either.", json_schema_extra=INPUT_SCHEMA)
    model: Name = Field(default=None, description="Name of the served model; may be left out.")
    use_activation: bool | None = Field(
        default=None, description="Return probabilities (default), or the logits of the classes."
    )


async def classify(state: ServerState, request: Request) -> AnyResponse:
    """Handles ``/classify``: return the most probable class of each text, and the probabilities of all classes."""
    state.check_queue(tenant_of(request))
    body = await read_request(ClassifyRequest, request, state.settings.max_body_bytes)
    state = await served(state, request, body.model, body)
    pooling = pooling_of(state, "classify")
    generation = Generation(state, request, "classify", "classify", body, stream=False)
    prompts = await resolve_prompts(state, await read_inputs(state, body.input), "input")
    results = await pooled_results(generation, request, prompts, "input")
    activation = IDENTITY if body.use_activation is False else pooling.class_activation

    def build() -> dict[str, Any]:
        data: list[dict[str, Any]] = []
        for index, logits in enumerate(results):
            values = probabilities(logits, activation)
            label = pooling.labels[int(np.argmax(logits))]
            data.append(
                {"index": index, "label": label, "probs": EncodedList(values.tolist()), "num_classes": values.size}
            )
        return {
            "id": generation.request_id,
            "object": "list",
            "created": generation.created,
            "model": state.engine.model_name,
            "data": data,
            "usage": usage_of(generation),
            **receipt_member(generation),
        }

    return await whole_response(generation.request_id, sum(each.size for each in results), build)


def probabilities(logits: Vector, activation: str) -> Vector:
    """Returns the probabilities of classes. ``activation`` is a function of the logits: softmax, sigmoid or identity.
    """
    if activation == IDENTITY:
        return logits
    if activation == SOFTMAX:
        powers = np.exp(logits - logits.max())
        softmax: Vector = powers / np.add.reduce(powers)
        return softmax
    power = np.exp(-np.abs(logits))
    sigmoid: Vector = np.where(logits >= 0, 1, power) / (1 + power)
    return sigmoid.astype(np.float32)


_EXAMPLE = '{"input": ["The fox lives by the river.", "It is noon."]}'
_SUMMARY = "The classes of texts, with a classifier."

ENDPOINTS = (
    Endpoint("POST", "/classify", classify, _SUMMARY, ClassifyRequest, _EXAMPLE, queued=True),
    Endpoint("POST", "/v1/classify", classify, _SUMMARY, ClassifyRequest, _EXAMPLE, queued=True),
)
