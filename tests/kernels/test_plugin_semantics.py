"""Compares the native primitives with NumPy versions of their documentation. A separate process has the plugin."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from support.forked_programs import run_forked
from support.json_program import run_program

ROOT = Path(__file__).resolve().parents[2]
PYTEST = Path(pytest.__file__).with_name("__main__.py")
PROGRAMS = (
    *("plugin_semantics.py", "plugin_quantised.py", "plugin_arithmetic.py", "plugin_latent.py", "plugin_sinks.py"),
    "plugin_draws.py",
)
NUM_TESTS = 44 + 36 + 42 + 11 + 13 + 30


def check_programs(
    run: Callable[..., CompletedProcess[str]],
    folder: Path,
    programs: Sequence[str],
    num_tests: int,
    *arguments: str,
    **variables: str,
) -> None:
    """Runs tests of the programs with ``run``, and checks that ``num_tests`` tests pass."""
    files = [str(ROOT / "tests/kernels" / program) for program in programs]
    options = ["-q", "--no-header", "-p", "no:cacheprovider", "-o", "pythonpath=. tests tests/kernels", *arguments]
    project = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    process = run(PYTEST, *files, *options, *project, folder=folder, timeout=280, MS_OM_PATH=str(folder), **variables)
    assert process.returncode == 0, process.stdout[-6000:] + process.stderr[-2000:]
    assert re.search(rf"^{num_tests} passed", process.stdout, re.MULTILINE), process.stdout[-500:]


def test_the_primitives_do_what_their_documentation_says(tmp_path: Path) -> None:
    check_programs(run_forked, tmp_path, PROGRAMS, NUM_TESTS)


@pytest.mark.sweep
@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX2 is an instruction set of x86-64")
def test_laid_out_caches_and_gated_weights_with_avx2(tmp_path: Path) -> None:
    """Their process is not forked, because the fork server has chosen its instruction set already."""
    programs, chosen = ("plugin_semantics.py", "plugin_quantised.py"), ("-k", "laid_out or gated_weight")
    check_programs(run_program, tmp_path, programs, 14, *chosen, LLM_KERNELS_ISA="avx2")
