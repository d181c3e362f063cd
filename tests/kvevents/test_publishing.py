"""Tests that a subscriber of the events of the prefix cache knows exactly the blocks of the index, over real sockets.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("zmq", reason="the package pyzmq is not installed")

from llm_serving.config.events_section import KvEventsConfig
from llm_serving.errors import ConfigError
from llm_serving.kvevents import setup
from llm_serving.kvevents.observer import ChangeQueue, ReplicaObserver, events_of
from llm_serving.kvevents.publisher import EventPublisher
from llm_serving.kvevents.wire import ARRAY, MAP, AllBlocksCleared, BlockRemoved, BlockStored, encoder
from support.kv_events import Subscriber, agrees
from support.scheduler_scripts import Player
from support.script_drawing import draw_script
from support.small_configs import small_config
from support.time_limits import time_limit

ANY_PORT = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0"}


class Dropped:
    def __init__(self) -> None:
        self.count = 0

    def add(self, count: int) -> None:
        self.count += count


@contextmanager
def publishing(**settings: object) -> Iterator[tuple[EventPublisher, Dropped]]:
    dropped = Dropped()
    publisher = EventPublisher(KvEventsConfig(**{**ANY_PORT, **settings}), dropped.add)
    try:
        yield publisher, dropped
    finally:
        publisher.close()


@contextmanager
def subscribed(publisher: EventPublisher, topic: str = "") -> Iterator[Subscriber]:
    subscriber = Subscriber(*publisher.endpoints, topic)
    try:
        yield subscriber
    finally:
        subscriber.close()


def serving(publisher: EventPublisher, replica: int = 0) -> ReplicaObserver:
    """Returns the observer of a replica that gets requests."""
    observer = publisher.observer(replica)
    observer.enter_service()
    return observer


def block(number: int, before: int | None = None, salt: bytes = b"") -> tuple[bytes, bytes, bytes | None, bytes]:
    """Returns hash, content, hash of the block before, and salt of a block of two tokens."""
    content, name = struct.pack("<2i", number, number + 1), (lambda each: each.to_bytes(16, "big"))
    return name(number), content, None if before is None else name(before), salt


@pytest.mark.parametrize(("layout", "first_seed"), [(ARRAY, 0), (MAP, 1000)])
def test_the_events_of_random_scripts_lead_to_the_index(layout: str, first_seed: int) -> None:
    """Two replicas run random scripts: evictions, preemptions, lost agents, salts. One subscriber follows both.

    The subscriber connects late, so it needs a replay. It must learn that the caches of earlier scripts are empty now.
    """
    seen = {"scripts": 0, "salts": 0, "preemptions": 0}
    topic = "kv@here@model"
    with publishing(format=layout, topic=topic) as (publisher, dropped), subscribed(publisher, topic) as subscriber:
        for seed in range(first_seed, first_seed + 40):
            script = draw_script(seed)
            if not script.limits["prefix_cache"]:
                continue
            replica, player = seed % 2, Player(script.limits)
            index = player.simulation.scheduler._kv_cache.prefix_index
            player.simulation.scheduler.observe_cache(serving(publisher, replica))
            for operation in script.operations:
                player.do(operation)
            subscriber.catch_up()
            blocks = subscriber.blocks.setdefault(replica, {})
            subscriber.follow(lambda: agrees(index, blocks))  # noqa: B023
            seen["scripts"] += 1
            seen["salts"] += any(each[2] for each in blocks.values())
            seen["preemptions"] += player.simulation.scheduler.num_preemptions
        kinds = {name: sum(each["type"] == name for each in subscriber.events) for name in
                 ("BlockStored", "BlockRemoved", "AllBlocksCleared")}  # fmt: skip
        assert subscriber.lost == []
        assert subscriber.num_replayed
    assert dropped.count == 0
    assert seen["scripts"] > 10
    assert seen["salts"] > 2
    assert seen["preemptions"] > 10
    assert kinds["BlockStored"] > 100
    assert kinds["BlockRemoved"] > 50
    assert kinds["AllBlocksCleared"] > seen["scripts"], "lost agents clear the cache, too"


def test_blocks_that_follow_each_other_share_an_event() -> None:
    first, second, other, third = block(1, salt=b"key"), block(2, before=1), block(7), block(3, before=2)
    changes = [first, second, other, third, first[0], other[0], None, first]
    stored, salted, removed = events_of([first, second]), events_of([first])[0], events_of([first[0], other[0]])
    assert [type(each) for each in events_of(changes)] == [
        BlockStored, BlockStored, BlockStored, BlockRemoved, AllBlocksCleared, BlockStored,
    ]  # fmt: skip
    assert stored == [BlockStored([1, 2], None, [1, 2, 2, 3], 2, [*salted.extra_keys, None])]
    assert removed == [BlockRemoved([1, 7])]
    assert salted.extra_keys not in (None, [None])
    assert events_of([other])[0].extra_keys is None


def test_the_bytes_are_those_of_the_published_format() -> None:
    events = events_of([block(2, before=1), block(2)[0], None])
    stored = {"type": "BlockStored", "block_hashes": [2], "parent_block_hash": 1, "token_ids": [2, 3], "block_size": 2,
              "lora_id": None, "medium": "GPU", "lora_name": None}  # fmt: skip
    removed = {"type": "BlockRemoved", "block_hashes": [2], "medium": "GPU"}
    as_maps = [1.5, [stored, removed, {"type": "AllBlocksCleared"}], 3]
    assert msgspec.msgpack.decode(encoder(MAP)(1.5, events, 3)) == as_maps
    as_arrays = [1.5, [list(each.values()) for each in as_maps[1]], 3]
    assert msgspec.msgpack.decode(encoder(ARRAY)(1.5, events, 3)) == as_arrays


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + time_limit(20)
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_full_queue_drops_changes_and_leaves_a_gap() -> None:
    """The queue never waits for the publisher. A subscriber sees the loss, which no replay repairs."""
    with publishing(max_waiting_events=4) as (publisher, dropped), subscribed(publisher) as subscriber:
        observer = serving(publisher)
        subscriber.catch_up()
        subscriber.follow(lambda: subscriber.expected == 1)
        wait_for(lambda: publisher._queue._is_asleep)
        publisher._queue._is_asleep = False  # keeps the thread asleep, as a thread without processor time
        for number in range(10):
            observer.stored(1 + number, block(number)[0], block(number)[1], b"")
        publisher._queue.wake()
        wait_for(lambda: dropped.count == 6)
        observer.stored(100, block(100)[0], block(100)[1], b"")
        subscriber.follow(lambda: 100 in subscriber.blocks[0])
        assert sorted(subscriber.blocks[0]) == [0, 1, 2, 3, 100]
        assert len(subscriber.lost) == 1


def test_a_replay_has_the_last_batches_only() -> None:
    with publishing(buffer_batches=3) as (publisher, _), subscribed(publisher) as subscriber:
        observer = serving(publisher)
        for number in range(8):
            sent = publisher._sequence
            observer.removed(number)  # this block was never published
            observer.stored(number, block(number)[0], block(number)[1], b"")
            wait_for(lambda sent=sent: publisher._sequence > sent)
        last = publisher._sequence - 1
        assert [sequence for sequence, _ in subscriber.replay(0)] == [last - 2, last - 1, last]
        assert [sequence for sequence, _ in subscriber.replay(last)] == [last]
        assert subscriber.replay(last + 1) == []
        subscriber._replay.send_multipart((b"", b"not a number"))
        subscriber._replay.send_multipart((b"", b"", b"", b""))
        assert len(subscriber.replay(0)) == 3, "malformed requests get no answer, and the next one does"


def test_a_later_engine_takes_over_a_replica_when_it_enters_service() -> None:
    with publishing() as (publisher, _), subscribed(publisher) as subscriber:
        old = serving(publisher)
        old.stored(1, block(1)[0], block(1)[1], b"")
        subscriber.catch_up()
        subscriber.follow(lambda: 1 in subscriber.blocks.get(0, {}))
        publisher.observer(0).stored(1, block(7)[0], block(7)[1], b"")  # its engine never starts
        new = publisher.observer(0)
        new.stored(1, block(8)[0], block(8)[1], b"")
        old.stored(2, block(2)[0], block(2)[1], b"")
        subscriber.follow(lambda: 2 in subscriber.blocks[0])
        assert sorted(subscriber.blocks[0]) == [1, 2], "the old engine still serves"
        new.enter_service()
        old.stored(3, block(4)[0], block(4)[1], b"")
        new.stored(2, block(3)[0], block(3)[1], b"")
        old.removed(1)
        subscriber.follow(lambda: 3 in subscriber.blocks[0])
        assert sorted(subscriber.blocks[0]) == [3]


def test_a_block_without_a_cached_parent_is_not_published() -> None:
    queue = ChangeQueue(100)
    observer = ReplicaObserver(queue, 5, ReplicaObserver.begin)
    observer.enter_service()
    observer.stored(2, block(2)[0], block(2)[1], 1)
    observer.removed(2)
    assert list(queue.take(10)) == [(5, None)]
    queue.close()


def test_an_endpoint_that_is_in_use_is_named() -> None:
    with publishing() as (publisher, _), pytest.raises(ConfigError) as refused, publishing(
        endpoint=publisher.endpoints[1]
    ):
        pass
    assert publisher.endpoints[1] in str(refused.value)
    assert "kv_events_config.endpoint" in str(refused.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    setup.check_package()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'llm-serving\[events\]'"):
        setup.check_package()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["endpoint=127.0.0.1:5557"], "endpoint = '127.0.0.1:5557': must be tcp://ADDRESS:PORT"),
        (["endpoint=tcp://127.0.0.1:99999"], "must be tcp://ADDRESS:PORT"),
        (["endpoint=tcp://999.0.0.1:1"], "'999.0.0.1' is not an IP address"),
        (["endpoint=tcp://*:5557"], "set kv_events_config.allow_remote: true"),
        (["replay_endpoint=tcp://10.0.0.1:5557"], "other machines could read prompts as token ids"),
        (["endpoint=tcp://127.0.0.1:5558"], "replay_endpoint = 'tcp://127.0.0.1:5558': is also kv_events_config"),
        (["format=json"], "kv_events_config.format = 'json'"),
        (["buffer_batches=0"], "kv_events_config.buffer_batches = 0"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, settings: list[str], problem: str) -> None:
    overrides = [f"kv_events_config.{each}" for each in ["enabled=true", *settings]]
    with pytest.raises(ConfigError) as refused:
        small_config(tmp_path, overrides)
    assert problem in str(refused.value)


def test_events_need_a_prefix_cache(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no prefix cache"):
        small_config(tmp_path, ["kv_events_config.enabled=true", "scheduler_config.prefix_cache=false"])
    remote = ["kv_events_config.enabled=true", "kv_events_config.allow_remote=true", "kv_events_config.endpoint=tcp://*:1"]
    assert small_config(tmp_path, remote).kv_events_config.endpoint == "tcp://*:1"
