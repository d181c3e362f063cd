"""Opens damaged model folders of every format: weights, configs and tokenizers.

    python tests/long/fuzz_loader.py --cases 2000 [--only gguf] [--seed N] [--keep FOLDER]

``--cases`` counts for each format. A reader must accept a folder or refuse it with an error of the project. Each format
runs in a child process with limited memory, so the death of the process counts as a crash. Prints one JSON line for
each format, and exits with 1 after a crash, a hang, or a growth of memory above the limit. With ``--keep``, the program
runs no case, but writes the damaged folder of the case ``--seed``.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from support.fuzzing import Findings  # noqa: E402
from support.loader_fuzz import FORMATS, LoaderFuzz  # noqa: E402
from support.long_program import run_program  # noqa: E402

MAX_MEMORY_BYTES = 2 * 1024**3
"""Maximum address space of a child. A reader that tries to allocate a huge size that a damaged file states gets a
MemoryError, which counts as a crash.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000, help="damaged folders of each format")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case; each next is one more")
    parser.add_argument("--only", default="", help="formats whose name contains this")
    parser.add_argument("--keep", type=Path, help="write the folder of the case --seed here, and open nothing")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        return run_child(arguments.child, range(arguments.seed, arguments.seed + arguments.cases))
    names = [name for name in FORMATS if arguments.only in name]
    if arguments.keep is not None:
        with tempfile.TemporaryDirectory() as folder:
            LoaderFuzz(names[0], Path(folder)).keep_case(arguments.seed, arguments.keep)
        return 0
    return 1 if sum(not is_good(name, arguments.cases, arguments.seed) for name in names) else 0


def is_good(name: str, cases: int, seed: int) -> bool:
    """Runs the cases of one format in a child process and prints its line.

    Returns True if no case crashed or hung, and memory did not grow above the limit.
    """
    options = ["--child", name, "--cases", str(cases), "--seed", str(seed)]
    done = subprocess.run([sys.executable, __file__, *options], capture_output=True, text=True)
    if done.stdout.startswith("{"):
        print(done.stdout, end="", flush=True)
        return done.returncode == 0
    figures = {"format": name, "cases": cases, "exit_code": done.returncode, "stderr": done.stderr[-1000:]}
    print(json.dumps({**figures, "pass": False}), flush=True)
    return False


def run_child(name: str, seeds: range) -> int:
    """Runs the cases of one format in this process, with limited memory."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    findings = Findings()
    with tempfile.TemporaryDirectory() as folder:
        LoaderFuzz(name, Path(folder)).run(seeds, findings)
    print(f'{{"format": "{name}", {findings.figures()[1:]}')
    return 0 if findings.is_good else 1


if __name__ == "__main__":
    sys.exit(run_program(main))
