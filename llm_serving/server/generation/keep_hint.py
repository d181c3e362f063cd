"""Reads and applies the field ``cache_keep_s``: how long the KV tiers should keep a request's blocks in host memory."""

from __future__ import annotations

import time

from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import RequestError
from llm_serving.kvcache.block_hash import hash_blocks, root_hash
from llm_serving.request import Request
from llm_serving.server.generation.scheduling import SchedulingFields
from llm_serving.server.state import ServerSettings


def keep_seconds_of(fields: SchedulingFields, settings: ServerSettings) -> float | None:
    """Returns the value of ``cache_keep_s`` in seconds, or None if the request does not set it.

    Raises RequestError if the value is above the limit.
    """
    if fields.cache_keep_s is not None and fields.cache_keep_s > settings.max_keep_s:
        raise RequestError(
            f"'cache_keep_s' is {fields.cache_keep_s:g}; the maximum is {settings.max_keep_s:g} "
            "(kv_tier_config.max_keep_s).",
            param="cache_keep_s",
            code="invalid_value",
        )
    return fields.cache_keep_s


def keep_blocks(engine: AsyncEngine, owner: str, request: Request, seconds: float) -> None:
    """Asks the KV tiers to keep the blocks of an ended request for ``seconds`` from now. Does nothing without KV tiers.

    ``owner`` is the tenant whose limits apply.
    """
    if engine.transfers is None:
        return
    tokens = [*request.prompt_token_ids, *request.output_token_ids][:-1]  # the last token has no keys and values yet
    root = root_hash(engine.config.cache_namespace, request.cache_salt)
    hashes = hash_blocks(tokens, engine.config.pa_config.block_size, root)
    engine.transfers.keep(owner, hashes, time.monotonic() + seconds)
