"""Starts a program that may read all files, but may write only into given folders, ``/dev`` and ``/proc``.

python tests/wheel/confined.py FOLDER ... -- PROGRAM ARGUMENT ...

Landlock enforces these limits, also for the program's child processes. On a kernel without Landlock, the program starts
unconfined.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agent.confinement.landlock import Right, Rule, forbid_new_privileges, landlock_abi, restrict

READ = Right.READ_FILE | Right.READ_DIR
EVERYTHING = ~Right(0)


def main() -> None:
    end = sys.argv.index("--")
    folders, command = sys.argv[1:end], sys.argv[end + 1 :]
    rules = [
        Rule(Path("/"), READ),
        Rule(Path("/dev"), READ | Right.WRITE_FILE),
        Rule(Path("/dev/shm"), EVERYTHING),
        Rule(Path("/proc"), READ | Right.WRITE_FILE),
        *(Rule(Path(folder), EVERYTHING) for folder in folders),
    ]
    abi = landlock_abi()
    if abi:
        forbid_new_privileges()
        restrict(rules, abi=abi, isolates=False)
    os.execv(command[0], command)  # noqa: S606 (the command is the test's own)


if __name__ == "__main__":
    main()
