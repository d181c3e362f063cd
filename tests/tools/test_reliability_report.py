"""Tests the reliability report, which has sixty checks: their ids, their verdicts, and the table."""

from __future__ import annotations

import ast
import re
import subprocess
import time
from collections import Counter
from dataclasses import replace

import pytest

from support.small_configs import REPOSITORY
from tools import reliability_report
from tools.reference.source_trees import syntax_tree
from tools.reliability import registry, source_scans, table
from tools.reliability.registry import Both, Check, Outcome, Program, Result, Scan, Verdict
from tools.reliability_report import CHECKS, select

IDS = {
    "A": (1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12),
    "B": (1, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14),
    "C": (1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12, 13, 15, 16),
    "D": (1, 2, 3, 4, 5, 6),
    "E": (1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12),
    "F": (1, 2, 3, 4, 5, 6),
}


def test_there_are_sixty_checks_with_the_known_ids():
    assert [check.id for check in CHECKS] == [f"{group}{number}" for group in IDS for number in IDS[group]]
    assert len(CHECKS) == 60


def test_every_test_that_a_check_names_exists():
    for check in CHECKS:
        for place in registry._places(check.how):
            file, _, name = place.partition("::")
            tree = syntax_tree(REPOSITORY / file)
            names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            assert not name or name in names, f"{check.id}: {place}"


def test_every_figure_of_tests_is_recorded_by_one_of_them():
    for check in CHECKS:
        if isinstance(check.how, Verdict) and check.how.figure:
            files = {REPOSITORY / place.partition("::")[0] for place in check.how.places}
            record = f'record_property("{check.how.figure}", '
            assert any(record in file.read_text(encoding="utf-8") for file in files), f"{check.id}: {record}"


def test_every_check_has_a_figure_of_its_own():
    """Each check reports a figure of its own, because a number of failed tests says less."""
    assert [check.id for check in CHECKS if check.unit == Check("", "", check.how).unit] == []


def test_every_program_that_a_check_runs_exists():
    for check in CHECKS:
        how = check.how.program if isinstance(check.how, Both) else check.how
        if isinstance(how, Program):
            assert (REPOSITORY / how.arguments[0]).is_file(), check.id


def test_checks_are_selected_by_id_and_by_group():
    assert [check.id for check in select("E1, c15")] == ["C15", "E1"]
    assert {check.id[0] for check in select("D")} == {"D"}
    assert len(select("")) == 60
    assert not any(isinstance(check.how, Program | Both) for check in select("", quick=True))
    with pytest.raises(ValueError, match="no check has the id Z9; ids are A1 to F6"):
        select("A1,Z9")


def test_verdicts_of_tests_are_read_from_the_report(tmp_path):
    (tmp_path / "report.xml").write_text(
        """<testsuites><testsuite>
        <testcase file="tests/a.py" name="test_one"/>
        <testcase file="tests/a.py" name="test_two[x]"><failure message="it broke"/></testcase>
        <testcase file="tests/b.py" name="test_three"><skipped message="no device"/></testcase>
        </testsuite></testsuites>"""
    )
    cases = registry.read_report(tmp_path / "report.xml")
    assert cases["tests/a.py::test_one"] == Result()
    assert "failure" in cases["tests/a.py::test_two[x]"].problem
    assert "skipped" in cases["tests/b.py::test_three"].problem
    results = {
        place: {name: result for name, result in cases.items() if registry._belongs(name, place)}
        for place in ("tests/a.py::test_one", "tests/a.py::test_two", "tests/b.py", "tests/c.py")
    }
    assert Verdict(("tests/a.py::test_one",)).outcome(results) == Outcome(True, 0, total=1)
    assert Verdict(("tests/a.py::test_one", "tests/a.py::test_two")).outcome(results).figure == 1
    assert not Verdict(("tests/b.py",)).outcome(results).passed
    assert Verdict(("tests/c.py",)).outcome(results) == Outcome(False, 1, "tests/c.py: no test ran")


def test_recorded_values_are_read_from_the_report(tmp_path):
    """A test may record a value several times. pytest writes two cases for a test whose teardown fails."""
    (tmp_path / "report.xml").write_text(
        """<testsuites><testsuite>
        <testcase file="tests/a.py" name="test_one"><properties>
            <property name="wrong" value="0 of 7"/><property name="seconds" value="0.5"/>
            <property name="wrong" value="1 of 9"/>
        </properties></testcase>
        <testcase file="tests/a.py" name="test_one"><error message="no"/></testcase>
        </testsuite></testsuites>"""
    )
    [result] = registry.read_report(tmp_path / "report.xml").values()
    assert result.recorded == {"wrong": ("0 of 7", "1 of 9"), "seconds": ("0.5",)}
    assert result.problem.startswith("error")


