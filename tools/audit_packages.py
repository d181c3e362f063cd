#!/usr/bin/env python3
"""Looks for known vulnerabilities of the locked packages, with pip-audit. `make audit` runs it.

    python tools/audit_packages.py                    # all lock files
    python tools/audit_packages.py requirements.lock

Exit code 0: no vulnerability is known. 1: some are known. 2: the advisories could not be read for every package, so
the result is unknown. (pip-audit itself reports success if PyPI or its mirror does not know a package.)
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.lock_requirements import FILES  # noqa: E402

PINNED_BY_OTHERS = {"requirements-mindformers.lock": "MindFormers 1.9.0 demands exact versions of its packages"}
"""Lock files whose vulnerabilities are reported but do not make the audit fail. The value is the reason."""
_TIMEOUT_S = 600
"""Maximum seconds for the check of one lock file."""


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of the audit of one lock file."""

    vulnerabilities: tuple[str, ...]
    unchecked: tuple[str, ...]
    """Packages whose advisories could not be read, each with the reason."""


class AuditError(Exception):
    """Raised if pip-audit failed to write a report."""


def audit(lock: Path, program: Sequence[str] = (sys.executable, "-m", "pip_audit")) -> Audit:
    """Runs pip-audit on a lock file. Raises AuditError if pip-audit gives no report."""
    options = ["--require-hashes", "--disable-pip", "--format", "json", "--progress-spinner", "off", "--timeout", "20"]
    try:
        done = subprocess.run(
            [*program, "--requirement", str(lock), *options], capture_output=True, text=True, timeout=_TIMEOUT_S
        )
        packages = json.loads(done.stdout)["dependencies"]
    except subprocess.TimeoutExpired as error:
        raise AuditError(f"pip-audit gave no report in {_TIMEOUT_S} s") from error
    except (ValueError, KeyError) as error:
        lines = done.stderr.strip().splitlines() or ["it printed nothing"]
        raise AuditError(lines[-1]) from error
    found = [
        f"{each['name']} {each['version']}: {advisory['id']}, fixed in {', '.join(advisory['fix_versions']) or 'none'}"
        for each in packages
        for advisory in each.get("vulns", ())
    ]
    return Audit(tuple(found), tuple(each["skip_reason"] for each in packages if "skip_reason" in each))


def report(lock: str, result: Audit) -> int:
    """Prints the result of a lock file and returns its exit code."""
    for line in result.vulnerabilities:
        print(f"{lock}: {line}")
    if result.unchecked:
        print(f"{lock}: {len(result.unchecked)} packages were not checked; the first: {result.unchecked[0]}")
        return 2
    if not result.vulnerabilities:
        print(f"{lock}: no known vulnerabilities")
        return 0
    reason = PINNED_BY_OTHERS.get(lock)
    if reason is not None:
        print(f"{lock}: not counted, because {reason}")
        return 0
    return 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Audits the lock files and returns the largest of their exit codes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("locks", nargs="*", default=list(FILES), metavar="LOCK", help="lock files (default: all)")
    worst = 0
    for lock in parser.parse_args(arguments).locks:
        try:
            worst = max(worst, report(lock, audit(ROOT / lock)))
        except AuditError as error:
            print(f"{lock}: not checked: {error}")
            worst = 2
    if worst == 2:
        text = "error: the advisories could not be read for every package. This needs access to https://pypi.org"
        print(text, file=sys.stderr)
    return worst


if __name__ == "__main__":
    sys.exit(main())
