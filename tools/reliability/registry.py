"""Defines a check, which measures one number (its figure) and compares it with a limit. Runs checks.

Most checks run tests of this project (``Verdict``). Their figure is a number that the tests record, or the number of
tests that fail. All tests of the chosen checks run in one pytest process, so that they share their servers.

Other checks run a program that prints its figures as JSON lines (``Program``), or a function that searches the source
code (``Scan``).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
END_S = 45.0
"""Maximum seconds in which a program ends its own processes after SIGTERM. ``tests/support/long_program.py`` needs 40 s
at most.
"""


@dataclass(frozen=True)
class Outcome:
    """The result of a check. If the check did not pass, ``reason`` states the cause.

    If the figure is a count, ``total`` is the number of things that were counted: 2 of 412 bodies got a wrong status.
    """

    passed: bool
    figure: float | None
    reason: str = ""
    total: int = 0


@dataclass(frozen=True)
class Result:
    """The result of one test. ``problem`` is empty if the test passed.

    ``recorded`` has the values that the test recorded with pytest's fixture ``record_property``, by their names.
    """

    problem: str = ""
    recorded: dict[str, tuple[str, ...]] = field(default_factory=dict)


Results = dict[str, dict[str, Result]]
"""For each place, the result of each of its tests by the name of the test."""


@dataclass(frozen=True)
class Verdict:
    """A check that runs tests. Each of the ``places`` is a test file or a single test, in the form in which pytest
    names it.

    ``figure`` is the name of a value that the tests record with pytest's fixture ``record_property``. The value is a
    number, for example ``3.5``, or a count and its total, for example ``"2 of 412"``. The check's figure is the largest
    number, or the sum of the counts. It must be at most ``limit``. If ``figure`` is empty, the check's figure is the
    number of tests that did not pass.

    The check has no figure and does not pass if a value has another form, if a count is below 0, or if its tests
    recorded both numbers and counts.
    """

    places: tuple[str, ...]
    figure: str = ""
    limit: float = 0.0

    def outcome(self, results: Results) -> Outcome:
        """Returns the outcome of the tests. The check passes only if all tests passed.

        If no test of a place ran, the place counts as one failed test.
        """
        tests = {name: result for place in self.places for name, result in results.get(place, {}).items()}
        problems = [f"{place}: no test ran" for place in self.places if not results.get(place)]
        problems += [f"{name}: {result.problem}" for name, result in tests.items() if result.problem]
        if not self.figure:
            return Outcome(not problems, len(problems), "; ".join(problems)[:500], len(tests))
        texts = [text for result in tests.values() for text in result.recorded.get(self.figure, ())]
        reason = "; ".join(problems)[:500]
        try:
            values = [_recorded(text) for text in texts]
            return self._judge(values, reason)
        except ValueError as error:
            return Outcome(False, None, "; ".join(filter(None, (reason, f"{self.figure}: {error}"))))

    def _judge(self, values: list[tuple[float, int | None]], reason: str) -> Outcome:
        """Returns the outcome for the recorded ``values``, which are numbers, each with its total if it is a count.

        Raises ValueError if some are numbers and others are counts. ``reason`` states why a test failed, or is empty.
        """
        numbers, totals = [number for number, _ in values], [total for _, total in values if total is not None]
        if totals and len(totals) < len(numbers):
            raise ValueError(f"{len(totals)} of {len(numbers)} values are counts, and the others are numbers")
        if not numbers or (totals and not sum(totals)):
            return Outcome(False, None, "; ".join(filter(None, (reason, f"no test measured {self.figure}"))))
        figure = sum(numbers) if totals else max(numbers)
        return Outcome(not reason and figure <= self.limit, figure, reason, sum(totals))


def _recorded(text: str) -> tuple[float, int | None]:
    """Returns a recorded number, and its total if it is a count: (3.5, None) for ``3.5``, (2, 412) for ``2 of 412``.

    Raises ValueError if the text is no number, or if the count or its total is not a whole number of at least 0.
    """
    count = re.fullmatch(r"([0-9]+) of ([0-9]+)", text)
    if count:
        return int(count[1]), int(count[2])
    with contextlib.suppress(ValueError):
        number = float(text)
        if math.isfinite(number):
            return number, None
    raise ValueError(f"a test recorded {text[:80]!r}, which is neither a number nor a count like '2 of 412'")


@dataclass(frozen=True)
class Program:
    """A check that runs a program of this project. The program prints JSON lines, or writes one JSON object to a file.

    ``file_option`` is the program's option for the name of this file, or empty. ``figure`` is the key of the measured
    number in the JSON. If several objects have this key, the worst value counts. The number must be at most ``limit``,
    or at least ``limit`` if ``is_minimum``.

    ``has_other_goals`` is True if the program also has goals of other checks. It then exits with 1 if one of them is
    missed, so this exit code does not count.
    """

    arguments: tuple[str, ...]
    figure: str
    limit: float
    timeout_s: float = 900.0
    file_option: str = ""
    is_minimum: bool = False
    has_other_goals: bool = False

    def outcome(self, runs: Runs | None = None) -> Outcome:
        """Returns the outcome of the program. The check passes if the program exits with 0 and the figure is within the
        limit. ``runs`` are the runs of other checks, one of which may be a run of the same program.
        """
        run = (runs or Runs()).of(self)
        if run is None:
            return Outcome(False, None, f"did not end within {self.timeout_s:g} s")
        return self._judge(run.done, [line[self.figure] for line in run.lines if line.get(self.figure) is not None])

    def run(self) -> Run | None:
        """Runs the program. Returns None if it does not end in time."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "figures.json"
            options = (self.file_option, str(file)) if self.file_option else ()
            command = [sys.executable, *self.arguments, *options]
            try:
                done = _run_program(command, self.timeout_s)
            except subprocess.TimeoutExpired:
                return None
            return Run(done, [json.loads(file.read_text())] if file.exists() else list(_json_lines(done.stdout)))

    def _judge(self, done: subprocess.CompletedProcess[str], figures: list[float]) -> Outcome:
        if not figures:
            return Outcome(False, None, f"exit code {done.returncode}, no figure; {done.stderr.strip()[-300:]}")
        last = (done.stderr.strip() or done.stdout.strip())[-300:]
        figure = min(figures) if self.is_minimum else max(figures)
        good = (0, 1) if self.has_other_goals else (0,)
        reason = "" if done.returncode in good else f"exit code {done.returncode}; {last}"
        is_kept = figure >= self.limit if self.is_minimum else figure <= self.limit
        return Outcome(not reason and is_kept, figure, reason)


