"""Prints facts about its process as JSON. Tests compare the facts of processes that were started in different ways."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--descriptor", type=int)
    parser.add_argument("--code", type=int, default=0)
    parser.add_argument("--sleep", action="store_true", help="run until a signal ends the process")
    arguments = parser.parse_args()
    while arguments.sleep:
        time.sleep(60)
    facts = {
        "module": __name__,
        "file": sys.argv[0],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "cores": sorted(os.sched_getaffinity(0)),
        "leads its session": os.getsid(0) == os.getpid(),
        "input": os.read(0, 1).decode(),
        "pipe": os.read(arguments.descriptor, 100).decode(),
        "descriptors": sorted(path.name for path in Path("/proc/self/fd").iterdir() if path.exists()),
    }
    print(json.dumps(facts))
    print("an error", file=sys.stderr)
    return int(arguments.code)


if __name__ == "__main__":
    sys.exit(main())
