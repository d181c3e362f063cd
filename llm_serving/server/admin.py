"""Health, metrics, facts about the server, and the tokenizer on its own."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llm_serving.errors import RequestError
from llm_serving.server.body import read_json_object
from llm_serving.server.limits import MAX_CHOICES, MAX_LOGPROBS, MAX_PROMPTS, MAX_SEQUENCES, MAX_STOP_STRINGS
from llm_serving.server.models import check_model
from llm_serving.server.prompts import check_vocabulary, encode_text, max_chars
from llm_serving.server.protocol_openai import DetokenizeRequest, TokenizeRequest
from llm_serving.server.responses import json_response
from llm_serving.server.state import ServerState
from llm_serving.server.validation import parse
from llm_serving.telemetry.metrics import CONTENT_TYPE

__all__ = ["detokenize", "health_live", "health_ready", "metrics", "server_info", "tokenize"]

RECENT_STEP_S = 5.0
PROBE_TIMEOUT_S = 2.0


async def health_live(state: ServerState, request: Request) -> Response:
    """The process answers."""
    return json_response({"status": "live"})


async def health_ready(state: ServerState, request: Request) -> Response:
    """Requests would be served: a step was answered in the last seconds, or the agents answer a probe."""
    status = state.engine.status()
    ready = status.state == "ready" and not state.active.stopping
    age = status.last_step_age_s
    if ready and (age is None or age > RECENT_STEP_S):
        ready = await state.engine.probe(PROBE_TIMEOUT_S)
    name = "stopping" if state.active.stopping else status.state
    if status.state == "ready" and not ready and not state.active.stopping:
        name = "agents do not answer"
    return json_response({"status": name, "ready": ready}, status=200 if ready else 503)


async def metrics(state: ServerState, request: Request) -> Response:
    """All metrics, for Prometheus."""
    return Response(state.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})


async def server_info(state: ServerState, request: Request) -> Response:
    """The model, the limits, and how the engine is doing."""
    from llm_serving import __version__

    status = state.engine.status()
    tokenizer = state.engine.tokenizer
    return json_response(
        {
            "name": "llm-serving",
            "version": __version__,
            "uptime_s": round(time.time() - state.started_at, 3),
            "model": {
                "name": state.engine.model_name,
                "max_model_len": state.settings.max_context,
                "max_prompt_tokens": state.settings.max_prompt_tokens,
                "chat_template": tokenizer.has_chat_template,
                "bos_token_id": tokenizer.bos_token_id,
                "eos_token_ids": list(tokenizer.eos_token_ids),
                **state.settings.info,
            },
            "limits": {
                "body_bytes": state.settings.max_body_bytes,
                "prompts": MAX_PROMPTS,
                "n": MAX_CHOICES,
                "sequences": MAX_SEQUENCES,
                "stop_strings": MAX_STOP_STRINGS,
                "logprobs": MAX_LOGPROBS,
            },
            "engine": _engine(status),
        }
    )


def _engine(status: Any) -> dict[str, Any]:
    names = ("state", "running", "waiting", "free_blocks", "total_blocks", "steps", "last_step_age_s", "preemptions",
             "swapped", "swaps", "kv_waste", "prefix_hit_tokens", "prefix_query_tokens")  # fmt: skip
    replicas = [asdict(replica) for replica in status.replicas]
    return {**{name: getattr(status, name) for name in names}, "agents": status.agents, "replicas": replicas}


async def tokenize(state: ServerState, request: Request) -> Response:
    """The tokens of a text or a conversation."""
    body = parse(TokenizeRequest, await read_json_object(request, state.settings.max_body_bytes))
    check_model(state, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Give either 'prompt' or 'messages'.", param="prompt", code="invalid_value")
    if body.messages is not None:
        messages = [message.for_template() for message in body.messages]
        text = state.engine.tokenizer.render_chat(messages, body.add_generation_prompt, max_chars=max_chars(state))
        ids = await encode_text(state, text, "messages", add_special_tokens=body.add_special_tokens is True)
    else:
        text = body.prompt or ""
        ids = await encode_text(state, text, "prompt", add_special_tokens=body.add_special_tokens is not False)
    return json_response({"tokens": ids, "count": len(ids), "max_model_len": state.settings.max_context})


async def detokenize(state: ServerState, request: Request) -> Response:
    """The text of tokens, under both names that clients look for."""
    body = parse(DetokenizeRequest, await read_json_object(request, state.settings.max_body_bytes))
    check_model(state, body.model)
    check_vocabulary(body.tokens, state.settings.vocab_size, "tokens")
    text = state.engine.tokenizer.decode(body.tokens, body.skip_special_tokens)
    return json_response({"text": text, "prompt": text})