def results_of(*recorded, problem=""):
    """Returns the results of a file in which each test recorded the value ``x``, and the last one has ``problem``."""
    each = {f"tests/a.py::test_{number}": Result("", {"x": (value,)}) for number, value in enumerate(recorded)}
    return {"tests/a.py": {**each, "tests/a.py::test_last": Result(problem, {"other": ("99",)})}}


@pytest.mark.parametrize(
    ("recorded", "problem", "expected"),
    [
        (("1", "2.5", "0"), "", (True, 2.5, 0)),
        (("1", "3.5"), "", (False, 3.5, 0)),
        (("1", "2.5"), "failure: it broke", (False, 2.5, 0)),
        (("0 of 400", "2 of 12"), "", (True, 2, 412)),
        (("2 of 400", "2 of 12"), "", (False, 4, 412)),
        (("0 of 0",), "", (False, None, 0)),
        ((), "", (False, None, 0)),
    ],
)
def test_the_figure_of_tests_is_the_largest_number_or_the_sum_of_counts(recorded, problem, expected):
    outcome = Verdict(("tests/a.py",), "x", 3.0).outcome(results_of(*recorded, problem=problem))
    assert (outcome.passed, outcome.figure, outcome.total) == expected
    assert problem in outcome.reason
    assert ("no test measured x" in outcome.reason) == (expected[1] is None)


@pytest.mark.parametrize(
    ("recorded", "reason"),
    [
        (("nan", "1"), "x: a test recorded 'nan'"),
        (("1", "nan"), "x: a test recorded 'nan'"),
        (("-inf",), "x: a test recorded '-inf'"),
        (("nan of 4", "0 of 4"), "x: a test recorded 'nan of 4'"),
        (("True",), "x: a test recorded 'True', which is neither a number nor a count like '2 of 412'"),
        (("0 of 4", "2 of many"), "x: a test recorded '2 of many'"),
        (("0.5 of 4",), "x: a test recorded '0.5 of 4'"),
        (("5 of 5", "-5 of 5"), "x: a test recorded '-5 of 5'"),
        (("0 of -4",), "x: a test recorded '0 of -4'"),
        (("",), "x: a test recorded ''"),
        (("0 of 4", "1"), "x: 1 of 2 values are counts, and the others are numbers"),
    ],
)
def test_a_value_that_is_no_number_and_no_count_leaves_its_check_without_a_figure(recorded, reason):
    outcome = Verdict(("tests/a.py",), "x", 3.0).outcome(results_of(*recorded, problem="failure: it broke"))
    assert (outcome.passed, outcome.figure) == (False, None)
    assert outcome.reason.startswith("tests/a.py::test_last: failure: it broke; ")
    assert reason in outcome.reason
    assert not Verdict(("tests/a.py",), "x", 3.0).outcome(results_of(*recorded)).passed


def test_a_test_counts_once_if_two_places_name_it():
    results = results_of("2 of 9")
    results["tests/a.py::test_0"] = {"tests/a.py::test_0": results["tests/a.py"]["tests/a.py::test_0"]}
    outcome = Verdict(("tests/a.py", "tests/a.py::test_0"), "x", 3.0).outcome(results)
    assert (outcome.figure, outcome.total) == (2, 9)


def test_a_recorded_figure_is_compared_and_shown_with_its_limit_and_total():
    check = Check("A4", "It holds", registry.tests("a.py", figure="x", limit=1500.0), "wrong statuses of {total}")
    outcome = check.how.outcome(results_of("1200 of 99000", "3 of 4"))
    line = check.line(outcome)
    assert (line["pass"], line["figure"], line["unit"]) == (True, 1203, "wrong statuses of 99,004")
    assert (line["limit"], line["comparison"]) == (1500.0, "<=")
    assert table.row(check, outcome, "today") == (
        "| A4 | It holds | 1,203 wrong statuses of 99,004 | 1,500 | yes | today |"
    )


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.0, "0"), (0.04123456, "0.04123"), (1.7734, "1.773"), (999.0, "999"), (65536.0, "65,536"), (1e6, "1,000,000")],
)
def test_numbers_of_the_table_have_four_digits_or_all_before_the_point(number, text):
    assert table.number_text(number) == text


