"""Writes the table of checks in ``docs/reliability.md``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tools.reliability.registry import Check, Outcome

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
_HEAD = ("| check | promise | figure | limit | passes | run |", "|---|---|---|---|---|---|")
_MAX_REASON_CHARS = 100
"""Maximum length of the reason of a failure in the table."""


def row(check: Check, outcome: Outcome, stamp: str) -> str:
    """Returns the row of a check. If the check did not pass, the row states the reason."""
    figure = "-" if outcome.figure is None else f"{number_text(outcome.figure)} {check.unit_of(outcome)}"
    reason = " ".join(outcome.reason.replace("|", "/").split())[:_MAX_REASON_CHARS]
    verdict = "yes" if outcome.passed else f"no: {reason or 'over the limit'}"
    return f"| {check.id} | {check.promise} | {figure} | {limit_text(check)} | {verdict} | {stamp} |"


def limit_text(check: Check) -> str:
    """Returns the limit of a check as the table shows it: ``2.5`` for a maximum, ``>= 0.95`` for a minimum."""
    limit = number_text(check.limit)
    return limit if check.comparison == "<=" else f"{check.comparison} {limit}"


def number_text(number: float) -> str:
    """Returns a number with four digits, or with all digits before the point if these are more."""
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}"


def write(page: Path, checks: Sequence[Check], outcomes: Sequence[tuple[Check, Outcome]], stamp: str) -> None:
    """Replaces the table of a page. A check without an outcome keeps its row, or gets a row without a figure."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    old, _, after = rest.partition(END)
    rows = {match[1]: match[0] for match in re.finditer(r"^\| (\w+) \| .*$", old, re.M)}
    rows |= {check.id: row(check, outcome, stamp) for check, outcome in outcomes}
    missing = Outcome(False, None, "not run yet")
    lines = [rows.get(check.id) or row(check, missing, "-") for check in checks]
    page.write_text(f"{before}{BEGIN}\n" + "\n".join([*_HEAD, *lines]) + f"\n{END}{after}", encoding="utf-8")
