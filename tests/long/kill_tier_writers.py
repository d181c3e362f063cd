"""Kills processes with SIGKILL while they write the files of a KV tier, and compares every hit that others then have.

    python tests/long/kill_tier_writers.py --rounds 100

In each round, one process (SSD) or three (shared folder) write blocks of two namespaces, as servers with other weights
at the same path do. Some processes have a file size limit, which acts like a full disk. All are killed at a random
time. Then each block of each namespace is read: it must be a miss, or have the right bits.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.long_program import run_program
from support.tier_kills import KINDS, run_round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="number of kills of each kind of folder (default 100)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choices (default 0)")
    parser.add_argument("--folder", help="folder on the file system to test (default: a temporary folder)")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kv-tiers-", dir=options.folder))
    try:
        for kind in KINDS:
            rng, total = random.Random(options.seed), Counter[str]()
            for _ in range(options.rounds):
                total += run_round(kind, folder / kind, rng)
            print(f"{kind}: {options.rounds} rounds, {dict(total)}; every hit had the right bits")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(run_program(main))
