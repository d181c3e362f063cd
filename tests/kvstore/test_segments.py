"""Tests the SSD tier without a scheduler: records, segments, quota, torn and damaged files, and a full disk."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from llm_serving.block_moves.tier_moves import BlockKey
from llm_serving.errors import CheckpointError, ConfigError
from llm_serving.ipc.host_pool import pool_of
from llm_serving.kvstore import segments
from llm_serving.kvstore.disk import RETRY_S, DiskTier, Transfer
from llm_serving.kvstore.records import RecordBuffer, decode_content, decode_header, encode_record
from llm_serving.kvstore.segments import FolderLock, SegmentFolder
from support.small_configs import REPOSITORY
from support.tiered_simulation import NAMESPACE, ManualMover, disk_tier
from support.time_limits import time_limit

CONTENT_BYTES = 1000


def key(number):
    return BlockKey(number.to_bytes(16, "little"), number.to_bytes(4, "little") * 16)


def content(number):
    return random.Random(number).randbytes(CONTENT_BYTES)


def open_folder(path, max_bytes=1 << 20, segment_bytes=4096, namespace=NAMESPACE):
    return SegmentFolder(path, namespace, max_bytes, segment_bytes)


def found(folder, number):
    place = folder.find(key(number).chained_hash)
    view = None if place is None else folder.read(place, key(number))
    return None if view is None else bytes(view)


def test_a_record_describes_itself():
    record = encode_record(NAMESPACE, key(1), 7, content(1))
    header = decode_header(record)
    assert (header.namespace, header.key, header.generation) == (NAMESPACE, key(1), 7)
    assert header.num_bytes == len(record)
    assert decode_content(record, NAMESPACE, key(1)) == content(1)


def test_a_record_is_read_whole_even_if_a_call_returns_only_a_part(tmp_path, monkeypatch):
    preadv = os.preadv
    folder = open_folder(tmp_path)
    folder.append(key(1), content(1))
    monkeypatch.setattr(os, "preadv", lambda file, views, at: preadv(file, [views[0][: (len(views[0]) + 1) // 2]], at))
    assert (found(folder, 1), folder.num_rejected) == (content(1), 0)
    [segment] = tmp_path.glob("*/*")
    buffer = RecordBuffer()
    with segment.open("rb") as file:
        assert len(buffer.read(file.fileno(), 1 << 20)) == segment.stat().st_size


def test_any_flipped_bit_of_a_record_is_found():
    record = encode_record(NAMESPACE, key(1), 7, content(1))
    rng = random.Random(0)
    for place in [*range(160), *(rng.randrange(len(record)) for _ in range(100))]:
        damaged = bytearray(record)
        damaged[place] ^= 1 << rng.randrange(8)
        assert decode_content(bytes(damaged), NAMESPACE, key(1)) is None, f"byte {place}"


@pytest.mark.parametrize(
    ("namespace", "wanted"),
    [(b"x" * 32, key(1)), (NAMESPACE, BlockKey(key(1).chained_hash, b"\0" * 64)), (NAMESPACE, key(2))],
    ids=["namespace", "tokens", "hash"],
)
def test_a_record_of_another_block_is_refused(namespace, wanted):
    assert decode_content(encode_record(NAMESPACE, key(1), 7, content(1)), namespace, wanted) is None


def test_blocks_are_found_again_after_a_restart(tmp_path):
    first = open_folder(tmp_path)
    for number in range(20):
        first.append(key(number), content(number))
    first.close()
    second = open_folder(tmp_path)
    assert second.num_blocks == 20
    assert second.generation == first.generation + 1
    assert [found(second, number) for number in range(20)] == [content(number) for number in range(20)]
    assert len(list(tmp_path.glob("*/*.kv"))) > 3, "segments have a maximum size"


@pytest.mark.parametrize("cut", [1, 500, CONTENT_BYTES + 100])
def test_a_torn_tail_is_dropped_and_the_records_before_it_stay(tmp_path, cut):
    first = open_folder(tmp_path, segment_bytes=1 << 20)
    for number in range(3):
        first.append(key(number), content(number))
    first.close()
    [file] = tmp_path.glob("*/*.kv")
    os.truncate(file, file.stat().st_size - cut)
    second = open_folder(tmp_path)
    assert [found(second, number) for number in range(3)] == [content(0), content(1), None]
    second.append(key(2), content(2))
    second.close()
    assert found(open_folder(tmp_path), 2) == content(2)


def test_a_damaged_record_is_a_miss_and_counted(tmp_path):
    folder = open_folder(tmp_path, segment_bytes=1 << 20)
    for number in range(3):
        folder.append(key(number), content(number))
    [file] = tmp_path.glob("*/*.kv")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 64
    file.write_bytes(data)
    assert [found(folder, number) for number in range(3)] == [content(0), None, content(2)]
    assert folder.num_rejected == 1
    assert folder.find(key(1).chained_hash) is None, "it is not read again"


def test_the_quota_removes_the_segment_that_was_not_read_for_the_longest_time(tmp_path):
    folder = open_folder(tmp_path, max_bytes=12_000, segment_bytes=3500)
    for number in range(9):
        folder.append(key(number), content(number))
    assert found(folder, 0) == content(0)
    for number in range(9, 12):
        folder.append(key(number), content(number))
    sizes = [path.stat().st_size for path in tmp_path.glob("*/*.kv")]
    assert sum(sizes) == folder.num_bytes <= 12_000
    assert found(folder, 0) == content(0), "its segment was read lately"
    assert found(folder, 4) is None
    assert found(folder, 11) == content(11)


def test_segments_of_other_models_count_for_the_quota_and_go_first(tmp_path):
    other = open_folder(tmp_path, namespace=b"o" * 32)
    for number in range(4):
        other.append(key(number), content(number))
    other.close()
    folder = open_folder(tmp_path, max_bytes=5000)
    assert found(folder, 0) is None
    for number in range(4):
        folder.append(key(number), content(number))
    assert folder.num_bytes <= 5000
    assert found(folder, 3) == content(3)


LOCK = """
import sys
from pathlib import Path
from llm_serving.kvstore.segments import FolderLock
FolderLock(Path(sys.argv[1]))
"""


def lock_in_another_process(folder):
    return subprocess.run([sys.executable, "-c", LOCK, str(folder)], cwd=REPOSITORY, capture_output=True, text=True)


def test_two_servers_cannot_use_one_folder_but_two_models_can(tmp_path):
    locks = [FolderLock(tmp_path / "tier"), FolderLock(tmp_path / "tier")]
    for lock in locks:
        assert "another server uses this folder" in lock_in_another_process(tmp_path / "tier").stderr
        lock.close()
    assert lock_in_another_process(tmp_path / "tier").returncode == 0


def test_two_versions_of_a_model_may_write_at_the_same_time(tmp_path):
    """While weights are reloaded, two versions of a model use the same folder, and often the same namespace."""
    first, second = open_folder(tmp_path, max_bytes=9000), open_folder(tmp_path, max_bytes=9000)
    for number in range(12):
        (first if number % 2 else second).append(key(number), content(number))
    sizes = [path.stat().st_size for path in tmp_path.glob("*/*.kv")]
    assert sum(sizes) <= 9000 + 2 * 4096, "each version sees the files of the other when it begins a file"
    for folder in (first, second):
        for number in range(12):
            assert found(folder, number) in (None, content(number))
        folder.close()
    third = open_folder(tmp_path)
    assert third.num_blocks >= 4
    assert all(found(third, number) in (None, content(number)) for number in range(12))


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="the folder cannot be used"):
        FolderLock(tmp_path / "file" / "tier")


class Pool:
    """Host blocks in a list."""

    block_bytes = CONTENT_BYTES
    blocks_at_once = 1
    is_usable = True

    def __init__(self):
        self.blocks = [content(number) for number in range(8)]

    def read(self, blocks):
        return [self.blocks[block] for block in blocks]

    def write(self, blocks, contents):
        for block, data in zip(blocks, contents, strict=True):
            self.blocks[block] = data
        return len(blocks)


def test_a_full_disk_stops_writes_but_not_reads(tmp_path, monkeypatch):
    now = [0.0]
    problems = []
    tier = DiskTier(tmp_path, 1 << 20, problems.append, clock=lambda: now[0])
    tier.mover = mover = ManualMover()
    tier.open(lambda: NAMESPACE)
    mover.run()
    done = []
    tier.write(key(0), Pool(), 0, lambda: done.append(0))
    mover.run()
    real_write = os.write

    def write_a_part(descriptor, data):
        if len(data) < 600:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(descriptor, data[:500])

    with monkeypatch.context() as patch:
        patch.setattr(segments.os, "write", write_a_part)
        tier.write(key(1), Pool(), 1, lambda: done.append(1))
        mover.run()
    assert done == [0, 1], "the host block is free again after a failed write"
    assert not tier.may_write
    assert (tier.figures.failed_writes, tier.figures.is_full) == (1, True)
    assert "No space left on device" in problems[0]
    tier.write(key(2), Pool(), 2, lambda: done.append(2))
    mover.run()
    assert tier.find(key(2)) is None, "nothing is written for a while"
    assert tier.find(key(0)) is not None
    now[0] += RETRY_S
    tier.write(key(3), Pool(), 3, lambda: done.append(3))
    mover.run()
    tier.close()
    folder = open_folder(tmp_path)
    assert [found(folder, number) for number in range(4)] == [content(0), None, None, content(3)]


class LostPool(Pool):
    """Host blocks on a machine that cannot be reached."""

    def read(self, blocks):
        return []

    def write(self, blocks, contents):
        return 0


def test_a_machine_that_cannot_be_reached_is_no_failure_of_the_disk(tmp_path):
    tier, mover = disk_tier(tmp_path)
    done, lost = [], LostPool()
    for number, pool in enumerate((Pool(), lost)):
        tier.write(key(number), pool, number, lambda: done.append(True))
    mover.run()
    assert (done, tier.may_write, tier.figures.failed_writes) == ([True, True], True, 0)
    assert tier.find(key(1)) is None
    place = tier.find(key(0))
    for pool, ok in ((lost, False), (Pool(), True)):
        transfer = Transfer([key(0)], [place], [5], [])
        tier.read(transfer, pool, lambda: done.append(True))
        mover.run()
        assert (transfer.oks, transfer.done) == ([ok], True)
    assert len(done) == 4
    tier.close()


def test_a_block_of_agents_that_have_ended_is_not_written_for_others(tmp_path):
    """The block waits for the disk while its agents end. New agents may have other kernels, and then another namespace.
    """
    tier, mover = disk_tier(tmp_path)
    tier.write(key(0), Pool(), 0, lambda: None)
    tier.open(lambda: b"n" * 32)
    mover.run()
    assert tier.find(key(0)) is None
    tier.close()
    assert open_folder(tmp_path).num_blocks == open_folder(tmp_path, namespace=b"n" * 32).num_blocks == 0


def test_a_tier_whose_namespace_cannot_be_known_stays_closed(tmp_path):
    tier, mover = disk_tier(tmp_path)
    tier.write(key(0), Pool(), 0, lambda: None)
    mover.run()

    def fail():
        raise CheckpointError("the weights have changed")

    tier.open(fail)
    with pytest.raises(CheckpointError):
        mover.run()
    assert tier.find(key(0)) is None
    assert not tier.may_write
    tier.close()


def test_what_a_doubtful_run_wrote_is_removed(tmp_path):
    first = open_folder(tmp_path)
    first.append(key(0), content(0))
    first.close()
    second = open_folder(tmp_path)
    second.append(key(1), content(1))
    second.drop_generation()
    assert [found(second, number) for number in range(2)] == [content(0), None]
    second.append(key(2), content(2))
    assert found(second, 2) == content(2)


def test_the_parts_of_several_agents_make_one_block():
    parts = [Pool(), Pool()]
    joined = pool_of(parts)
    assert joined.read([3, 1]) == [content(3) * 2, content(1) * 2]
    assert joined.write([2], [content(5) + content(6)]) == 1
    assert (parts[0].blocks[2], parts[1].blocks[2]) == (content(5), content(6))


WRITER = """
import sys
from pathlib import Path
from tests.kvstore.test_segments import content, key, open_folder
folder = open_folder(Path(sys.argv[1]))
print(folder.num_blocks, flush=True)
number = folder.num_blocks
while True:
    folder.append(key(number), content(number))
    number += 1
"""


def test_kill_9_during_writes_leaves_only_whole_blocks(tmp_path):
    known = 0
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"},
            stdout=subprocess.PIPE,
        )
        known = int(process.stdout.readline())
        deadline = time.monotonic() + time_limit(10)
        while sum(path.stat().st_size for path in tmp_path.glob("*/*.kv")) < (known + 5) * 1200:
            assert time.monotonic() < deadline
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        folder = open_folder(tmp_path)
        assert folder.num_blocks > known
        assert all(found(folder, number) == content(number) for number in range(folder.num_blocks))
        folder.close()


def test_the_test_tier_is_open(tmp_path):
    tier, _ = disk_tier(tmp_path)
    assert tier.may_write
    tier.close()
