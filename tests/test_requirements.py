"""Tests that the lock files pin every package with hashes and agree with pyproject.toml.

Also tests that ``make help`` lists every target, and that ``make`` compiles the packages to bytecode.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.small_configs import REPOSITORY
from support.time_limits import time_limit
from tools.lock_requirements import BUILD, FILES, packages

LOCKS = {name: packages((REPOSITORY / name).read_text("utf-8")) for name in FILES}
PROJECT = (REPOSITORY / "pyproject.toml").read_text("utf-8")


@pytest.mark.parametrize("name", FILES)
def test_every_package_has_an_exact_version_and_hashes(name: str) -> None:
    text = (REPOSITORY / name).read_text("utf-8")
    assert LOCKS[name]
    for package, entry in LOCKS[name].items():
        assert re.match(r"[\w.-]+==[\w.]+", entry), package
        assert "--hash=sha256:" in entry, package
    assert "://" not in text


def test_the_client_libraries_are_locked_with_hashes() -> None:
    text = (REPOSITORY / "requirements-clients.lock").read_text("utf-8")
    locked = packages(text)
    wanted = (REPOSITORY / "tests/clients/requirements.in").read_text("utf-8").split("\n")
    names = {line.partition("==")[0] for line in wanted if "==" in line}
    assert names == {"openai-agents", "langchain-openai", "langchain-anthropic", "instructor", "litellm",
                     "openai-harmony", "mistral-common", "sentencepiece", "pytest", "pytest-timeout"}  # fmt: skip
    assert {line for line in wanted if "==" in line} <= {entry.split()[0] for entry in locked.values()}
    assert all("--hash=sha256:" in entry for entry in locked.values())
    assert "torch" not in locked
    assert "://" not in text


def declared(name: str) -> set[str]:
    """Returns the packages that the list ``name`` in pyproject.toml declares, each with its version."""
    body = re.search(rf"^{name} = \[(.*?)\]$", PROJECT, re.MULTILINE | re.DOTALL)
    assert body is not None
    return {each.lower() for each in re.findall(r'"([\w.-]+==[\w.]+)"', body[1])}


@pytest.mark.parametrize("name", FILES)
def test_the_lock_files_hold_what_the_project_declares(name: str) -> None:
    extras, base, _ = FILES[name]
    lists = ["dependencies", *extras, *(("tools", "tracing", "events") if "test" in extras else ())]
    locked = {entry.split()[0].lower() for each in (name, *base) for entry in LOCKS[each].values()}
    assert {each for one in lists for each in declared(one)} | set(BUILD) <= locked


def test_a_package_is_in_one_of_the_files_that_are_installed_together() -> None:
    for name, (_, base, _) in FILES.items():
        for each in base:
            assert not LOCKS[name].keys() & LOCKS[each].keys(), (name, each)


def test_serving_installs_no_tools_and_no_test_packages() -> None:
    assert not LOCKS["requirements.lock"].keys() & {"pytest", "matplotlib", "ruff", "mypy", "openai", "aiohttp"}


def test_make_help_lists_every_target() -> None:
    makefile = (REPOSITORY / "Makefile").read_text("utf-8")
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony is not None
    done = subprocess.run(["make", "help"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert {line.split()[1] for line in done.stdout.splitlines() if line.startswith("make ")} == set(phony[1].split())


def test_make_compiles_the_packages_in_any_folder(tmp_path: Path) -> None:
    """``compileall`` compares whole paths, so the names of unused packages must not match the folder of the project."""
    venv = tmp_path / "rich" / "tests" / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=time_limit(120))
    (packages,) = venv.glob("lib/python*/site-packages")
    for name in ("used/one.py", "used/tests/two.py", "pip/three.py"):
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).touch()
    command = ["make", "--eval", "compile-packages: ; @$(BYTECODE)", "compile-packages", f"VENV={venv}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=time_limit(120), check=False)
    assert done.returncode == 0, done.stderr
    assert [file.relative_to(packages).parts[0] for file in packages.rglob("*.pyc")] == ["used"]
    assert list(packages.glob("used/__pycache__/one.*.pyc"))
