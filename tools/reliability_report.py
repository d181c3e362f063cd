#!/usr/bin/env python3
"""Runs the sixty checks of reliability and security and prints one JSON line for each.

    python tools/reliability_report.py [--only A1,C5] [--quick] [--page docs/reliability.md]

A line is {id, pass, figure, unit, limit, comparison}, and a reason if the check did not pass. ``limit`` is a number.
``comparison`` is ``<=`` if the figure must be at most the limit, and ``>=`` if it must be at least the limit.
``--quick`` leaves out the checks that run a program for minutes. ``--page`` writes the results into the table of that
page. Exits with 1 unless every check passed.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.reliability import table
from tools.reliability.group_a import CHECKS as A
from tools.reliability.group_b import CHECKS as B
from tools.reliability.group_c import CHECKS as C
from tools.reliability.group_d import CHECKS as D
from tools.reliability.group_e import CHECKS as E
from tools.reliability.group_f import CHECKS as F
from tools.reliability.registry import REPOSITORY, Both, Check, Program, run_checks

CHECKS: tuple[Check, ...] = (*A, *B, *C, *D, *E, *F)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="ids of checks or letters of groups, separated by commas")
    parser.add_argument("--quick", action="store_true", help="leave out the checks that run a program for minutes")
    parser.add_argument("--page", type=Path, help="write the table of this page")
    arguments = parser.parse_args()
    try:
        checks = select(arguments.only, quick=arguments.quick)
    except ValueError as error:
        parser.error(str(error))
    outcomes = []
    for check, outcome in run_checks(checks):
        outcomes.append((check, outcome))
        print(json.dumps(check.line(outcome)), flush=True)
    passed = sum(outcome.passed for _, outcome in outcomes)
    print(f"{passed} of {len(outcomes)} checks passed", file=sys.stderr)
    if arguments.page is not None:
        table.write(arguments.page, CHECKS, outcomes, stamp())
    return 0 if passed == len(outcomes) else 1


def stamp() -> str:
    """Returns the text of the table's column ``run``: the date, and the commit if the program runs in a repository."""
    day = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    try:
        command = ["git", "-C", str(REPOSITORY), "rev-parse", "--short=8", "HEAD"]
        return f"{day}, {subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()}"
    except (OSError, subprocess.CalledProcessError):
        return day


def select(only: str, *, quick: bool = False) -> list[Check]:
    """Returns the checks that ``only`` names, or all checks. Raises ValueError for an unknown id."""
    wanted = {name.strip().upper() for name in only.split(",") if name.strip()}
    unknown = wanted - {check.id for check in CHECKS} - {check.id[0] for check in CHECKS}
    if unknown:
        raise ValueError(f"no check has the id {', '.join(sorted(unknown))}; ids are {CHECKS[0].id} to {CHECKS[-1].id}")
    chosen = [check for check in CHECKS if not wanted or check.id in wanted or check.id[0] in wanted]
    return [check for check in chosen if not (quick and isinstance(check.how, Program | Both))]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends the program that runs, too
    sys.exit(main())
