"""Tests the log of a process: its text is escaped, its permissions are private, and it never disturbs the process."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

from llm_serving.executor.process_log import ProcessLog
from llm_serving.telemetry.log_file import Rotation
from support.recorded import RecordProperty


def run(path: Path, program: str, rotation: Rotation | None = None) -> ProcessLog:
    log = ProcessLog(path, rotation)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=log.descriptor, stderr=log.descriptor)
    log.process_started()
    assert process.wait() == 0
    log.close()
    return log


def test_control_characters_are_escaped_and_lines_stay(tmp_path: Path, record_property: RecordProperty) -> None:
    text = "a\x1b[31mred\x07\u2028\u202e\x00 \tb\nc\r\nd\x9b"
    program = f"import sys; sys.stdout.buffer.write({text.encode()!r} + bytes([255, 10]) + b'last')"
    log = run(tmp_path / "agent.log", program)
    written = (tmp_path / "agent.log").read_text()
    record_property("forged_lines", f"{len(written.splitlines()) - 4} of 1")  # the program writes four lines
    assert written == "a\\x1b[31mred\\x07\\u2028\\u202e\\x00 \tb\nc\nd\\x9b\\xff\nlast\n"
    assert log.tail().endswith("last")
    assert stat.S_IMODE((tmp_path / "agent.log").stat().st_mode) == 0o600


def test_a_line_without_end_is_cut_into_pieces(tmp_path: Path) -> None:
    run(tmp_path / "agent.log", "import sys; sys.stdout.write('x' * 300_000)")
    assert (tmp_path / "agent.log").read_text().replace("\n", "") == "x" * 300_000


def test_a_full_disk_does_not_disturb_the_process(tmp_path: Path) -> None:
    (tmp_path / "agent.log").symlink_to("/dev/full")
    log = run(tmp_path / "agent.log", "print('much text ' * 300_000); print('end')")
    assert log.tail().endswith("end")


def test_the_log_is_rotated(tmp_path: Path) -> None:
    run(tmp_path / "agent.log", "for n in range(20): print(n, flush=True)", Rotation(20, keep_files=2))
    files = [tmp_path / name for name in ("agent.log.2", "agent.log.1", "agent.log")]
    lines = "".join(each.read_text() for each in files if each.exists()).split()
    assert lines == [str(number) for number in range(20 - len(lines), 20)]
