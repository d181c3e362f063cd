"""Tests the command ``llm-serving``. Every sub-command has help with examples and runs its program."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llm_serving.commands import catalogue
from llm_serving.commands.catalogue import COMMANDS, Command
from llm_serving.commands.completion import completion_script
from llm_serving.commands.main import main
from support.small_configs import REPOSITORY
from support.time_limits import time_limit


@pytest.fixture(autouse=True)
def saved_program_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["llm-serving"])


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llm_serving", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=time_limit(60))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_each_command_has_help_with_examples(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command.name, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: llm-serving {command.name} ")
    assert f"\n  llm-serving {command.name} " in text or f"<(llm-serving {command.name} " in text
    # The parser that makes the shell completion is also the parser of the command.
    assert command.load_parser().format_help() == text


def test_the_help_lists_all_commands() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert {command.name for command in COMMANDS} <= set(done.stdout.split())


@pytest.mark.parametrize("arguments", [[], ["sevre"], ["--port"]], ids=["nothing", "unknown", "option first"])
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "llm-serving: error: " in capsys.readouterr().err


def test_options_and_exit_code_are_those_of_the_program() -> None:
    done = run("doctor", "explain", "EI0006")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("EI0006")
    done = run("analyze", "/no/such.log")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: /no/such.log: No such file or directory\n"


def test_a_closed_pipe_ends_a_command_without_an_error() -> None:
    command = [sys.executable, "-m", "llm_serving", "doctor", "explain", "EI0006"]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, error = process.communicate(timeout=time_limit(60))
    assert (process.returncode, error) == (-signal.SIGPIPE, b"")
    before = signal.getsignal(signal.SIGPIPE)
    assert main(["doctor", "explain", "EI0006"]) == 0
    assert signal.getsignal(signal.SIGPIPE) == before


def test_a_command_whose_packages_are_missing_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = Command("analyze", "summary", "no_such_package.main:main", "no_such_package.main:build_parser")
    monkeypatch.setattr(catalogue, "COMMANDS", (missing,))
    assert main(["analyze", "x"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "error: llm-serving analyze needs the Python package no_such_package, which is not installed"
    )


def test_completion_knows_a_command_whose_packages_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Command("analyze", "summary", "no_such_package.main:main", "no_such_package.main:build_parser")
    monkeypatch.setattr("llm_serving.commands.completion.COMMANDS", (missing,))
    assert "analyze" in completion_script("bash")


def completed(script: Path, *words: str) -> list[str]:
    """Returns the completions that bash proposes for the last word."""
    program = f"source {script}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
    program += f"_shtab_llm_serving; printf '%s\\n' ${{COMPREPLY[@]}} # {words[-1]}"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, timeout=time_limit(30))
    return [line.strip() for line in done.stdout.splitlines()]


def test_bash_completes_commands_options_and_values(tmp_path: Path) -> None:
    script = tmp_path / "completion.bash"
    done = run("completion", "bash")
    assert done.returncode == 0
    script.write_text(done.stdout)
    assert completed(script, "llm-serving", "s") == ["serve", "simulate"]
    assert completed(script, "llm-serving", "serve", "--mod") == ["--model"]
    assert completed(script, "llm-serving", "serve", "--dtype", "b") == ["bfloat16"]
    assert completed(script, "llm-serving", "load", "--base") == ["--base-url"]
    assert completed(script, "llm-serving", "analyze", "--why") == ["--why-slow"]


def test_plan_prints_what_check_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", "llama_tiny_cpu.yaml", "--quantize", "int8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("model      llama_tiny, float32, weights of ")
    assert any("in int8, embedding and norms in float32" in line for line in lines)
    assert main(["plan", "--config", "no.yaml"]) == 2
    assert capsys.readouterr().err.startswith("error: no.yaml: no such config file here or under configs/")
