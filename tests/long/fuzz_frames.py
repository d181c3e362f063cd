"""Sends damaged messages, in both directions, to the frame decoder and to the code that first handles a message.

    python tests/long/fuzz_frames.py --frames 100000 [--seed N]

The receiver must decode a stream or refuse it with ProtocolError or AgentLostError. Prints one JSON line for each
direction, with the numbers of accepted, refused and crashed cases. Exits with 1 after a crash, a hang, or a growth of
memory above the limit.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from support.frame_fuzz import fuzz_frames  # noqa: E402
from support.long_program import run_program  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=100_000, help="streams in each direction")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first stream; each next is one more")
    arguments = parser.parse_args()
    found = fuzz_frames(arguments.frames, arguments.seed)
    for direction, findings in found.items():
        print(f'{{"direction": "{direction}", {findings.figures()[1:]}')
    return 0 if all(findings.is_good for findings in found.values()) else 1


if __name__ == "__main__":
    sys.exit(run_program(main))
