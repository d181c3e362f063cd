"""Tests that a tier moves several blocks in one call of the host pool, and that a failed block ends the rest."""

from __future__ import annotations

import errno

import pytest

from llm_serving.block_moves.tier_moves import BlockKey
from llm_serving.kvstore import disk
from llm_serving.kvstore.disk import Transfer
from support.tiered_simulation import disk_tier

BYTES = 500
KEYS = [BlockKey(bytes([number]) * 16, number.to_bytes(4, "little") * 16) for number in range(8)]
CONTENTS = [bytes([number]) * BYTES for number in range(8)]


class Pool:
    """Host blocks whose contents are moved three at a time. Only ``num_reached`` more blocks can be reached."""

    block_bytes = BYTES
    blocks_at_once = 3
    is_usable = True

    def __init__(self):
        self.blocks = dict(enumerate(CONTENTS))
        self.calls = []
        self.num_reached = 100
        self.on_read = lambda: None

    def _reached(self, blocks):
        self.calls.append(list(blocks))
        count = min(len(blocks), self.num_reached)
        self.num_reached -= count
        return blocks[:count]

    def read(self, blocks):
        self.on_read()
        return [self.blocks[block] for block in self._reached(blocks)]

    def write(self, blocks, contents):
        assert len(blocks) == len(contents)
        reached = self._reached(blocks)
        self.blocks.update(zip(reached, contents, strict=False))
        return len(reached)


@pytest.fixture
def tier(tmp_path):
    made, mover = disk_tier(tmp_path)
    yield made
    made.close()
    assert not mover.run()


def written(tier, pool, numbers=range(8)):
    """Writes blocks and returns the numbers for which ``done`` was called, in order."""
    done = []
    for number in numbers:
        tier.write(KEYS[number], pool, number, lambda number=number: done.append(number))
    tier.mover.run()
    return done


def found(tier):
    return [number for number, key in enumerate(KEYS) if tier.find(key) is not None]


def test_blocks_that_wait_for_the_disk_are_read_together(tier):
    pool, other = Pool(), Pool()
    done = []
    for number in range(7):
        tier.write(KEYS[number], pool if number != 4 else other, number, lambda number=number: done.append(number))
    tier.mover.run()
    assert done == list(range(7))
    assert (pool.calls, other.calls) == ([[0, 1, 2], [3], [5, 6]], [[4]])
    assert found(tier) == list(range(7))
    assert [tier.content(tier.find(key), key) for key in KEYS[:7]] == CONTENTS[:7]


def test_the_bytes_of_a_job_that_writes_are_limited(tier, monkeypatch):
    monkeypatch.setattr(disk, "WRITE_BYTES", 2 * BYTES)
    pool = Pool()
    assert written(tier, pool, range(5)) == list(range(5))
    assert pool.calls == [[0, 1], [2, 3], [4]]
    monkeypatch.setattr(disk, "WRITE_BYTES", 1)
    written(tier, pool, [5, 6])
    assert pool.calls[3:] == [[5], [6]]


def test_blocks_behind_one_that_cannot_be_reached_are_not_written(tier):
    pool = Pool()
    pool.num_reached = 2
    assert written(tier, pool, range(6)) == list(range(6))
    assert found(tier) == [0, 1]
    assert tier.may_write, "the disk itself works"


def test_a_disk_that_becomes_full_in_the_middle_keeps_the_blocks_before(tier, monkeypatch):
    append, problems = tier._records.append, []

    def append_two(key, content):
        if key == KEYS[2]:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(key, content)

    monkeypatch.setattr(tier._records, "append", append_two)
    monkeypatch.setattr(tier, "_on_problem", problems.append)
    assert written(tier, Pool(), range(6)) == list(range(6))
    assert found(tier) == [0, 1]
    assert (tier.figures.failed_writes, tier.figures.written_blocks, len(problems)) == (1, 2, 1)


def test_blocks_that_become_doubtful_while_they_are_read_are_not_written(tier):
    pool = Pool()
    pool.on_read = lambda: tier.distrust() if not pool.calls else None
    assert written(tier, pool, range(5)) == list(range(5))
    assert found(tier) == []
    pool.on_read = lambda: None
    assert written(tier, pool, [6]) == [6]
    assert found(tier) == [6]


def transferred(tier, pool, hosts):
    transfer, done = Transfer(KEYS[: len(hosts)], [tier.find(key) for key in KEYS[: len(hosts)]], hosts, []), []
    tier.read(transfer, pool, lambda: done.append(True))
    tier.mover.run()
    assert (done, transfer.done) == ([True], True)
    return transfer.oks


def test_blocks_of_a_read_are_written_together_and_in_order(tier):
    written(tier, Pool())
    pool = Pool()
    hosts = [17, 12, 19, 11, 18, 13, 16]
    assert transferred(tier, pool, hosts) == [True] * 7
    assert pool.calls == [[17, 12, 19], [11, 18, 13], [16]]
    assert [pool.blocks[host] for host in hosts] == CONTENTS[:7]
    assert tier.figures.read_bytes == 7 * BYTES


@pytest.mark.parametrize("place", range(7))
def test_blocks_behind_a_damaged_record_are_misses(tier, place):
    written(tier, Pool())
    damaged = tier.find(KEYS[place])
    path = damaged.segment.path
    with path.open("r+b") as file:
        file.seek(damaged.offset + damaged.num_bytes - 1)
        file.write(b"\xff")
    pool = Pool()
    assert transferred(tier, pool, list(range(10, 17))) == [True] * place + [False] * (7 - place)
    assert sorted(set(pool.blocks) - set(range(8))) == list(range(10, 10 + place))


@pytest.mark.parametrize("place", range(7))
def test_blocks_behind_one_that_does_not_arrive_are_misses(tier, place):
    written(tier, Pool())
    pool = Pool()
    pool.num_reached = place
    assert transferred(tier, pool, list(range(10, 17))) == [True] * place + [False] * (7 - place)
    assert len(pool.calls) == place // 3 + 1, "the tier does not ask again"
