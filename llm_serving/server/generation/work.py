"""Bounds the work of one request before anything is allocated for it, and moves long work off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from llm_serving.errors import RequestError
from llm_serving.server.limits import (
    INLINE_CHAT_CHARS,
    INLINE_ITEMS,
    INLINE_MESSAGES,
    MAX_BEAM_RESENDS,
    MAX_LOGPROB_ENTRIES,
)
from llm_serving.server.state import ServerSettings

T = TypeVar("T")


async def off_loop(num_items: int, work: Callable[[], T], limit: int = INLINE_ITEMS) -> T:
    """Runs ``work`` and returns its result. If ``num_items`` is above ``limit``, another thread runs it.

    ``work`` must not use objects that the event loop changes. It should call no C function that holds the interpreter
    lock (GIL) for long, because the lock also blocks the event loop.
    """
    if num_items <= limit:
        return work()
    return await asyncio.get_running_loop().run_in_executor(None, work)


def call_entries(num_chars: int) -> int:
    """Returns the cost of converting one tool call, as the number of short messages whose conversion takes as long.

    ``num_chars`` is the length of the call's arguments as JSON.
    """
    return 1 + num_chars // (INLINE_CHAT_CHARS // INLINE_MESSAGES)


def check_work(
    settings: ServerSettings, lengths: Sequence[tuple[int, int]], n: int, entries_per_token: int = 0, *, name: str = "n"
) -> None:
    """Raises RequestError if the worst case of a request exceeds the server's limits. The error shows the calculation.

    ``lengths`` has, for each prompt, its number of tokens and the maximum number of output tokens. ``n`` is the number
    of sequences for each prompt, which the client sets with the field ``name``. ``entries_per_token`` is the number of
    log-probabilities for each output token.
    """
    total = n * sum(prompt + output for prompt, output in lengths)
    if total > settings.request_token_limit:
        raise RequestError(
            f"The request may take {_product(lengths, n, name)} = {total} tokens; the maximum for one request is "
            f"{settings.request_token_limit} (serving_config.max_request_tokens). Ask for fewer prompts, a smaller "
            f"{name} or fewer output tokens.",
            param=name,
            code="request_too_large",
        )
    num_tokens = n * sum(output for _, output in lengths)
    if num_tokens * entries_per_token > MAX_LOGPROB_ENTRIES:
        raise RequestError(
            f"The request may return {num_tokens} output tokens x {entries_per_token} log-probabilities = "
            f"{num_tokens * entries_per_token} entries; the maximum for one request is {MAX_LOGPROB_ENTRIES}. Ask for "
            f"fewer log-probabilities, a smaller {name} or fewer output tokens.",
            param="logprobs",
            code="request_too_large",
        )


def check_beams(settings: ServerSettings, lengths: Sequence[tuple[int, int]], width: int, name: str) -> None:
    """Raises RequestError if a beam search of ``width`` beams may take too long.

    Each step of the search sends the prompt and the beam to the engine again. Without the prefix cache, the agent
    computes all of these tokens in each step.
    """
    check_work(settings, lengths, width, name=name)
    total = width * sum(output * (prompt + output) for prompt, output in lengths)
    limit = MAX_BEAM_RESENDS * settings.request_token_limit
    if total > limit:
        shown = " + ".join(f"{output} steps x ({prompt} + {output})" for prompt, output in lengths[:_SHOWN_PROMPTS])
        more = " + ..." if len(lengths) > _SHOWN_PROMPTS else ""
        raise RequestError(
            f"The beam search may send {width} beams x ({shown}{more}) = {total} tokens; the maximum is {limit} "
            f"({MAX_BEAM_RESENDS} x serving_config.max_request_tokens). Ask for fewer beams or fewer output tokens.",
            param=name,
            code="request_too_large",
        )


_SHOWN_PROMPTS = 3
"""Maximum number of prompts that the error about too much work shows."""


def _product(lengths: Sequence[tuple[int, int]], n: int, name: str) -> str:
    """Returns the calculation of the number of tokens as text: ``32 (n) x (100 prompt + 4000 output tokens)``."""
    prompts, outputs = sum(prompt for prompt, _ in lengths), sum(output for _, output in lengths)
    together = f" of {len(lengths)} prompts together" if len(lengths) > 1 else ""
    return f"{n} ({name}) x ({prompts} prompt + {outputs} output tokens{together})"
