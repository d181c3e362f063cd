"""Lists the published combinations of MindSpore, CANN and driver (Ascend HDK)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tools.diagnosis import sources

Version = tuple[int, int]
"""The first two numbers of a version, such as 25.3 of ``25.3.RC1``."""


@dataclass(frozen=True, slots=True)
class Pairing:
    """A row of the published table: MindFormers, MindSpore, CANN and driver that were tested together."""

    mindspore: str
    cann: str
    driver: str


PAIRINGS = (
    Pairing("2.9.0", "9.0.0", "26.0.RC1"),
    Pairing("2.7.2", "8.5.0", "25.5.0"),
    Pairing("2.7.1", "8.3.RC1", "25.3.RC1"),
    Pairing("2.7.0", "8.2.RC1", "25.2.0"),
    Pairing("2.6.0", "8.1.RC1", "25.0.RC1"),
    Pairing("2.4.10", "8.0.0", "24.1.0"),
    Pairing("2.4.0", "8.0.RC3", "24.1.RC3"),
    Pairing("2.3.0", "8.0.RC2", "24.1.RC2"),
)
"""The table of combinations that MindFormers publishes (``sources.MINDFORMERS_VERSIONS``)."""

CANN_OF_MINDSPORE = {(2, 9): ((8, 2), (8, 3), (8, 5), (9, 0))}
"""CANN versions that MindSpore accepts without a warning (``mindspore/run_check/_check_version.py`` of the wheel)."""

DRIVERS_OF_CANN: dict[Version, tuple[tuple[Version, ...], str]] = {
    (9, 1): (((25, 2), (25, 3), (25, 5), (25, 7), (26, 0), (26, 1)), sources.CANN_910_RELEASE),
    (9, 0): (((25, 0), (25, 2), (25, 3), (25, 5), (25, 7), (26, 0), (26, 1)), sources.CANN_910_RELEASE),
    (8, 5): (((25, 0), (25, 2), (25, 3), (25, 5), (25, 7), (26, 0), (26, 1)), sources.CANN_910_RELEASE),
    (8, 3): (((25, 3),), sources.MINDFORMERS_VERSIONS),
    (8, 2): (((24, 1), (25, 0), (25, 2)), sources.MINDIE_RELEASE),
    (8, 1): (((25, 0),), sources.MINDFORMERS_VERSIONS),
    (8, 0): (((24, 1),), sources.MINDFORMERS_VERSIONS),
}
"""For each CANN version: the driver versions that a public page names as compatible, and the address of this page."""


def parse_version(text: str) -> Version | None:
    """Returns the first two numbers of a version, such as (8, 3) for ``8.3.RC1``, or None."""
    match = re.match(r"\s*[vV]?(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def recommended(mindspore: str) -> Pairing | None:
    """Returns the published combination for a MindSpore version, or None."""
    wanted = parse_version(mindspore)
    return next((row for row in PAIRINGS if row.mindspore == mindspore), None) or next(
        (row for row in PAIRINGS if parse_version(row.mindspore) == wanted), None
    )


def format_versions(versions: tuple[Version, ...]) -> str:
    return ", ".join(f"{major}.{minor}" for major, minor in versions)
