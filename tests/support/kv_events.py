"""A subscriber of the events of the prefix cache. It keeps the state that the events describe."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from llm_serving.kvcache.prefix_index import PrefixIndex
from llm_serving.kvevents.observer import salt_name
from llm_serving.kvevents.wire import published_hash
from support.time_limits import time_limit

Block = tuple[int | None, tuple[int, ...], str | None]
"""A block: the hash of the block before it or None, its tokens, and the name of the salt if it is the first block."""

_END = b"\xff" * 8
_FIELDS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
                    "extra_keys"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}  # fmt: skip


class Subscriber:
    """Receives the batches of a publisher. ``blocks`` has the cached blocks of each replica by hash."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str = "") -> None:
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.connect(endpoint)
        self._sub.subscribe(topic)
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(replay_endpoint)
        self.topic = topic.encode()
        self.blocks: dict[int, dict[int, Block]] = {}
        self.events: list[dict[str, Any]] = []
        self.expected = 0
        """Sequence number of the next batch."""
        self.num_replayed = 0
        self.lost: list[int] = []
        """Sequence numbers of batches that were missing in a replay, too."""

    def close(self) -> None:
        self._context.destroy(linger=0)

    def replay(self, first: int) -> list[tuple[int, bytes]]:
        """Returns the batches from ``first`` on that are still in the publisher's memory."""
        self._replay.send_multipart((b"", first.to_bytes(8, "big")))
        batches = []
        while True:
            assert self._replay.poll(1000 * time_limit(10)), "no end of the replay"
            empty, sequence, payload = self._replay.recv_multipart()
            assert empty == b""
            if sequence == _END:
                assert payload == b""
                return batches
            batches.append((int.from_bytes(sequence, "big"), payload))

    def catch_up(self) -> None:
        """Applies all batches that the publisher still has, beginning with the next expected one."""
        for sequence, payload in self.replay(self.expected):
            self.num_replayed += 1
            self._take(sequence, payload)

    def receive(self, timeout_s: float) -> bool:
        """Applies the next batch. If earlier batches are missing, asks for their replay first. Returns False if none
        arrives in time.
        """
        if not self._sub.poll(1000 * timeout_s):
            return False
        topic, raw, payload = self._sub.recv_multipart()
        assert topic == self.topic
        sequence = int.from_bytes(raw, "big")
        if sequence > self.expected:
            self.catch_up()
        self._take(sequence, payload)
        return True

    def follow(self, is_done: Callable[[], bool]) -> None:
        """Receives batches until the condition is true.

        If no batch arrives, asks for a replay: the publisher may have sent a batch before it knew the subscription.
        """
        until = time.monotonic() + time_limit(20)
        while not is_done():
            assert time.monotonic() < until, "the events do not lead to the expected state"
            if not self.receive(0.05):
                self.catch_up()

    def _take(self, sequence: int, payload: bytes) -> None:
        if sequence < self.expected:
            return
        self.lost += range(self.expected, sequence)
        self.expected = sequence + 1
        seconds, events, replica = msgspec.msgpack.decode(payload)
        assert abs(seconds - time.time()) < 600
        for event in events:
            self._apply(self.blocks.setdefault(replica, {}), _named(event))

    def _apply(self, blocks: dict[int, Block], event: dict[str, Any]) -> None:
        self.events.append(event)
        if event["type"] == "AllBlocksCleared":
            blocks.clear()
        elif event["type"] == "BlockRemoved":
            assert event["medium"] == "GPU"
            for each in event["block_hashes"]:
                del blocks[each]
        else:
            size, tokens, before = event["block_size"], event["token_ids"], event["parent_block_hash"]
            assert len(tokens) == size * len(event["block_hashes"])
            extra = event.get("extra_keys") or [None] * len(event["block_hashes"])
            for number, (each, keys) in enumerate(zip(event["block_hashes"], extra, strict=True)):
                assert each not in blocks
                own = tuple(tokens[number * size : (number + 1) * size])
                blocks[each] = (before, own, None if keys is None else keys[0])
                before = each


def _named(event: Any) -> dict[str, Any]:
    if isinstance(event, dict):
        return event
    name, *values = event
    return {"type": name, **dict(zip(_FIELDS[name], values, strict=False))}


def agrees(index: PrefixIndex, blocks: dict[int, Block]) -> bool:
    """Returns whether ``blocks`` are the full blocks of an index.

    The block before a block is compared while the index still has it.
    """
    hashes: dict[int, int] = {}
    expected: dict[int, Block] = {}
    unknown: set[int] = set()
    for entry, block, parent, content in index.in_order():
        if not index._hashes[block]:
            continue
        own = hashes[entry] = published_hash(index._hashes[block])
        tokens = tuple(int.from_bytes(content[at : at + 4], "little", signed=True) for at in range(0, len(content), 4))
        if isinstance(parent, bytes):
            expected[own] = (None, tokens, salt_name(parent) if parent else None)
        else:
            expected[own] = (hashes.get(parent), tokens, None)
            if parent not in hashes:
                unknown.add(own)
    found = {own: ((None, *block[1:]) if own in unknown else block) for own, block in blocks.items()}
    return found == expected
