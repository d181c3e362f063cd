"""Closes the KV tiers of a model without blocking the event loop, which may serve other models."""

from __future__ import annotations

import asyncio
import time

from llm_serving.kvstore.setup import KvTiers

_TIERS_END_S = 5.0
"""Maximum seconds to write the remaining blocks to disk when a model ends."""
_TIERS_POLL_S = 0.01
"""Seconds between two checks whether the blocks are written."""


async def close_tiers(tiers: KvTiers) -> None:
    """Writes the blocks that wait for the disk, for at most ``_TIERS_END_S`` seconds, and then closes the KV tiers.

    Blocks that are not written in this time are lost.
    """
    tiers.end()
    deadline = time.monotonic() + _TIERS_END_S
    while tiers.is_busy and time.monotonic() < deadline:
        await asyncio.sleep(_TIERS_POLL_S)
    tiers.close()