def test_real_tests_give_a_verdict():
    place = "ipc/test_channel.py::test_a_payload_over_the_limit_is_not_sent"
    measured = registry.tests("ipc/test_messages.py::test_a_proof_holds_for_one_secret_role_and_nonce",
                              figure="accepted_strangers")  # fmt: skip
    nothing = registry.tests(place, figure="accepted_strangers")
    checks = [Check(name, "", how) for name, how in (("A1", registry.tests(place)), ("E4", measured), ("E5", nothing))]
    outcomes = [outcome for _, outcome in registry.run_checks(checks)]
    assert outcomes == [
        Outcome(True, 0, total=1),
        Outcome(True, 0, total=3),
        Outcome(False, None, "no test measured accepted_strangers"),
    ]


@pytest.mark.parametrize(
    ("code", "passed", "figure"),
    [
        ("print('{\"x\": 1}'); print('{\"x\": 3}')", True, 3),
        ("print('{\"x\": 7}')", False, 7),
        ("print('{\"x\": 1}'); raise SystemExit(1)", False, 1),
        ("print('nothing')", False, None),
        ("import time; time.sleep(60)", False, None),
    ],
)
def test_a_program_passes_by_its_exit_code_and_its_figure(tmp_path, code, passed, figure):
    (tmp_path / "program.py").write_text(code)
    limit_s = 1.0 if "sleep" in code else 60.0
    outcome = Program((str(tmp_path / "program.py"),), "x", 5.0, limit_s).outcome()
    assert (outcome.passed, outcome.figure) == (passed, figure)


