#!/usr/bin/env python3
"""Writes the reference pages of docs/ from the code; with --check, exits with 1 if a page is out of date."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tools.reference.chat_configuration import chat_configuration_page  # noqa: E402
from tools.reference.command_line import command_line_page  # noqa: E402
from tools.reference.configuration import configuration_page  # noqa: E402
from tools.reference.constants import constants_page  # noqa: E402
from tools.reference.files import files_page  # noqa: E402
from tools.reference.log_events import log_events_page  # noqa: E402
from tools.reference.metrics import metrics_page  # noqa: E402
from tools.reference.sampling_parameters import sampling_parameters_page  # noqa: E402

PAGES = {
    "configuration.md": configuration_page,
    "metrics.md": metrics_page,
    "log_events.md": log_events_page,
    "command_line.md": command_line_page,
    "sampling_parameters.md": sampling_parameters_page,
    "files.md": files_page,
    "constants.md": constants_page,
    "chat_configuration.md": chat_configuration_page,
}


def main() -> int:
    """Writes or checks the pages; returns 1 if one is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is out of date")
    options = parser.parse_args()
    stale = []
    for name, page in PAGES.items():
        path, text = ROOT / "docs" / name, page()
        if options.check:
            stale += [] if path.is_file() and path.read_text(encoding="utf-8") == text else [name]
        else:
            path.write_text(text, encoding="utf-8")
    if stale:
        sys.stderr.write(f"out of date: {', '.join(stale)}; run: make docs\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
