"""Observes the prefix cache of a replica, and puts its changes into the bounded queue of the publisher."""

from __future__ import annotations

import contextlib
import os
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b

from llm_serving.kvcache.block_hash import TOKEN_BYTES
from llm_serving.kvcache.prefix_index import Parent
from llm_serving.kvevents.wire import AllBlocksCleared, BlockRemoved, BlockStored, Event, published_hash

_SALT_BYTES = 16
"""Size of the digest of a cache salt in an event."""

Stored = tuple[bytes, bytes, bytes | None, bytes]
"""A stored block: its hash, its packed tokens, the hash of the block before it, and a salt. The first block of a
sequence has no block before it, so it has None instead of that hash. It has the salt of its request. Other blocks have
no salt.
"""
Change = Stored | bytes | None
"""One change of a prefix cache: a stored block, the hash of a removed block, or None if the whole cache was cleared."""


class ChangeQueue:
    """A bounded queue of changes that the publisher has not sent yet, from all replicas. ``put`` never waits.

    The engine threads call ``put``, and the publisher's thread calls ``take``. If the queue was full and changes were
    dropped, ``take`` yields None in their place.
    """

    def __init__(self, max_waiting: int) -> None:
        self.num_dropped = 0
        self._max_waiting = max_waiting
        self._changes: deque[tuple[int, Change] | None] = deque()
        self._has_gap = False
        self._is_asleep = False
        self.wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """A descriptor that becomes readable when changes wait and the publisher sleeps."""

    @property
    def is_empty(self) -> bool:
        return not self._changes

    def put(self, replica: int, change: Change) -> None:
        """Adds a change. If the queue is full, drops and counts the change."""
        if len(self._changes) >= self._max_waiting:
            self.num_dropped += 1
            self._has_gap = True
            return
        if self._has_gap:
            self._has_gap = False
            self._changes.append(None)
        self._changes.append((replica, change))
        if self._is_asleep:
            self._is_asleep = False
            self.wake()

    def wake(self) -> None:
        """Wakes the publisher if it sleeps."""
        os.eventfd_write(self.wakes, 1)

    def note_sleep(self) -> bool:
        """The publisher calls this method before it sleeps. It may sleep only if the result is True.

        The result is False if changes already wait. A sleeping publisher wakes when ``wakes`` becomes readable.
        """
        self._is_asleep = True
        return not self._changes

    def note_awake(self) -> None:
        """Called by the publisher when it is awake again."""
        self._is_asleep = False
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wakes)

    def take(self, limit: int) -> Iterator[tuple[int, Change] | None]:
        """Removes and yields at most ``limit`` changes, each with the number of its replica. None stands for lost
        changes.
        """
        for _ in range(min(limit, len(self._changes))):
            yield self._changes.popleft()

    def close(self) -> None:
        """Closes ``wakes``. Engine threads must not call ``put`` any more."""
        os.close(self.wakes)


class ReplicaObserver:
    """Observes the prefix cache of a replica, with the interface ``IndexObserver`` of the KV cache manager.

    The observer publishes changes from ``enter_service`` on, until a reload of the model replaces the replica's engine.
    A block is published only if the block before it is also published, because requests look up the blocks of a prefix
    in order.
    """

    def __init__(self, queue: ChangeQueue, replica: int, take_over: Callable[[ReplicaObserver], None]) -> None:
        """``take_over`` is called by ``enter_service``. It stops the earlier observer of the replica, and calls
        ``begin`` of this observer.
        """
        self.replica = replica
        self.is_current = False
        """True while changes are published."""
        self._queue = queue
        self._take_over = take_over
        self._hashes: dict[int, bytes] = {}
        """The hash of each published block, by the number of the block's entry in the index of the prefix cache."""

    def enter_service(self) -> None:
        """From now on, publishes the changes of this engine. The observer of the earlier engine stops publishing."""
        self._take_over(self)

    def begin(self) -> None:
        """Publishes that all blocks of the earlier engine were removed. From then on, publishes this engine's changes.
        """
        self._queue.put(self.replica, None)
        # Set this after ``put``. From now on, the engine thread may queue blocks, and they must follow the None above.
        self.is_current = True

    def stored(self, entry: int, block_hash: bytes, content: bytes, parent: Parent) -> None:
        if not self.is_current:
            return
        before, salt = None, b""
        if isinstance(parent, bytes):
            salt = parent
        else:
            before = self._hashes.get(parent)
            if before is None:
                return
        self._hashes[entry] = block_hash
        self._put((block_hash, content, before, salt))

    def removed(self, entry: int) -> None:
        block_hash = self._hashes.pop(entry, None)
        if block_hash is not None:
            self._put(block_hash)

    def cleared(self) -> None:
        self._hashes.clear()
        self._put(None)

    def _put(self, change: Change) -> None:
        if self.is_current:
            self._queue.put(self.replica, change)


def events_of(changes: Sequence[Change]) -> list[Event]:
    """Returns the events for consecutive changes of a replica. Stored blocks that follow each other in a sequence share
    one event.
    """
    events: list[Event] = []
    chain: list[Stored] = []
    removed: list[bytes] = []

    def complete(change: Change) -> None:
        """Completes the event that is being built, unless ``change`` continues it."""
        if chain and not (isinstance(change, tuple) and change[2] == chain[-1][0]):
            events.append(_stored(chain))
            chain.clear()
        if removed and not isinstance(change, bytes):
            events.append(BlockRemoved([published_hash(each) for each in removed]))
            removed.clear()

    for change in changes:
        complete(change)
        if isinstance(change, tuple):
            chain.append(change)
        elif isinstance(change, bytes):
            removed.append(change)
        else:
            events.append(AllBlocksCleared())
    complete(None)
    return events


def _stored(chain: Sequence[Stored]) -> BlockStored:
    content = b"".join(each[1] for each in chain)
    num_tokens, before = len(content) // TOKEN_BYTES, chain[0][2]
    extra = [[salt_name(each[3])] if each[3] else None for each in chain]
    return BlockStored(
        block_hashes=[published_hash(each[0]) for each in chain],
        parent_block_hash=None if before is None else published_hash(before),
        token_ids=list(struct.unpack(f"<{num_tokens}i", content)),
        block_size=num_tokens // len(chain),
        extra_keys=extra if any(extra) else None,
    )


def salt_name(salt: bytes) -> str:
    """Returns a name for a salt. Equal salts have equal names, and the name does not reveal the salt."""
    return blake2b(salt, digest_size=_SALT_BYTES, person=b"llm-kv-events").hexdigest()