def test_a_program_with_a_file_passes_by_the_minimum_of_its_figure(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import sys; open(sys.argv[2], 'w').write('{\\n\"x\": 7}'); print('{')")
    for limit, passed in ((7.0, True), (7.5, False)):
        outcome = Program((str(program),), "x", limit, file_option="--json", is_minimum=True).outcome()
        assert (outcome.passed, outcome.figure) == (passed, 7)


def test_the_limit_of_a_line_is_a_number_with_its_comparison():
    lines = {check.id: check.line(Outcome(True, 1.0)) for check in CHECKS}
    limits = {name: (lines[name]["comparison"], lines[name]["limit"]) for name in ("A3", "C1", "E5", "F1", "F4")}
    goals = {"A3": ("<=", 0.0), "C1": ("<=", 2.5), "E5": ("<=", 40.0), "F1": (">=", 0.95), "F4": ("<=", 1.5)}
    assert limits == goals
    assert all(isinstance(line["limit"], float) for line in lines.values())


def test_two_checks_use_the_figures_of_one_run(tmp_path):
    """F1 and F4 use one benchmark, which exits with 1 if one of its goals is missed. The other check may still pass."""
    program, started = tmp_path / "program.py", tmp_path / "started"
    program.write_text(f"""
import sys
with open({str(started)!r}, "a") as file:
    file.write("x")
open(sys.argv[2], "w").write('{{"share": 0.96, "ratio": 2.5, "missing": null}}')
sys.exit(1)
""")

    def check(figure, limit, *, is_minimum=False, has_other_goals=True):
        how = Program((str(program),), figure, limit, 60.0, "--json", is_minimum, has_other_goals)
        return Check("F1", "", how)

    checks = [check("share", 0.95, is_minimum=True), check("ratio", 1.5), check("missing", 1.0)]
    checks.append(check("share", 0.95, is_minimum=True, has_other_goals=False))
    outcomes = [outcome for _, outcome in registry.run_checks(checks)]
    figures = [(True, 0.96), (False, 2.5), (False, None), (False, 0.96)]
    assert [(each.passed, each.figure) for each in outcomes] == figures
    assert "exit code 1" in outcomes[3].reason
    assert started.read_text() == "x"


def test_fairness_is_judged_by_the_ratio_of_the_overload_benchmark():
    checks = {check.id: check for check in CHECKS}
    goodput, fairness = checks["F1"].how, checks["F4"].how.program
    assert (fairness.figure, fairness.limit, fairness.is_minimum) == ("light_ttft_ratio", 1.5, False)
    assert (fairness.arguments, fairness.file_option) == (goodput.arguments, goodput.file_option)


@pytest.mark.parametrize(("figure", "problem", "passed"), [(1, "", True), (9, "", False), (1, "failure: x", False)])
def test_a_check_with_tests_and_a_program_needs_both(tmp_path, figure, problem, passed):
    (tmp_path / "program.py").write_text(f"print('{{\"x\": {figure}}}')")
    how = Both(Verdict(("tests/a.py",)), Program((str(tmp_path / "program.py"),), "x", 5.0))
    outcome = how.outcome({"tests/a.py": {"tests/a.py::test_it": Result(problem)}})
    assert (outcome.passed, outcome.figure) == (passed, figure)
    assert problem in outcome.reason


def test_a_program_that_takes_too_long_may_end_its_processes(tmp_path, monkeypatch):
    """The program gets SIGTERM, and only later SIGKILL. The time is over when the program has written a file."""
    program, began, ended = (tmp_path / name for name in ("program.py", "began", "ended"))
    program.write_text(f"""
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
pathlib.Path({str(began)!r}).touch()
try:
    time.sleep(600)
finally:
    pathlib.Path({str(ended)!r}).touch()
""")
    communicate = subprocess.Popen.communicate

    def wait_for_the_start(process, input=None, timeout=None):
        while not began.exists():
            time.sleep(0.01)
        return communicate(process, input, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", wait_for_the_start)
    outcome = Program((str(program),), "x", 5.0, timeout_s=0.1).outcome()
    assert outcome == Outcome(False, None, "did not end within 0.1 s")
    assert ended.exists()


def test_the_line_of_a_check_that_did_not_pass_has_the_reason():
    assert Check("A1", "", registry.tests("no.py")).line(Outcome(False, None, "no test ran")) == {
        "id": "A1",
        "pass": False,
        "figure": None,
        "unit": "of 0 tests failed",
        "limit": 0.0,
        "comparison": "<=",
        "reason": "no test ran",
    }


def test_scans_find_what_they_look_for(tmp_path, monkeypatch):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "bad.py").write_text(
        "import pickle\nfrom marshal import loads\nimport time\ntime.time()\nrun('x', shell=True)\n"
    )
    monkeypatch.setattr(source_scans, "REPOSITORY", tmp_path)
    assert list(source_scans.imports("code", {"pickle", "marshal"})) == [
        "code/bad.py:1 pickle",
        "code/bad.py:2 marshal",
    ]
    assert list(source_scans.calls("code", {"time.time"})) == ["code/bad.py:4 time.time"]
    assert list(source_scans.keywords("code", "shell", True)) == ["code/bad.py:5 shell=True"]


def test_the_scans_of_the_product_pass():
    for check in CHECKS:
        if isinstance(check.how, Scan):
            assert check.how.outcome() == Outcome(True, 0), check.id


def test_rows_of_the_page_are_replaced_and_others_stay(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\n{table.BEGIN}\n| A1 | earlier |\n| A2 | stays |\n{table.END}\n\nEnd\n")
    first = Check("A1", "It holds", registry.tests("no.py"))
    checks = [first, replace(first, id="A2"), replace(first, id="A3")]
    table.write(page, checks, [(first, Outcome(False, None, "no | way"))], "2026-01-02")
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("# Title", "End")
    assert lines[5:8] == [
        "| A1 | It holds | - | 0 | no: no / way | 2026-01-02 |",
        "| A2 | stays |",
        "| A3 | It holds | - | 0 | no: not run yet | - |",
    ]


def test_the_page_has_a_row_for_every_check():
    text = (REPOSITORY / "docs" / "reliability.md").read_text(encoding="utf-8")
    rows = Counter(re.findall(r"^\| ([A-F]\d+) \|", text, re.M))
    assert rows == Counter(check.id for check in CHECKS)


def test_the_rows_of_the_page_are_about_the_present_checks():
    """Each row of the page must state the present promise and limit of its check. After a change, an old figure would
    be wrong.
    """
    text = (REPOSITORY / "docs" / "reliability.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([A-F]\d+) \| (.+?) \| .+? \| (.+?) \| ", text, re.M)
    assert rows == [(check.id, check.promise, table.limit_text(check)) for check in CHECKS]


def test_the_program_prints_a_line_for_each_check(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["reliability_report.py", "--only", "C15,E1"])
    assert reliability_report.main() == 0
    assert [line[:12] for line in capsys.readouterr().out.splitlines()] == ['{"id": "C15"', '{"id": "E1",']


def test_a_row_names_the_day_and_the_commit(monkeypatch, tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(reliability_report, "REPOSITORY", tmp_path)
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", reliability_report.stamp())
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(tmp_path), *author, "commit", "-q", "--allow-empty", "-m", "a"], check=True)
    assert re.fullmatch(r"20\d\d-\d\d-\d\d, [0-9a-f]{8}", reliability_report.stamp())
