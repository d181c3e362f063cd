"""Tests the line that shows that a long command still runs."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from support.time_limits import time_limit
from tools.show_progress import run

PROGRAM = Path(__file__).resolve().parents[2] / "tools" / "show_progress.py"


def test_lines_have_the_title_and_the_last_line_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    code = "import time\nprint('first'); print('second')\ntime.sleep(0.5)"
    assert run("compiling", [sys.executable, "-c", code], 0.01) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "compiling"
    assert any(line.startswith("compiling: ") and line.endswith("second") for line in lines)
    assert lines[-1].startswith("compiling: done after ")


def test_a_failed_command_shows_all_its_output_and_its_code() -> None:
    code = "import sys\nprint('the reason'); print('more', file=sys.stderr); sys.exit(7)"
    process = subprocess.run(
        [sys.executable, str(PROGRAM), "installing", sys.executable, "-c", code], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert process.returncode == 7
    assert process.stderr.split("\n")[1:3] == ["the reason", "more"]
    assert "installing: failed after" in process.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_tool_and_its_command(tmp_path: Path, number: signal.Signals) -> None:
    """The command holds a pipe open. The pipe's end shows that the command has ended."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    code = f"""import os, time
pipe = open({str(fifo)!r}, "w")
print(os.getpid(), file=pipe, flush=True)
time.sleep(600)"""
    command = [sys.executable, str(PROGRAM), "installing", sys.executable, "-c", code]
    outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **outputs) as tool, fifo.open() as pipe:
        child = int(pipe.readline())
        try:
            tool.send_signal(number)
            assert select.select([pipe], [], [], time_limit(30))[0], "the command goes on"
            out, err = tool.communicate(timeout=time_limit(30))
        finally:
            tool.kill()
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
    assert tool.returncode == 128 + number
    assert (out, err) == ("installing\n", "")
