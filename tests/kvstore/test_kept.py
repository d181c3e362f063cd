"""Tests blocks that requests asked to keep: limits of owners, the end of the keeping time, and which host block is
reused.
"""

from __future__ import annotations

from llm_serving.block_moves.tier_moves import BlockKey
from llm_serving.kvstore.host_blocks import HostBlocks
from llm_serving.kvstore.kept import KeptBlocks


def names(text: str) -> list[bytes]:
    return [each.encode() for each in text]


def test_each_owner_and_all_together_have_a_limit():
    kept = KeptBlocks(5, 3)
    assert kept.keep("a", names("abcd"), 10.0) == names("abc")
    assert kept.keep("b", names("cde"), 10.0) == names("de")
    assert kept.keep("c", names("f"), 10.0) == []
    assert kept.expire(9.9) == []
    assert sorted(kept.expire(10.0)) == names("abcde")
    assert len(kept) == 0
    assert kept.next_end == float("inf")
    assert kept.keep("a", names("xyz"), 20.0) == names("xyz"), "the counts of owners are right"


def test_a_longer_time_counts_and_a_shorter_one_does_not():
    kept = KeptBlocks(8, 8)
    kept.keep("a", names("ab"), 10.0)
    kept.keep("b", names("a"), 20.0)
    kept.keep("b", names("a"), 5.0)
    assert kept.expire(10.0) == names("b")
    assert b"a" in kept
    assert kept.expire(20.0) == names("a")


def test_blocks_that_are_kept_again_and_again_take_bounded_memory():
    kept = KeptBlocks(8, 8)
    for time in range(5000):
        kept.keep("a", names("ab"), float(time))
    assert len(kept._ends) <= 2 * 2 + 1024
    assert kept.expire(4998.0) == []
    assert sorted(kept.expire(4999.0)) == names("ab")


def stored(hosts: HostBlocks, name: bytes) -> int:
    host = hosts.allocate(BlockKey(name, name))
    assert host is not None
    hosts.filled(host)
    hosts.release(host)
    return host


def test_kept_blocks_are_reused_last():
    hosts = HostBlocks(0, 4, KeptBlocks(2, 2))
    hosts.keep("a", names("b"), 10.0)  # before its block arrives
    for each in names("abcd"):
        stored(hosts, each)
    hosts.keep("a", names("a"), 20.0)
    assert hosts.num_kept == 2
    for each in names("efghij"):
        stored(hosts, each)
    assert sorted(hosts.by_hash) == names("abij")
    hosts.expire(10.0)
    stored(hosts, b"k")
    assert sorted(hosts.by_hash) == names("aijk"), "a block whose time is over is the next one"
    held = hosts.by_hash[b"a"]
    hosts.hold(held)
    hosts.release(held)
    assert hosts.num_kept == 1
    hosts.distrust()
    assert (hosts.num_kept, len(hosts.by_hash), len(hosts._free)) == (0, 0, 4)


def test_kept_blocks_give_way_if_all_others_are_held():
    hosts = HostBlocks(0, 2, KeptBlocks(1, 1))
    stored(hosts, b"a")
    hosts.keep("o", names("a"), 10.0)
    assert hosts.allocate(BlockKey(b"b", b"")) is not None
    assert hosts.allocate(BlockKey(b"c", b"")) is not None
    assert hosts.allocate(BlockKey(b"d", b"")) is None
