"""Hands computed prompts over between replicas while replicas are lost and handed blocks are damaged.

    python tests/long/kv_handover.py --hand-overs 10000

Random scripts run on the real router and schedulers, with all combinations of roles. The tokens of the fake devices
depend on every token that they read. Between the operations of a script, replicas die and return, bits of blocks in the
hand-over pool flip, and blocks of earlier hand-overs overwrite others. Each request must get the text that it gets when
it runs alone, and at the end no block may be held.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.handover_simulation import ROLES, play_hand_overs
from support.script_drawing import draw_script

_SHOWN = ("completed", "misses", "reloads", "refused", "agents lost", "bad blocks", "requests", "preemptions", "swaps")


def run(num_hand_overs: int, seed: int, faults: float) -> Counter[str]:
    """Runs scripts until this number of hand-overs has ended. Raises AssertionError for a wrong text or a leak."""
    seen: Counter[str] = Counter()
    while seen["completed"] + seen["misses"] < num_hand_overs:
        routed = play_hand_overs(draw_script(seed), ROLES[seed % len(ROLES)], seed, faults=faults)
        assert routed.split is not None
        assert routed.handed is not None
        figures = routed.split.figures
        seen.update(completed=figures.completed, misses=figures.misses, reloads=figures.reloads)
        seen.update(refused=figures.refused, scripts=1, requests=len(routed.requests))
        seen.update(routed.seen)
        seen["bad blocks"] += routed.handed.num_bad
        seed += 1
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hand-overs", type=int, default=10_000, help="number of hand-overs (default 10000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first script (default 0)")
    parser.add_argument("--faults", type=float, default=0.3, help="chance of a damaged block at each operation")
    options = parser.parse_args()
    begin = time.process_time()
    seen = run(options.hand_overs, options.seed, options.faults)
    ended = seen["completed"] + seen["misses"]
    print(f"{ended} hand-overs in {seen['scripts']} scripts: 0 wrong texts, 0 leaked blocks")
    print(", ".join(f"{name}: {seen[name]}" for name in _SHOWN))
    print(f"{time.process_time() - begin:.0f} s of CPU time")


if __name__ == "__main__":
    main()
