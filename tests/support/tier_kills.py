"""Kills processes that write the files of a KV tier, and compares every hit that others then have."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from support.small_configs import REPOSITORY
from support.tier_writer import MAX_BYTES, NUM_KEYS, content_of, key_of, open_folder

NAMESPACES = [bytes([number]) * 32 for number in (1, 2)]
KINDS = ("ssd", "shared")


def run_round(kind: str, folder: Path, rng: random.Random) -> Counter[str]:
    """Runs writers, kills them, and reads all blocks. Returns the counts of hits and misses."""
    writers = [start_writer(kind, folder, rng) for _ in range(1 if kind == "ssd" else 3)]
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n", "a writer did not start"
        time.sleep(rng.uniform(0.0, 0.08))
    finally:
        for writer in writers:
            os.kill(writer.pid, signal.SIGKILL)
            writer.wait()
            if writer.stdout is not None:
                writer.stdout.close()
    return read_all(kind, folder)


def start_writer(kind: str, folder: Path, rng: random.Random) -> subprocess.Popen[bytes]:
    limit = rng.choice([0, 0, rng.randrange(1000, 40_000)])
    arguments = [kind, str(folder), rng.choice(NAMESPACES).hex(), str(rng.randrange(1 << 30)), str(limit)]
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"}
    command = [sys.executable, "-m", "support.tier_writer", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)


def read_all(kind: str, folder: Path) -> Counter[str]:
    """Reads every block of every namespace. Raises AssertionError for a hit with wrong bits, or files beyond the limit.
    """
    counts: Counter[str] = Counter()
    for namespace in NAMESPACES:
        records = open_folder(kind, folder, namespace)
        for number in range(NUM_KEYS):
            place = records.find(key_of(number).chained_hash)
            content = None if place is None else records.read(place, key_of(number))
            counts["hits" if content is not None else "misses"] += 1
            if content is not None and content != content_of(namespace, number):
                raise AssertionError(f"{kind}: block {number} has wrong bits")
        counts["rejected"] += records.num_rejected
        records.close()
    size = sum(file.stat().st_size for file in folder.rglob("*.kv"))
    # Writers of a shared folder do not see each other's newest files, so each may be above the limit for a short time.
    assert size <= (MAX_BYTES if kind == "ssd" else 4 * MAX_BYTES), f"{kind}: {size} bytes of files"
    return counts
