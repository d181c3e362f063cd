"""Plants each bug of ``planted_bugs`` in a copy of the tree, and checks that a test finds it.

    python tests/long/find_planted_bugs.py [--only WORDS] [--jobs 2]

First, random scripts run through the scheduler. If they do not find the bug, the tests of scheduler and KV cache run.
The program exits with 1 if no test finds a bug, or if the present code lacks the text that a bug changes. It also exits
with 1 if the tests fail in a copy without a bug.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "tests" / "long"), str(REPOSITORY), str(REPOSITORY / "tests")]

from planted_bugs import BUGS, PlantedBug  # noqa: E402

from support.long_program import run_program  # noqa: E402

NUM_SCRIPTS = 500
TIMEOUT_S = 900
COPIED = ("llm_serving", "tests", "pyproject.toml")
LINKED = ("configs", "docs", "models", "agent", "performance", "tools")

PLAY = f"""
import sys
sys.path[:0] = [".", "tests", "tests/long"]
from scheduler_soak import draw_script, failure_of, play_seeds
seed = play_seeds(range({NUM_SCRIPTS})).failed_seed
if seed is not None:
    print(f"script {{seed}}: {{failure_of(draw_script(seed))}}")
    sys.exit(1)
"""
PACKAGES = ("scheduler", "admission", "block_moves", "block_supply", "policies", "step_costs", "waiting", "kvcache")
TESTS = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *(f"tests/{package}" for package in PACKAGES)]


def copy_tree(folder: Path) -> None:
    """Copies the files that the tests need."""
    for name in COPIED:
        source = REPOSITORY / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, folder / name)
    for name in LINKED:
        (folder / name).symlink_to(REPOSITORY / name)


def plant(bug: PlantedBug, folder: Path) -> None:
    """Changes the code in a copy of the tree as the bug describes."""
    file = folder / bug.file
    text = file.read_text()
    if text.count(bug.old) != 1:
        raise SystemExit(f"{bug.name}: {bug.file} has {text.count(bug.old)} times, not once:\n{bug.old}")
    file.write_text(text.replace(bug.old, bug.new))


def find(bug: PlantedBug) -> str | None:
    """Returns the output of the test that finds the bug, or None if no test does."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_tree(folder)
        plant(bug, folder)
        return _run(["-c", PLAY], folder) or _run(TESTS, folder)


def check_copy() -> None:
    """Runs the tests in a copy without a bug. If a test fails there, it would seem to find every bug."""
    with tempfile.TemporaryDirectory() as name:
        copy_tree(Path(name))
        failure = _run(TESTS, Path(name))
    if failure is not None:
        raise SystemExit(f"the tests fail in a copy without a planted bug: {failure}")


def _run(arguments: list[str], folder: Path) -> str | None:
    """Runs a command. Returns the last line of its output if it fails, and None if it succeeds."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return "never ends"
    if done.returncode == 0:
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith(("script ", "FAILED ", "ERROR "))]
    if not lines:
        raise SystemExit(f"the look-out itself failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return lines[0][:150]


def main() -> int:
    parser = argparse.ArgumentParser(description="Plants bugs in copies of the code and looks whether tests fail.")
    parser.add_argument("--only", default="", help="bugs whose name contains this")
    parser.add_argument("--jobs", type=int, default=2, help="bugs looked for at a time")
    arguments = parser.parse_args()
    bugs = [bug for bug in BUGS if arguments.only in bug.name]
    check_copy()
    missed = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for bug, finder in zip(bugs, pool.map(find, bugs), strict=True):
            print(f"{bug.name}: {finder or 'NOT FOUND'}", flush=True)
            missed += finder is None
    print(f"{len(bugs) - missed} of {len(bugs)} planted bugs were found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(run_program(main))
