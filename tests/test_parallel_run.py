"""Tests of the processes among which the test files are divided (``support.parallel_run``), with a small test suite."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.small_configs import REPOSITORY
from support.time_limits import time_limit

CONFTEST = """
import os, time
from pathlib import Path
import pytest
from support.parallel_run import ParallelRun

FOLDER = Path(__file__).parent
with (FOLDER / "collected").open("a") as file:
    file.write(f"{os.getpid()} ")

def pytest_configure(config):
    config.pluginmanager.register(ParallelRun(2))

def note(text):
    with (FOLDER / "notes").open("a") as file:
        file.write(text + chr(10))

@pytest.fixture(scope="session", autouse=True)
def of_the_session():
    yield
    note("session ends")

@pytest.fixture(scope="module")
def of_the_file(request):
    note(f"{request.node.name} begins")
    yield os.getpid()
    note(f"{request.node.name} ends")

@pytest.fixture
def meet():
    def meet(own, other):
        (FOLDER / own).touch()
        until = time.monotonic() + 60
        while not (FOLDER / other).exists():
            assert time.monotonic() < until
            time.sleep(0.01)
    return meet
"""
FIRST = """
import os, signal, pytest

def test_with_the_second_file(of_the_file, meet, tmp_path_factory):
    assert of_the_file == os.getpid()
    meet("first", "second")
    assert tmp_path_factory.mktemp("same").name == "same0"

def test_that_fails(of_the_file):
    print("what the test prints")
    assert 1 == 2

def test_that_ends_its_process(of_the_file):
    os.kill(os.getpid(), signal.SIGKILL)

def test_after_the_end(of_the_file):
    pass
"""
SECOND = """
import warnings, pytest

def test_with_the_first_file(of_the_file, meet, tmp_path_factory):
    meet("second", "first")
    assert tmp_path_factory.mktemp("same").name == "same0"

def test_that_warns(of_the_file):
    warnings.warn("look here", UserWarning)

@pytest.mark.skip(reason="too late")
def test_that_is_skipped():
    pass
"""
LAST = """
def test_of_the_last_file(of_the_file):
    pass
"""


def run_suite(
    folder: Path, files: Sequence[str], *arguments: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    """Runs a test suite of these files. Returns its output, and the outcome of each test."""
    (folder / "conftest.py").write_text(CONFTEST)
    for number, text in enumerate(files):
        (folder / f"test_{number}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "-c", os.devnull, "--rootdir", folder]
    done = subprocess.run(
        [*command, "--basetemp", folder / "temporary", folder, *arguments], capture_output=True, text=True, check=False,
        timeout=time_limit(120), env={**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests'}"},
    )  # fmt: skip
    outcomes = re.findall(r"^(PASSED|FAILED|ERROR) \S*::(\w+)", done.stdout, re.MULTILINE)
    return done, {test: outcome for outcome, test in outcomes}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, str]]:
    """The folder of a suite of three files, what its run has printed, and the outcome of each test."""
    folder = tmp_path_factory.mktemp("suite")
    done, outcomes = run_suite(folder, [FIRST, SECOND, LAST])
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    return folder, done.stdout, outcomes


def test_every_test_runs_once_and_two_files_at_the_same_time(suite: tuple[Path, str, dict[str, str]]) -> None:
    """The first tests of two files wait for each other. Their temporary folders have the same name."""
    _, output, outcomes = suite
    assert outcomes == {
        "test_with_the_second_file": "PASSED",
        "test_that_fails": "FAILED",
        "test_that_ends_its_process": "FAILED",
        "test_after_the_end": "PASSED",
        "test_with_the_first_file": "PASSED",
        "test_that_warns": "PASSED",
        "test_of_the_last_file": "PASSED",
    }
    assert "2 failed, 5 passed, 1 skipped, " in output


def test_the_reports_have_all_that_a_test_has_left(suite: tuple[Path, str, dict[str, str]]) -> None:
    _, output, _ = suite
    assert "assert 1 == 2" in output
    assert "what the test prints" in output
    assert "the test process ended with exit code -9 during this test" in output
    assert "UserWarning: look here" in output
    assert "too late" in output


def test_the_tests_are_collected_once(suite: tuple[Path, str, dict[str, str]]) -> None:
    folder, _, _ = suite
    assert len((folder / "collected").read_text().split()) == 1


def test_fixtures_are_set_up_once_in_each_process_and_removed(suite: tuple[Path, str, dict[str, str]]) -> None:
    """The first file begins again in another process, after a test has ended the first one."""
    folder, _, _ = suite
    notes = (folder / "notes").read_text().splitlines()
    assert sorted(notes) == [
        *("session ends",) * 2,
        *("test_0.py begins",) * 2,
        "test_0.py ends",
        *("test_1.py begins", "test_1.py ends"),
        *("test_2.py begins", "test_2.py ends"),
    ]
    assert notes[-1] == "session ends"


def test_after_a_failure_with_x_the_other_process_removes_its_fixtures(tmp_path: Path) -> None:
    fails = "def test_that_fails(meet):\n    meet('a', 'b')\n    assert False\n"
    waits = "def test_that_waits(of_the_file, meet):\n    meet('b', 'a')\n"
    done, outcomes = run_suite(tmp_path, [fails, waits, LAST], "-x")
    assert outcomes["test_that_fails"] == "FAILED", done.stdout + done.stderr
    assert "stopping after 1 failures" in done.stdout
    notes = (tmp_path / "notes").read_text().splitlines()
    assert "test_1.py ends" in notes
    assert notes.count("session ends") == 2
