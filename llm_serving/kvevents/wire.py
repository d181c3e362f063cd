"""Encodes events as MessagePack, in the formats that vLLM publishes.

A batch of events is an array ``[time, events, replica]``. In the format ``array``, an event is an array that begins
with the event's name. vLLM published this format until June 2026. In the format ``map``, an event is a map with the
event's name under ``type``. This is the format that vLLM has published since then (vllm-project/vllm, pull request
42892).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

ARRAY, MAP = "array", "map"
FORMATS = (ARRAY, MAP)
"""Values of ``kv_events_config.format``."""
MEDIUM = "GPU"
"""Value of the field ``medium`` for device memory. The format uses this value for every kind of device."""
HASH_BYTES = 8
"""Number of bytes at the end of a hash that are published as an integer. This is also vLLM's default."""


class Event(msgspec.Struct, gc=False):
    """A change of the cached blocks of a replica."""


class BlockStored(Event):
    """Consecutive blocks of a sequence are cached now."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """Hash of the block before the first of these blocks, or None at the start of a sequence."""
    token_ids: list[int]
    """Tokens of all blocks."""
    block_size: int
    extra_keys: list[list[str] | None] | None
    """For each block, a list with the name of its salt, or None if the block has no salt."""


class BlockRemoved(Event):
    """Blocks are no longer cached."""

    block_hashes: list[int]


class AllBlocksCleared(Event):
    """No block is cached any more."""


def published_hash(block_hash: bytes) -> int:
    """Returns the integer that is published as the hash of a block."""
    return int.from_bytes(block_hash[-HASH_BYTES:], "big")


def encoder(layout: str) -> Callable[[float, Sequence[Event], int], bytes]:
    """Returns a function that encodes a batch in the format ``layout``. Its arguments are a Unix time in seconds,
    events, and the number of the replica.
    """
    pack, described = msgspec.msgpack.Encoder().encode, _as_map if layout == MAP else _as_array

    def encode(seconds: float, events: Sequence[Event], replica: int) -> bytes:
        return pack([seconds, [described(event) for event in events], replica])

    return encode


def _fields(event: Event) -> dict[str, Any]:
    """Returns the fields of an event in the order of the format. An empty last field is left out."""
    if isinstance(event, BlockStored):
        extra = {} if event.extra_keys is None else {"extra_keys": event.extra_keys}
        return {
            "block_hashes": event.block_hashes,
            "parent_block_hash": event.parent_block_hash,
            "token_ids": event.token_ids,
            "block_size": event.block_size,
            "lora_id": None,
            "medium": MEDIUM,
            "lora_name": None,
            **extra,
        }
    return {"block_hashes": event.block_hashes, "medium": MEDIUM} if isinstance(event, BlockRemoved) else {}


def _as_array(event: Event) -> list[Any]:
    return [type(event).__name__, *_fields(event).values()]


def _as_map(event: Event) -> dict[str, Any]:
    return {"type": type(event).__name__, **_fields(event)}
