"""Tests how the progress of the start is shown, on a terminal and in a file."""

from __future__ import annotations

import io
import itertools
import re

from llm_serving.telemetry.progress import ProgressDisplay
from support.small_configs import REPOSITORY

ERASE_LINE = "\x1b[2K"
COLOURS = re.compile(r"\x1b\[[?0-9]*[a-zA-Z]|\r")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines_of(stream: io.StringIO) -> list[str]:
    """Returns the written lines, with each time replaced by the letter S."""
    return [re.sub(r" +\d+\.\d\d s", " S", line).strip() for line in stream.getvalue().splitlines()]


def test_one_agents_stages() -> None:
    stream = io.StringIO()
    display = ProgressDisplay(stream)
    display.note("hello")
    for stage, done in (("load", 1), ("load", 2), ("compile", 1)):
        display.update(0, stage, done, 2)
    display.note("ready")
    display.close()
    display.note("too late")
    assert lines_of(stream) == ["hello", "agent 0: load S", "agent 0: compile S", "ready"]


def test_a_stage_of_several_agents_is_one_line() -> None:
    """The line appears when the last agent has completed the stage, with the time of the slowest agent."""
    stream = io.StringIO()
    display = ProgressDisplay(stream, num_agents=3, clock=itertools.count().__next__)
    for rank in (2, 0, 1, 0):
        display.update(rank, "load", 1, 2)
    display.update(1, "compile", 0, 1)
    display.update(1, "warm up", 0, 1)
    display.update(0, "compile", 0, 1)
    assert lines_of(stream) == []
    display.update(2, "compile", 0, 1)
    assert lines_of(stream) == ["3 agents: load S  (agent 2)"], "agent 2 began first"
    display.update(0, "warm up", 0, 1)
    display.note("stopping")
    assert lines_of(stream)[1:] == [
        "3 agents: compile S  (agent 0)",
        "2 agents: warm up S  (agent 1)",
        "stopping",
    ]


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_long_stage_is_shown_again() -> None:
    """A stage without news is never silent for more than five seconds if ``beat`` is called each second."""
    stream, clock = io.StringIO(), Clock()
    display = ProgressDisplay(stream, clock=clock)
    display.note("hello")
    written = [0.0]
    for second in range(1, 25):
        clock.now = float(second)
        if second == 9:
            display.update(0, "compile", 0, 3)
        before = len(stream.getvalue())
        display.beat()
        if len(stream.getvalue()) > before:
            written.append(clock.now)
    assert max(later - earlier for earlier, later in itertools.pairwise(written)) < 5.0
    lines = [line.split() for line in stream.getvalue().splitlines()]
    assert lines[1] == ["starting", "the", "agents", "4", "s", "so", "far"]
    assert lines[-1][:3] == ["agent", "0:", "compile"]
    text = stream.getvalue()
    display.close()
    clock.now = 100.0
    display.beat()
    assert "so far" not in stream.getvalue().removeprefix(text)


def test_short_stages_are_not_shown_again() -> None:
    stream, clock = io.StringIO(), Clock()
    display = ProgressDisplay(stream, clock=clock)
    for second in range(12):
        clock.now = float(second)
        display.note(f"note {second}")
        display.beat()
    assert "so far" not in stream.getvalue()


def test_each_slow_command_of_the_makefile_shows_its_progress() -> None:
    """Commands that install, compile or create an environment run under ``tools/show_progress.py``."""
    slow = re.compile(r"-m venv|\$\((INSTALL|LOCKED)\)|setup\.py --quiet|pip wheel")
    makefile = (REPOSITORY / "Makefile").read_text()
    others = ("INSTALL", "LOCKED", "help")
    lines = [line for line in makefile.splitlines() if slow.search(line) and not line.startswith(others)]
    assert len(lines) > 8
    assert [line for line in lines if "$(PATIENT)" not in line and "tools/show_progress.py" not in line] == []
    starts = [line for line in makefile.splitlines() if "tools/show_progress.py" in line]
    assert len(starts) == 3
    assert [line for line in starts if "exec" not in line] == [], "the shell would take the SIGTERM of make"


def test_a_bar_on_a_terminal_is_erased_when_its_stage_ends() -> None:
    stream = Terminal()
    display = ProgressDisplay(stream, num_agents=2)
    display.update(0, "load", 0, 4)
    display.update(1, "load", 4, 4)
    display.update(0, "load", 4, 4)
    display.note("ready")
    *bars, ended = stream.getvalue().split(ERASE_LINE)
    shown = [COLOURS.sub("", bar).split() for bar in bars if "/4" in bar]
    assert {tuple(bar[:3]) for bar in shown} == {("agent", "0:", "load")}, "agent 1 was faster"
    assert (shown[0][-1], shown[-1][-1]) == ("0/4", "4/4")
    assert re.fullmatch(r"  2 agents: load +0\.\d\d s  \(agent [01]\)\nready\n", ended)
