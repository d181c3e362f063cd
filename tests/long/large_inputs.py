"""Sends large texts, token lists and bodies to a real server, and measures the stalls of its event loop.

    python tests/long/large_inputs.py [--set KEY=VALUE]

Each text repeats one kind of character: a letter, white space, combining marks or rare characters. Each has two sizes:
the largest that the server reads, and 50 MB. Prints a line for each input and one JSON line. Exits with 1 if an input
stalls the loop for more than 100 ms or gets a 5xx. The time for which the server waits for a processor is measured and
subtracted.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from support.large_inputs import figures, large_requests, send_large  # noqa: E402
from support.long_program import run_program  # noqa: E402
from support.server_process import running_server  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    overrides = parser.parse_args().overrides
    found = []
    with (
        tempfile.TemporaryDirectory(prefix="large_inputs_") as folder,
        running_server(Path(folder), overrides, forks=False) as server,
    ):
        for each in send_large(server, large_requests()):
            found.append(each)
            print(each.text(), flush=True)
    values = figures(found)
    print(json.dumps(values))
    return 0 if values["pass"] else 1


if __name__ == "__main__":
    sys.exit(run_program(main))
