"""Segments of shared memory: they are complete or absent, and nothing remains after the end."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from llm_serving.ipc.segment import SHM_DIRECTORY, NamedSegment, map_segment, new_segment
from support.executor_steps import shm_entries


def test_a_new_segment_has_reserved_pages_and_private_permissions() -> None:
    with new_segment(3 * mmap.PAGESIZE) as (name, mapping):
        status = os.stat(Path(SHM_DIRECTORY, name))
    assert status.st_mode & 0o777 == 0o600
    assert status.st_blocks * 512 >= 3 * mmap.PAGESIZE
    mapping[5] = 7
    assert map_segment(name, 3 * mmap.PAGESIZE, "some")[5] == 7
    os.unlink(Path(SHM_DIRECTORY, name))


def test_an_exception_removes_the_new_segment() -> None:
    before = shm_entries()

    def fail() -> None:
        with new_segment(100):
            assert len(shm_entries() - before) == 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
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
