"""Tests log files on a disk that other programs change.

The tests cover permissions, rotation, renames, a full disk, and floods of lines.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from llm_serving.telemetry.log import EventLog
from llm_serving.telemetry.log_file import LogFile, LossReports, Rotation, dropped_lines, reopen_all
from llm_serving.telemetry.metrics import Metrics

LOSSES = LossReports(lambda lines: f"({lines} lost)\n".encode(), lambda text: None)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def events_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_new_file_belongs_to_the_user_alone(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        EventLog(tmp_path / "log").close()
    finally:
        os.umask(previous)
    assert mode_of(tmp_path / "log") == 0o600


@pytest.mark.parametrize(("before", "after"), [(0o644, 0o640), (0o640, 0o640), (0o666, 0o660), (0o600, 0o600)])
def test_others_lose_the_permissions_for_a_file_that_exists(tmp_path: Path, before: int, after: int) -> None:
    (tmp_path / "log").touch()
    (tmp_path / "log").chmod(before)
    EventLog(tmp_path / "log").close()
    assert mode_of(tmp_path / "log") == after


@pytest.mark.parametrize("is_replaced", [False, True])
def test_the_next_line_after_a_rename_goes_to_the_new_file(tmp_path: Path, is_replaced: bool) -> None:
    path = tmp_path / "log"
    with EventLog(path) as log:
        log.event("before")
        path.rename(tmp_path / "old")
        if is_replaced:
            path.touch(0o600)
        log.event("after")
    assert [line["event"] for line in events_of(tmp_path / "old")] == ["before"]
    assert [line["event"] for line in events_of(path)] == ["after"]
    assert mode_of(path) == 0o600


def test_a_deleted_folder_loses_nothing_until_the_file_is_closed(tmp_path: Path) -> None:
    """After its folder is deleted, a log file writes lines to the open file that no longer has a name.

    When a file can be created at the path again, lines go to the new file.
    """
    folder = tmp_path / "folder"
    file = LogFile(folder / "log", LOSSES)
    (folder / "log").unlink()
    folder.rmdir()
    file.write(b"nowhere\n")
    folder.mkdir()
    file.write(b"here\n")
    file.close()
    assert (folder / "log").read_bytes() == b"here\n"
    assert file.lost_lines == 0


def test_reopening_makes_the_file_at_once(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "log", LOSSES)
    (tmp_path / "log").rename(tmp_path / "old")
    reopen_all()
    assert (tmp_path / "log").exists()
    file.close()
    (tmp_path / "log").unlink()
    reopen_all()
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("keep_files", [0, 1, 3])
def test_rotation_by_size_keeps_the_last_files_in_order(tmp_path: Path, keep_files: int) -> None:
    path = tmp_path / "log"
    file = LogFile(path, LOSSES, Rotation(100, keep_files))
    for number in range(50):
        file.write(b"%09d\n" % number)
    file.close()
    files = sorted(tmp_path.iterdir(), key=lambda each: -int(each.suffix[1:] or 0))
    assert [each.name for each in files] == [*(f"log.{index}" for index in range(keep_files, 0, -1)), "log"]
    assert all(each.stat().st_size <= 100 for each in files)
    assert all(mode_of(each) == 0o600 for each in files)
    numbers = [int(line) for each in files for line in each.read_text().splitlines()]
    assert numbers == list(range(50 - len(numbers), 50))
    assert len(numbers) == 10 * (keep_files + 1)


def test_a_file_that_another_program_truncates_is_not_rotated(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = LogFile(path, LOSSES, Rotation(100))
    for _ in range(5):
        file.write(b"x" * 59 + b"\n")
        os.truncate(path, 0)
    file.close()
    assert [each.name for each in tmp_path.iterdir()] == ["log"]


def test_a_full_disk_loses_lines_and_counts_them(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.symlink_to("/dev/full")
    before = dropped_lines.counts()["lost"]
    with EventLog(path, mirror=False) as log:
        log.event("lost")
        log.event("lost")
        assert log.lost_lines == 2
        path.unlink()
        log.event("kept")
    assert dropped_lines.counts()["lost"] == before + 2
    assert [(line["event"], line.get("lines")) for line in events_of(path)] == [("log_lines_lost", 2), ("kept", None)]
    assert f'llm_serving_log_lines_dropped_total{{reason="lost"}} {before + 2}.0' in Metrics().exposition().decode()


def test_of_many_refusals_in_a_second_some_lines_are_written(tmp_path: Path) -> None:
    now = 100.0
    path, before = tmp_path / "log", dropped_lines.counts()["suppressed"]
    with EventLog(path, clock=lambda: now) as log:
        for _ in range(500):
            log.event("request_refused", code="queue_full", message="full")
        log.event("request_arrival")
        now = 101.5
        log.event("request_arrival")
        for _ in range(30):
            log.event("request_refused", code="queue_full", message="full")
    names = [(line["event"], line.get("of"), line.get("lines")) for line in events_of(path)]
    refused = ("request_refused", None, None)
    assert names == [
        *[refused] * 20,
        ("request_arrival", None, None),
        ("log_lines_suppressed", "request_refused", 480),
        ("request_arrival", None, None),
        *[refused] * 20,
        ("log_lines_suppressed", "request_refused", 10),
    ]
    assert dropped_lines.counts()["suppressed"] == before + 490
