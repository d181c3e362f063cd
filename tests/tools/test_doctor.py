"""Tests the doctor as a program: its output, its exit code, and its behaviour if a check itself fails."""

import json
import os
import subprocess
import sys

import pytest

from llm_serving.cli import DEFAULT_CONFIG as SERVED_BY_DEFAULT
from support.small_configs import REPOSITORY, small_overrides
from tools.diagnosis import examination, main
from tools.diagnosis.finding import Level, ok, problem, warning

PROGRAM = REPOSITORY / "tools" / "doctor.py"


def doctor(*arguments, environment=None, stdin=""):
    return subprocess.run(
        [sys.executable, str(PROGRAM), *map(str, arguments)],
        env={**os.environ, **(environment or {})},
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
    )


def settings(folder):
    sets = [item for override in small_overrides(folder) for item in ("--set", override)]
    return ["--config", "llama_tiny_cpu.yaml", *sets]


def test_this_machine_serves_the_tiny_model(tmp_path):
    done = doctor(*settings(tmp_path), "--json", tmp_path / "doctor.json")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    result = json.loads((tmp_path / "doctor.json").read_text())
    assert result["can_be_served"] is True
    levels = {finding["subject"]: finding["level"] for finding in result["findings"]}
    for subject in ("python", "mindspore", "kernels", "config", "tokenizer", "model", "ports", "operators"):
        assert levels[subject] in ("ok", "warning"), result
    assert "llama_tiny_cpu.yaml can be served here: 0 problems" in done.stdout
    assert not (tmp_path / "server.log").exists()


BREAKAGES = {
    "crash": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "cannot be imported: signal 11"),
    "error": ("raise ImportError('libhccl.so: cannot open shared object file')", "libhccl.so: cannot open"),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_broken_mindspore_is_a_finding(tmp_path, breakage):
    program, words = BREAKAGES[breakage]
    (tmp_path / "mindspore").mkdir()
    (tmp_path / "mindspore" / "__init__.py").write_text(program)
    done = doctor(*settings(tmp_path), environment={"PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stderr) == (1, "")
    assert words in done.stdout
    assert "Traceback" not in done.stdout
    assert "  operators  " not in done.stdout
    assert "ok       tokenizer" in done.stdout


def test_a_python_without_packages_gets_findings(tmp_path):
    """The doctor runs under a Python without the project's packages and without ``.venv``.

    The doctor reports findings. It does not fail.
    """
    program = (
        "import sys; sys.path = [p for p in sys.path if 'site-packages' not in p]; "
        f"sys.path.insert(0, {str(REPOSITORY)!r}); sys.executable = '/no/python'; "
        "from tools.diagnosis.main import main; sys.exit(main([]))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert "problem  packages   missing: numpy, psutil" in done.stdout
    assert "problem  mindspore  cannot be imported: not found" in done.stdout
    assert "problem  config     cannot be checked: No module named" in done.stdout


def test_a_wrong_config_exits_with_one(tmp_path):
    done = doctor("--config", "no_such.yaml")
    assert done.returncode == 1
    assert "no_such.yaml: no such config file" in done.stdout


def test_explain_prints_errors_and_returns_the_exit_code(tmp_path):
    log = tmp_path / "plog.log"
    log.write_text("EL0004: [PID: 5] 2026-11-21-12:00:00.000.000 Failed to allocate memory, device_id=3\n")
    done = doctor("explain", "EI0006", log, "--json", tmp_path / "explained.json")
    assert done.returncode == 0
    assert "failed first: device 3, process 5 (plog.log) at 2026-11-21 12:00:00" in done.stdout
    asked = [(each["asked"], "codes" in each) for each in json.loads((tmp_path / "explained.json").read_text())]
    assert asked == [("EI0006", True), (str(log), False)]
    assert doctor("explain", "-", stdin="nothing here\n").returncode == 1
    unknown = doctor("explain", "XYZ")
    assert (unknown.returncode, "neither a file nor a known code" in unknown.stderr) == (2, True)


def test_the_report_shows_advice():
    findings = [ok("a", "fine"), warning("long", "odd\ntwo lines", "look"), problem("b", "bad", "repair", "https://x")]
    assert main.report(findings) == (
        "ok       a     fine\n"
        "warning  long  odd\n               two lines\n               do: look\n"
        "problem  b     bad\n               do: repair\n               see: https://x"
    )
    assert [main.can_be_served(findings[:count]) for count in (1, 2, 3)] == [True, True, False]


def test_a_check_that_fails_is_a_finding():
    def breaks():
        raise RuntimeError("oh")

    (finding,) = examination._guarded(breaks)
    assert (finding.level, finding.text) == (Level.PROBLEM, "a check failed: RuntimeError: oh")


def test_the_default_config_is_the_servers_default():
    assert main.DEFAULT_CONFIG == SERVED_BY_DEFAULT