@dataclass(frozen=True)
class Run:
    """A program that has ended, and the JSON objects that it has printed or written."""

    done: subprocess.CompletedProcess[str]
    lines: Sequence[dict[str, float | None]]


class Runs:
    """The runs of programs. A program whose figures several checks use runs once."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, ...], Run | None] = {}

    def of(self, program: Program) -> Run | None:
        """Returns the run of a program. Runs it if it has not run with these arguments yet."""
        key = (*program.arguments, program.file_option)
        if key not in self._runs:
            self._runs[key] = program.run()
        return self._runs[key]


def _run_program(command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Runs a program. Raises TimeoutExpired after ``timeout_s``. The program then gets SIGTERM, so that it ends its
    servers.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=REPOSITORY, env=_environment(), stdout=pipe, stderr=pipe, text=True) as program:
        try:
            output, errors = program.communicate(timeout=timeout_s)
        except BaseException:
            program.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.communicate(timeout=END_S)
            program.kill()
            raise
    return subprocess.CompletedProcess(command, program.returncode, output, errors)


@dataclass(frozen=True)
class Scan:
    """A check that runs ``find`` on the source code. The check's figure is the number of findings of ``find``."""

    find: Callable[[], Iterable[str]]

    def outcome(self) -> Outcome:
        findings = list(self.find())
        return Outcome(not findings, len(findings), "; ".join(findings)[:500])


@dataclass(frozen=True)
class Both:
    """A check that runs tests and a program. The figure is that of the program."""

    verdict: Verdict
    program: Program

    def outcome(self, results: Results, runs: Runs | None = None) -> Outcome:
        """Returns the outcome of the program. The check passes only if the tests pass, too."""
        tested, measured = self.verdict.outcome(results), self.program.outcome(runs)
        reason = "; ".join(filter(None, (tested.reason, measured.reason)))
        return Outcome(tested.passed and measured.passed, measured.figure, reason)


