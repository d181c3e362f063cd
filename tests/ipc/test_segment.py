"""Tests segments of shared memory. A segment is either complete or absent, and none remains after the end."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import subprocess
from pathlib import Path

import pytest

from llm_serving.ipc.segment import SHM_DIRECTORY, NamedSegment, map_segment, new_segment, remove_leftovers
from support.executor_steps import shm_entries
from support.recorded import RecordProperty


def test_a_new_segment_has_reserved_pages_and_private_permissions() -> None:
    with new_segment(3 * mmap.PAGESIZE) as (name, mapping):
        status = os.stat(Path(SHM_DIRECTORY, name))
    assert status.st_mode & 0o777 == 0o600
    assert status.st_blocks * 512 >= 3 * mmap.PAGESIZE
    mapping[5] = 7
    assert map_segment(name, 3 * mmap.PAGESIZE, "some")[5] == 7
    os.unlink(Path(SHM_DIRECTORY, name))


def test_an_exception_removes_the_new_segment(record_property: RecordProperty) -> None:
    before = shm_entries()

    def fail() -> None:
        with new_segment(100):
            assert len(shm_entries() - before) == 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    record_property("names_left", f"{len(shm_entries() - before)} of 1")
    assert shm_entries() == before


def test_only_the_creator_removes_the_name_and_only_once() -> None:
    before = shm_entries()
    with new_segment(100) as (name, _):
        made, attached = NamedSegment(name), NamedSegment(name)
    made.has_name = True
    attached.unlink()
    assert shm_entries() - before == {name}
    made.unlink()
    assert shm_entries() == before
    made.unlink()


def leftover(owner: int) -> Path:
    path = Path(SHM_DIRECTORY, f"llm-serving-{owner}x{secrets.token_hex(8)}")
    path.write_bytes(b"0")
    return path


def an_ended_process() -> int:
    with subprocess.Popen(["true"]) as process:
        return process.pid


def test_segments_of_ended_processes_are_removed() -> None:
    left = leftover(an_ended_process())
    assert left.name in remove_leftovers()
    assert not left.exists()


def test_segments_that_a_process_owns_stay() -> None:
    """A process keeps its own segments, the segments of a living process, and those that another container has locked.
    """
    living, foreign = leftover(1), leftover(an_ended_process())
    with foreign.open("rb") as locked, new_segment(100) as (name, _):
        fcntl.flock(locked, fcntl.LOCK_SH)
        own, elsewhere = Path(SHM_DIRECTORY, name), leftover(an_ended_process())
        # The name now has the process id of an ended process, as a segment of another container may have.
        own.rename(elsewhere)
        assert not {living.name, foreign.name, elsewhere.name} & set(remove_leftovers())
        assert living.exists()
        assert foreign.exists()
        assert elsewhere.exists()
    for path in (living, foreign, elsewhere):
        path.unlink()


def test_other_files_stay() -> None:
    names = ("llm-serving-notes", f"llm-serving-{an_ended_process()}x..", "x1x2")
    others = [Path(SHM_DIRECTORY, name) for name in names]
    for path in others:
        path.write_bytes(b"0")
    folder = Path(SHM_DIRECTORY, f"llm-serving-{an_ended_process()}x00")
    folder.mkdir()
    try:
        assert not {path.name for path in (*others, folder)} & set(remove_leftovers())
        assert all(path.exists() for path in (*others, folder))
    finally:
        for path in others:
            path.unlink()
        folder.rmdir()
