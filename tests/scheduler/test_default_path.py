"""Tests that ``Scheduler.schedule`` runs no code of optional features with the default settings.

A reader of ``schedule`` needs the files of ``PACKAGES`` whose functions it calls, with the prefix cache on, and the
files of their base classes. Their number and their lines are limited. All lines of a file count: code, comments and
blank lines. Files of other packages do not count, for example those of ``kvcache``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import pytest

from llm_serving.scheduler.output import ScheduledStep
from support.fakes import make_limits, make_request
from support.simulation import Simulation
from support.small_configs import REPOSITORY

PACKAGE = REPOSITORY / "llm_serving"

PACKAGES = ("admission", "block_moves", "block_supply", "policies", "scheduler", "step_costs", "waiting")
BASES = {"block_supply/base.py", "policies/base.py"}
"""Files of base classes, which a reader needs although ``schedule`` only calls the methods of their subclasses."""
MAX_FILES = 18
MAX_LINES = 2600


def files_of_schedule(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Runs all requests to their ends.

    Returns the files of ``PACKAGES`` whose code runs in ``schedule``.
    """
    files: set[str] = set()
    schedule = simulation.scheduler.schedule

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.parent.name in PACKAGES and path.is_relative_to(PACKAGE):
            files.add(f"{path.parent.name}/{path.name}")

    def traced(now: float) -> ScheduledStep | None:
        sys.setprofile(note)
        try:
            return schedule(now)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(simulation.scheduler, "schedule", traced)
    simulation.finish()
    return files


def documented_files() -> set[str]:
    """Returns the files that docs/architecture.md names for the default path."""
    text = (REPOSITORY / "docs/architecture.md").read_text()
    section = text.partition("**The default path.**")[2].partition("\n\n")[0]
    return {name if "/" in name else f"scheduler/{name}" for name in re.findall(r"`([\w/]+\.py)`", section)}


def test_the_default_path_has_only_the_documented_files(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(make_limits(num_blocks=24, prefix_cache=True))
    simulation.add(*(make_request(f"request {number}", 9 + number, max_tokens=20) for number in range(8)))
    assert files_of_schedule(simulation, monkeypatch) | BASES == documented_files()
    assert simulation.scheduler.num_preemptions > 0


def test_the_default_path_stays_short() -> None:
    lines = {name: (PACKAGE / name).read_text().count("\n") for name in documented_files()}
    assert len(lines) <= MAX_FILES
    assert sum(lines.values()) <= MAX_LINES, f"move code of an optional feature to another file, or simplify: {lines}"