@dataclass(frozen=True)
class Check:
    """One of the sixty checks. ``promise`` is a sentence with the property that is checked.

    A check measures one number, its figure. ``unit`` is the unit of this number. ``{total}`` in the unit stands for the
    total of a count.
    """

    id: str
    promise: str
    how: Verdict | Program | Both | Scan
    unit: str = "of {total} tests failed"

    @property
    def limit(self) -> float:
        """The limit of the figure. 0 for the number of findings."""
        how = self._judged
        return 0.0 if isinstance(how, Scan) else how.limit

    @property
    def comparison(self) -> str:
        """``<=`` if the figure must be at most the limit, ``>=`` if it must be at least the limit."""
        how = self._judged
        return ">=" if isinstance(how, Program) and how.is_minimum else "<="

    @property
    def _judged(self) -> Verdict | Program | Scan:
        """The part of the check that measures the figure."""
        return self.how.program if isinstance(self.how, Both) else self.how

    def unit_of(self, outcome: Outcome) -> str:
        """Returns the unit of the figure of an outcome."""
        return self.unit.format(total=f"{outcome.total:,}")

    def line(self, outcome: Outcome) -> dict[str, object]:
        """Returns the fields of the check's JSON line."""
        fields = {
            "id": self.id,
            "pass": outcome.passed,
            "figure": outcome.figure,
            "unit": self.unit_of(outcome),
            "limit": self.limit,
            "comparison": self.comparison,
        }
        return {**fields, "reason": outcome.reason} if outcome.reason else fields


def tests(*places: str, figure: str = "", limit: float = 0.0) -> Verdict:  # noqa: PT028 - this is not a test
    """Returns a check that runs tests. A place is a file or a test, as a path below ``tests/``."""
    return Verdict(tuple(f"tests/{place}" for place in places), figure, limit)


def run_checks(checks: Sequence[Check]) -> Iterator[tuple[Check, Outcome]]:
    """Runs the checks and yields each with its outcome, in their order."""
    results = run_tests(sorted({place for check in checks for place in _places(check.how)}))
    runs = Runs()
    for check in checks:
        yield check, _outcome(check.how, results, runs)


def _outcome(how: Verdict | Program | Both | Scan, results: Results, runs: Runs) -> Outcome:
    if isinstance(how, Verdict):
        return how.outcome(results)
    if isinstance(how, Both):
        return how.outcome(results, runs)
    return how.outcome(runs) if isinstance(how, Program) else how.outcome()


def _places(how: Verdict | Program | Both | Scan) -> tuple[str, ...]:
    if isinstance(how, Both):
        return how.verdict.places
    return how.places if isinstance(how, Verdict) else ()


def run_tests(places: Sequence[str]) -> Results:
    """Runs the tests of ``places``, which are test files or single tests. Returns their results."""
    if not places:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={report}"]
        existing = [place for place in places if (REPOSITORY / place.partition("::")[0]).exists()]
        subprocess.run(
            [sys.executable, "-m", "pytest", *options, "--continue-on-collection-errors", *existing],
            cwd=REPOSITORY,
            env=_environment(),
            stdout=sys.stderr,
        )
        cases = read_report(report) if report.exists() else {}
    return {place: {name: each for name, each in cases.items() if _belongs(name, place)} for place in places}


def read_report(report: Path) -> dict[str, Result]:
    """Returns the result of each test in a JUnit report, by the name of the test. A skipped test has a problem."""
    found: dict[str, Result] = {}
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314 - pytest has just written the file
        name = f"{case.get('file')}::{case.get('name')}"
        problem = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
        text = "" if problem is None else f"{problem.tag}: {(problem.get('message') or '').splitlines()[:1]}"
        before = found.get(name, Result())
        recorded = dict(before.recorded)
        for each in case.iter("property"):
            key = each.get("name", "")
            recorded[key] = (*recorded.get(key, ()), each.get("value", ""))
        found[name] = Result(before.problem or text, recorded)
    return found


def _belongs(name: str, place: str) -> bool:
    """Returns True if ``place`` is the file of the test ``name``, or the test itself with or without its parameters."""
    return name == place or name.startswith((f"{place}::", f"{place}["))


def _json_lines(text: str) -> Iterator[dict[str, float | None]]:
    for line in text.splitlines():
        if line.startswith("{"):
            yield json.loads(line)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY)}
