"""Tests the ring of segments. It never exceeds its size, and deletes the oldest segment first."""

from __future__ import annotations

import os

from llm_serving.flight.format import FrameReader
from llm_serving.flight.ring import SegmentRing


def sizes(folder):
    return {path.name: path.stat().st_size for path in folder.glob("*")}


def test_segments_are_numbered_and_the_oldest_is_deleted(tmp_path):
    ring = SegmentRing(tmp_path, 8000, "run")
    assert ring.segment_bytes == 1000
    for index in range(20):
        ring.begin([], 1000)
        ring.append([bytes(880)])
        os.utime(tmp_path / f"run-{index:06d}.flight", ns=(index, index))
        assert sum(sizes(tmp_path).values()) <= 8000
    ring.close()
    assert sorted(sizes(tmp_path)) == [f"run-{index:06d}.flight" for index in range(12, 20)]


def test_a_large_segment_replaces_several(tmp_path):
    ring = SegmentRing(tmp_path, 8000, "run")
    for index in range(6):
        ring.begin([bytes(990)], 1000)
        os.utime(tmp_path / f"run-{index:06d}.flight", ns=(index, index))
    ring.begin([], 6000)
    ring.close()
    assert sorted(sizes(tmp_path)) == [f"run-{index:06d}.flight" for index in (4, 5, 6)]


def test_segments_of_earlier_runs_count_and_are_deleted_first(tmp_path):
    old = tmp_path / "earlier-000007.flight"
    old.write_bytes(bytes(7500))
    os.utime(old, ns=(1, 1))
    other = tmp_path / "server.log"
    other.write_bytes(bytes(100_000))
    ring = SegmentRing(tmp_path, 8000, "run")
    ring.begin([], 1000)
    ring.close()
    assert sorted(sizes(tmp_path)) == ["run-000000.flight", "server.log"]


def test_appended_records_are_readable_before_the_file_is_closed(tmp_path):
    ring = SegmentRing(tmp_path / "made", 8000, "run")
    ring.begin([], 1000)
    ring.append([[1, 2]])
    (file,) = (tmp_path / "made").iterdir()
    assert list(FrameReader(file.read_bytes(), file)) == [[[1, 2]]]
    assert file.stat().st_mode & 0o077 == 0
    ring.close()
    ring.close()
