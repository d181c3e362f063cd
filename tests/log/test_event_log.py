"""Tests the lines that EventLog writes. No event and no failure of the disk may stop the server."""

import contextlib
import enum
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from llm_serving.errors import ConfigError
from llm_serving.telemetry.log import EventLog, encode_line, readable
from support.recorded import RecordProperty


class Colour(enum.Enum):
    RED = "red"


class Silent:
    def __str__(self) -> str:
        raise RuntimeError("no text")


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_writes_time_level_event_then_the_fields_in_order(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "folder" / "server.log"
    with EventLog(path, clock=lambda: 12.5) as log:
        log.event("request_arrival", request_id="r1", prompt_tokens=3, stream=True, tpot_ms=None)
    assert path.read_bytes() == (
        b'{"time":12.5,"level":"info","event":"request_arrival","request_id":"r1","prompt_tokens":3,'
        b'"stream":true,"tpot_ms":null}\n'
    )


def test_messages_have_their_level_as_event_unless_one_is_named(tmp_path: Path) -> None:
    with EventLog(tmp_path / "log", "debug", mirror=False) as log:
        log.debug("a")
        log.info("b")
        log.warning("c", event="agent_lost", agent=0)
        log.error("d")
    assert [(line["level"], line["event"], line["message"]) for line in lines_of(tmp_path / "log")] == [
        ("debug", "debug", "a"),
        ("info", "info", "b"),
        ("warning", "agent_lost", "c"),
        ("error", "error", "d"),
    ]


def test_events_below_the_level_are_left_out(tmp_path: Path) -> None:
    with EventLog(tmp_path / "log", "warning", mirror=False) as log:
        log.event("request_arrival")
        log.info("a")
        log.warning("b")
    assert [line["event"] for line in lines_of(tmp_path / "log")] == ["warning"]


@pytest.mark.parametrize("text", ["a\nb", "a\r\nb", "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029", "\x00", "\ud800x", "é漢😀"])
def test_no_text_makes_a_second_line(tmp_path: Path, text: str, record_property: RecordProperty) -> None:
    with EventLog(tmp_path / "log") as log:
        log.event("e", text=text, **{text: [text]})
    content = (tmp_path / "log").read_bytes().decode()
    if text.splitlines() != [text]:  # another text cannot forge a line
        record_property("forged_lines", f"{len(content.splitlines()) - 1} of 1")
    assert len(content.splitlines()) == 1
    expected = text.replace("\ud800", "\\ud800")
    assert json.loads(content)["text"] == expected


def test_values_json_does_not_know_are_written_in_some_form(tmp_path: Path) -> None:
    cycle: list = []
    cycle.append(cycle)
    with EventLog(tmp_path / "log") as log:
        log.event(
            "e",
            path=Path("/x"),
            error=ValueError("bad"),
            number=np.float32(0.5),
            integer=np.int64(3),
            colour=Colour.RED,
            nothing=float("nan"),
            big=2**70,
        )
        log.event("cycle", value=cycle)
        log.event("silent", value=Silent())
    first, second, third = lines_of(tmp_path / "log")
    assert first["path"] == "/x"
    assert first["error"] == "ValueError: bad"
    assert (first["number"], first["integer"], first["colour"]) == (0.5, 3, "red")
    assert (first["nothing"], first["big"]) == (None, 2**70)
    assert second["event"] == "cycle"
    assert third["value"] == "<Silent: str() failed with RuntimeError>"


def test_fields_cannot_replace_time_level_and_event(tmp_path: Path) -> None:
    with EventLog(tmp_path / "log", clock=lambda: 1.0) as log:
        log.event("e", time=5, event="other")
    assert lines_of(tmp_path / "log") == [{"time": 1.0, "level": "info", "event": "e", "time_": 5, "event_": "other"}]


def test_a_long_field_is_cut_and_marked(tmp_path: Path) -> None:
    with EventLog(tmp_path / "log", max_line_bytes=8192) as log:
        log.event("e", request_id="r1", text="x" * 10_000, short="kept", items=list(range(5000)))
    (line,) = lines_of(tmp_path / "log")
    assert line["text"] == "x" * 256 + "... [9744 more characters]"
    assert line["short"] == "kept"
    assert line["items"].startswith("[0, 1, 2")
    assert line["line_bytes_before_cut"] > 30_000
    assert (tmp_path / "log").stat().st_size < 2000


@pytest.mark.parametrize("character", ["x", "\x00", "😀", "\ud800", '"'])
def test_a_line_never_passes_its_cap(character: str) -> None:
    fields = {f"field_{number}": character * 1000 for number in range(1000)}
    line = encode_line({"time": 1.0, "level": "info", "event": character * 9999, "message": "m", **fields}, 8192)
    assert len(line) <= 8192
    assert json.loads(line)["message"] == "m"


def test_threads_and_processes_share_a_file_without_mixing_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with EventLog(path) as one, EventLog(path) as other:

        def write(log: EventLog, name: str) -> None:
            for number in range(200):
                log.event(name, number=number, padding="x" * 300)

        threads = [threading.Thread(target=write, args=(log, f"{i}")) for i, log in enumerate((one, one, other, other))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = lines_of(path)
    for name in "0123":
        assert [line["number"] for line in lines if line["event"] == name] == list(range(200))


def test_a_full_disk_is_said_once_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    with EventLog("/dev/full") as log:
        for number in range(5):
            log.event("e", number=number)
        assert log.lost_lines == 5
    complaint = capsys.readouterr().err
    assert complaint == "cannot write the log /dev/full: No space left on device; 1 line(s) lost so far\n"


def test_lost_lines_are_reported_when_the_disk_has_space_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real_write = os.write
    room = [10, 0, None]

    def write(descriptor: int, data: bytes) -> int:
        allowed = room.pop(0) if room else None
        if allowed is None:
            return real_write(descriptor, data)
        if allowed == 0:
            raise OSError(28, "No space left on device")
        return real_write(descriptor, data[:allowed])

    log = EventLog(tmp_path / "log", clock=lambda: 1.0)
    monkeypatch.setattr(os, "write", write)
    log.event("first")
    log.event("second")
    log.event("third")
    log.close()
    torn, notice, second, third = (tmp_path / "log").read_bytes().splitlines()
    assert torn == b'{"time":1.'
    assert json.loads(notice) == {"time": 1.0, "level": "warning", "event": "log_lines_lost", "lines": 1}
    assert (json.loads(second)["event"], json.loads(third)["event"]) == ("second", "third")


def test_a_line_torn_by_a_crash_is_ended_first(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'{"time": 1.0, "ev')
    with EventLog(path) as log:
        log.event("server_start")
    torn, line = path.read_bytes().splitlines()
    assert torn == b'{"time": 1.0, "ev'
    assert json.loads(line)["event"] == "server_start"


def test_warnings_and_errors_go_to_standard_error_in_readable_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with EventLog(tmp_path / "log", clock=lambda: 0.0) as log:
        log.event("request_arrival")
        log.info("quiet")
        log.error("agent 0 died", event="agent_lost", code=-9, traceback="Traceback:\n  line")
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.endswith("ERROR agent_lost: agent 0 died (code=-9)")
    assert rest == ["    Traceback:", "      line"]


def test_readable_obeys_no_control_characters() -> None:
    text = readable({"time": 0.0, "level": "error", "event": "e", "message": "\x1b[31mred\x07"})
    assert text.endswith("ERROR e: \\x1b[31mred\\x07")


def test_each_line_of_a_message_after_its_first_is_indented(record_property: RecordProperty) -> None:
    """A line without a time stamp cannot look like another message."""
    message = "a\nERROR b\r\nERROR c\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029ERROR d"
    text = readable({"time": 0.0, "level": "error", "event": "e", "message": message})
    forged = [line for line in text.splitlines()[1:] if not line.startswith("    ")]
    record_property("forged_lines", f"{len(forged)} of 1")
    assert forged == []


def test_closed_standard_error_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    EventLog(None).error("nobody hears this")


def test_a_full_pipe_does_not_stop_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(write_end, b"x" * 4096):
            pass
    os.set_blocking(write_end, True)
    with os.fdopen(write_end, "w") as full, os.fdopen(read_end, "rb"):
        monkeypatch.setattr(sys, "stderr", full)
        EventLog(None).error("nobody reads this")  # does nothing and returns


def test_a_long_message_is_cut_in_its_middle(capsys: pytest.CaptureFixture[str]) -> None:
    EventLog(None).error("first " + "漢" * 5000 + " last")
    said = capsys.readouterr().err
    assert len(said.encode()) < 4096
    assert ": first 漢" in said
    assert said.endswith("漢 last\n")
    assert "... more in the log ..." in said


@pytest.mark.parametrize("level", ["info", "error"])
def test_standard_error_shows_the_end_of_an_error_once(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    with EventLog(None, level) as log:
        log.event("agent_ready", summary={"a": 1}, replica=0)
        assert capsys.readouterr().err == ""
        log.error("it died", event="agent_lost", replica=1)
        capsys.readouterr()
        log.event("agent_ready", summary={"a": 1}, replica=0)
        assert capsys.readouterr().err == "", "another replica was lost"
        log.event("agent_ready", summary={"a": 1}, replica=1)
        log.event("agent_ready", summary={"a": 1}, replica=1)
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(" INFO agent_ready: An agent has loaded, compiled and warmed up. (replica=1)")


def test_after_an_error_events_may_have_values_without_a_hash(capsys: pytest.CaptureFixture[str]) -> None:
    with EventLog(None) as log:
        log.error("it died", event="agent_lost", replica=[0], model={"a": 1})
        log.event("model_loaded", model={"a": 1})
        assert len(capsys.readouterr().err.splitlines()) == 1
        log.event("agent_ready", replica=[0], model={"a": 1})
    assert "agent_ready" in capsys.readouterr().err


def test_without_a_path_only_standard_error_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    with EventLog(None) as log:
        log.event("e")
        log.warning("w")
        assert log.lost_lines == 0
    assert capsys.readouterr().err.endswith("WARNING warning: w\n")


def test_events_after_close_are_counted_as_lost(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "log")
    log.close()
    log.close()
    log.event("e")
    assert log.lost_lines == 1


def test_a_path_that_cannot_be_opened_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"log_config\.path: cannot open .*: Is a directory"):
        EventLog(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"log_config\.path: cannot open '.*file/x\.log'"):
        EventLog(tmp_path / "file" / "x.log")


def test_an_unknown_level_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"log_config\.level: 'loud' is not one of debug, info, warning, error"):
        EventLog(None, "loud")


def test_the_descriptor_is_not_inherited(tmp_path: Path) -> None:
    with EventLog(tmp_path / "log"):
        count = subprocess.run(
            [sys.executable, "-c", "import os; print([os.readlink(f'/proc/self/fd/{d}') for d in range(20) "
             "if os.path.exists(f'/proc/self/fd/{d}')])"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    assert str(tmp_path) not in count.stdout
