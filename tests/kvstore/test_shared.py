"""Tests a folder that several machines share: files and deletions by others, damage, limits, and two tiers together."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from llm_serving.block_moves.tier_moves import BlockKey
from llm_serving.errors import ConfigError
from llm_serving.kvstore.disk import Transfer
from llm_serving.kvstore.records import encode_record
from llm_serving.kvstore.shared import QUIET_S, TEMPORARY_S, SharedFolder, SharedTier
from llm_serving.kvstore.tier_chain import TierChain
from support.tiered_simulation import NAMESPACE, ManualMover, disk_tier

BYTES = 256


def key(number: int) -> BlockKey:
    return BlockKey(bytes([number]) * 16, number.to_bytes(4, "little") * 16)


def content(number: int) -> bytes:
    return bytes([number]) * BYTES


def shared(folder, **changes) -> SharedFolder:
    return SharedFolder(folder, **{"namespace": NAMESPACE, "max_bytes": 1 << 20, **changes})


def test_a_machine_finds_the_files_of_others_after_a_scan(tmp_path):
    ours, theirs = shared(tmp_path), shared(tmp_path)
    theirs.append(key(1), content(1))
    assert ours.find(key(1).chained_hash) is None
    ours.scan()
    place = ours.find(key(1).chained_hash)
    assert ours.read(place, key(1)) == content(1)
    theirs.append(key(2), content(2))
    ours.scan()
    assert ours.num_blocks == 2, "a folder that changed again shortly after a scan is scanned again"
    other = shared(tmp_path, namespace=bytes(31) + b"x")
    assert other.num_blocks == 0


@pytest.mark.parametrize("change", ["removed", "cut", "flipped", "exchanged", "empty"])
def test_what_others_do_to_a_file_is_a_miss(tmp_path, change):
    ours, theirs = shared(tmp_path), shared(tmp_path)
    for number in (1, 2):
        theirs.append(key(number), content(number))
    ours.scan()
    place = ours.find(key(1).chained_hash)
    path = place.segment.path
    data = bytearray(path.read_bytes())
    if change == "removed":
        path.unlink()
    elif change == "exchanged":
        os.replace(theirs.find(key(2).chained_hash).segment.path, path)
    else:
        data[-1] ^= 1
        path.write_bytes({"cut": data[:-9], "flipped": data, "empty": b""}[change])
    assert ours.read(place, key(1)) is None
    assert ours.find(key(1).chained_hash) is None
    assert not path.exists(), "the next write makes a good file"
    ours.append(key(1), content(1))
    assert ours.read(ours.find(key(1).chained_hash), key(1)) == content(1)
    ours.scan()
    theirs.scan()
    assert theirs.read(theirs.find(key(1).chained_hash), key(1)) == content(1)


def test_the_files_that_nobody_read_go_first(tmp_path):
    now = [1000.0]
    shared(tmp_path / "x").append(key(9), content(9))
    [file] = (tmp_path / "x").rglob("*.kv")
    record = file.stat().st_size
    ours = shared(tmp_path / "y", max_bytes=4 * record, clock=lambda: now[0])
    for number in range(1, 5):
        ours.append(key(number), content(number))
        os.utime(ours.find(key(number).chained_hash).segment.path, (number, number))
    now[0] = 2000.0
    assert ours.read(ours.find(key(1).chained_hash), key(1)) == content(1)
    shared(tmp_path / "y", namespace=b"n" * 32, max_bytes=4 * record).append(key(7), content(7))
    left = {path.stem[:2] for path in (tmp_path / "y").rglob("*.kv")}
    assert left == {"01", "04", "07"}, "the limit is for all namespaces; a read block stays"
    with pytest.raises(OSError, match="exceeds the limit"):
        shared(tmp_path / "z", max_bytes=record - 1).append(key(1), content(1))


def test_temporary_files_of_dead_machines_are_removed_and_foreign_files_stay(tmp_path):
    ours = shared(tmp_path)
    ours.append(key(1), content(1))
    folder = ours.find(key(1).chained_hash).segment.path.parent
    for name, age in ((".dead-1-0.tmp", TEMPORARY_S + 9), (".alive-1-0.tmp", 0.0), ("notes.txt", 1e6), ("zz.kv", 0.0)):
        file = folder / name
        file.touch()
        found = file.stat()
        os.utime(file, (found.st_atime - age, found.st_mtime - age))
    (tmp_path / "other").mkdir()
    again = shared(tmp_path)
    assert again.num_blocks == 1
    assert {".alive-1-0.tmp", "notes.txt", "zz.kv"} <= set(os.listdir(folder))
    assert ".dead-1-0.tmp" not in os.listdir(folder)


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    ours = shared(tmp_path)

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        ours.append(key(1), content(1))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert ours.find(key(1).chained_hash) is None


def test_doubtful_blocks_of_this_run_are_removed(tmp_path):
    theirs, ours = shared(tmp_path), shared(tmp_path)
    theirs.append(key(1), content(1))
    ours.append(key(2), content(2))
    ours.drop_generation()
    theirs.scan()
    assert [theirs.find(key(number).chained_hash) is not None for number in (1, 2)] == [True, False]


def test_blocks_of_a_marked_writer_are_a_miss(tmp_path):
    """The writer dies before it has removed its files."""
    theirs, ours = shared(tmp_path), shared(tmp_path)
    theirs.append(key(1), content(1))
    theirs._marks.mark_own()
    theirs.append(key(2), content(2))
    ours.scan()
    assert not ours.has_doubt(), "nothing was read"
    places = [ours.find(key(number).chained_hash) for number in (1, 2)]
    assert ours.read(places[0], key(1)) is None
    assert not places[0].segment.path.exists()
    assert ours.read(places[1], key(2)) == content(2), "the writer has a new number"
    assert (ours.num_rejected, ours.has_doubt()) == (1, False)


def test_a_machine_that_has_read_distrusted_blocks_has_one_doubt(tmp_path):
    theirs, ours, others = shared(tmp_path), shared(tmp_path), shared(tmp_path)
    theirs.append(key(1), content(1))
    ours.append(key(2), content(2))
    for each in (ours, others):
        each.scan()
    assert ours.read(ours.find(key(1).chained_hash), key(1)) == content(1)
    assert others.read(others.find(key(2).chained_hash), key(2)) == content(2)
    assert not ours.has_doubt()
    theirs.drop_generation()
    assert [each.has_doubt() for each in (ours, ours, others)] == [True, False, False]
    ours.drop_generation()
    assert [each.has_doubt() for each in (others, ours, theirs)] == [True, False, False]


def test_a_machine_has_no_doubt_after_its_own_distrust(tmp_path):
    ours = shared(tmp_path)
    ours.append(key(1), content(1))
    assert ours.read(ours.find(key(1).chained_hash), key(1)) == content(1)
    ours.drop_generation()
    assert not ours.has_doubt()
    marks = os.listdir(tmp_path / NAMESPACE.hex() / "distrusted")
    ours.drop_generation()
    assert os.listdir(tmp_path / NAMESPACE.hex() / "distrusted") == marks, "nothing was written since"


def test_files_that_are_no_marks_are_ignored(tmp_path):
    ours = shared(tmp_path)
    ours.append(key(1), content(1))
    folder = tmp_path / NAMESPACE.hex() / "distrusted"
    folder.mkdir()
    for name in ("notes.txt", ".nfs0001", "zz"):
        (folder / name).touch()
    place = ours.find(key(1).chained_hash)
    assert ours.read(place, key(1)) == content(1)
    place.segment.path.write_bytes(encode_record(NAMESPACE, key(1), 0, content(1)))
    assert ours.read(place, key(1)) == content(1), "a block of an older version"
    assert not ours.has_doubt()


def test_the_files_are_removed_even_if_the_mark_cannot_be_made(tmp_path):
    ours = shared(tmp_path)
    ours.append(key(1), content(1))
    path = ours.find(key(1).chained_hash).segment.path
    (tmp_path / NAMESPACE.hex() / "distrusted").touch()
    with pytest.raises(OSError, match="distrusted"):
        ours.drop_generation()
    assert not path.exists()


def test_a_mark_that_cannot_be_made_is_tried_again(tmp_path):
    ours, theirs = shared(tmp_path), shared(tmp_path)
    ours.append(key(1), content(1))
    theirs.scan()
    assert theirs.read(theirs.find(key(1).chained_hash), key(1)) == content(1)
    distrusted = tmp_path / NAMESPACE.hex() / "distrusted"
    distrusted.touch()
    with pytest.raises(OSError, match="distrusted"):
        ours.drop_generation()
    distrusted.unlink()
    assert [each.has_doubt() for each in (theirs, ours, theirs)] == [False, False, True]


def test_while_the_marks_cannot_be_read_every_block_is_a_miss(tmp_path, monkeypatch):
    ours, theirs = shared(tmp_path), shared(tmp_path)
    theirs.append(key(1), content(1))
    ours.scan()
    place = ours.find(key(1).chained_hash)

    def fail(path):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as broken:
        broken.setattr(os, "listdir", fail)
        with pytest.raises(PermissionError):
            ours.has_doubt()
        assert ours.read(place, key(1)) is None
    assert place.segment.path.exists(), "the block may be good"
    assert not ours.has_doubt()
    assert (ours.read(place, key(1)), ours.num_rejected) == (content(1), 0)


def opened_tier(folder, problems) -> SharedTier:
    """Returns a tier that is open. Another machine has written block 1 before."""
    shared(folder).append(key(1), content(1))
    tier, mover = SharedTier(folder, 1 << 20, problems.append), ManualMover()
    tier.mover = mover  # type: ignore[assignment]
    tier.open(lambda: NAMESPACE)
    mover.run()
    return tier


def test_while_the_marks_cannot_be_read_the_tier_finds_nothing_and_reports_it_once(tmp_path):
    problems = []
    tier, marks = opened_tier(tmp_path, problems), tmp_path / NAMESPACE.hex() / "distrusted"
    for number in (1, 2):
        place = tier.find(key(1))
        assert place is not None
        marks.touch()  # a file instead of a folder cannot be listed
        tier.look()
        tier.look()
        assert (tier.find(key(1)), tier.content(place, key(1)), tier.may_write) == (None, None, True)
        assert len(problems) == 2 * number - 1
        assert "reads no blocks while the marks cannot be read: [Errno 20]" in problems[-1]
        marks.unlink()
        tier.look()
        tier.look()
        assert tier.content(tier.find(key(1)), key(1)) == content(1)
        assert len(problems) == 2 * number
        assert "reads blocks again" in problems[-1]


def test_a_tier_opens_while_the_marks_cannot_be_read(tmp_path):
    problems = []
    marks = tmp_path / NAMESPACE.hex() / "distrusted"
    marks.parent.mkdir()
    marks.touch()
    tier = opened_tier(tmp_path, problems)
    assert (tier.find(key(1)), tier.may_write) == (None, True)
    tier.look()
    marks.unlink()
    tier.look()
    assert tier.content(tier.find(key(1)), key(1)) == content(1)
    assert ["reads no blocks" in problems[0], "reads blocks again" in problems[1]] == [True, True]


def test_after_a_distrust_a_machine_neither_reads_nor_writes_for_some_time(tmp_path):
    """Meanwhile, machines that have read its blocks distrust their own ones."""
    now = [100.0]
    tier, mover = SharedTier(tmp_path / "shared", 1 << 20, print, lambda: now[0]), ManualMover()
    tier.mover = mover  # type: ignore[assignment]
    tier.open(lambda: NAMESPACE)
    mover.run()
    pool = Pool()
    pool.blocks = {1: content(1)}
    tier.write(key(1), pool, 1, lambda: None)
    mover.run()
    other = shared(tmp_path / "shared")
    other.append(key(2), content(2))
    tier._scan()
    assert tier.find(key(2)) is not None
    tier.distrust()
    assert (tier.find(key(2)), tier.may_write) == (None, False)
    mover.run()
    now[0] += QUIET_S
    assert tier.find(key(2)) is not None
    assert tier.may_write
    assert tier.find(key(1)) is None


def test_a_folder_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"shared_folder = .*cannot be used"):
        SharedTier(tmp_path / "file", 1 << 20, lambda text: None)


class Pool:
    block_bytes = BYTES
    blocks_at_once = 8
    is_usable = True

    def __init__(self) -> None:
        self.blocks: dict[int, bytes] = {}

    def read(self, blocks: Sequence[int]) -> list[bytes]:
        return [self.blocks[block] for block in blocks]

    def write(self, blocks: Sequence[int], contents: Sequence[bytes]) -> int:
        self.blocks.update(zip(blocks, contents, strict=True))
        return len(blocks)


def test_two_tiers_read_their_parts_at_the_same_time(tmp_path):
    disk, disk_mover = disk_tier(tmp_path / "ssd")
    tier, mover = SharedTier(tmp_path / "shared", 1 << 20, print), ManualMover()
    tier.mover = mover  # type: ignore[assignment]
    tier.open(lambda: NAMESPACE)
    mover.run()
    chain, pool, ended = TierChain(disk, tier), Pool(), []
    pool.blocks = {number: content(number) for number in range(3)}
    disk.write(key(0), pool, 0, lambda: None)
    disk_mover.run()
    for number in (1, 2):
        tier.write(key(number), pool, number, lambda: None)
    mover.run()
    places = [chain.find(key(number)) for number in range(3)]
    assert [place.tier for place in places] == ["ssd", "shared", "shared"]
    assert chain.seconds_for(places) is None, "no bandwidth is known"
    places[2].segment.path.unlink()
    transfer = Transfer([key(number) for number in range(3)], places, [5, 6, 7], [])
    chain.read(transfer, pool, lambda: ended.append(1))
    mover.run()
    assert not ended
    assert not transfer.done
    disk_mover.run()
    assert (ended, transfer.done, transfer.oks) == ([1], True, [True, True, False])
    assert (pool.blocks[5], pool.blocks[6]) == (content(0), content(1))
    assert chain.seconds_for(places[:2]) > 0
    chain.write(key(2), pool, 2, lambda: ended.append(2))
    disk_mover.run()
    assert ended == [1]
    mover.run()
    assert ended == [1, 2]
    assert chain.find(key(2)).tier == "ssd"
    disk.close()
    tier.close()
