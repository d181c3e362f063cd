"""Hands computed prompts over between replicas while replicas are lost and handed blocks are damaged.

    python tests/long/kv_handover.py --hand-overs 10000 [--tcp [--one-sided]]

Random scripts run on the real router and schedulers, with all combinations of roles. The tokens of the fake devices
depend on every token that they read. Between the operations of a script, replicas die and return, bits of blocks in the
hand-over pool flip, and blocks of earlier hand-overs overwrite others. Each request must get the text that it gets when
it runs alone, and at the end no block may be held.

With ``--tcp``, each replica has a pool of its own, as on several machines. ``TcpTransport`` sends the blocks through
real sockets of this machine. Bits of the sent blocks flip, connections are cut in the middle of a block, receivers end,
and transfers of lost replicas arrive late.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.handover_simulation import ROLES, play_hand_overs
from support.long_program import run_program
from support.script_drawing import draw_script

_SHOWN = ("completed", "misses", "reloads", "refused", "agents lost", "bad blocks", "requests", "preemptions", "swaps",
          "loads from tiers", "stores to tiers")  # fmt: skip
_SHOWN_WITH_TCP = ("undisturbed", "flipped bit", "cut connection", "killed receiver", "late transfers",
                   "failed transfers")  # fmt: skip


def run(
    num_hand_overs: int, seed: int, faults: float, *, tcp: bool, one_sided: bool = False, tier_hosts: int = 0
) -> Counter[str]:
    """Runs scripts until this number of hand-overs has ended. Raises AssertionError for a wrong text or a leak."""
    seen: Counter[str] = Counter()
    while seen["completed"] + seen["misses"] < num_hand_overs:
        roles, ways = ROLES[seed % len(ROLES)], {"tcp": tcp, "one_sided": one_sided}
        routed = play_hand_overs(draw_script(seed), roles, seed, faults=faults, tier_hosts=tier_hosts, **ways)
        assert routed.split is not None
        figures = routed.split.figures
        seen.update(completed=figures.completed, misses=figures.misses, reloads=figures.reloads)
        seen.update(refused=figures.refused, scripts=1, requests=len(routed.requests))
        seen.update(routed.seen)
        seen["bad blocks"] += sum(memory.num_bad for memory in routed.memories)
        seen["failed transfers"] += figures.failed_transfers
        seen.update({} if routed.pools is None else routed.pools.seen)
        seed += 1
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hand-overs", type=int, default=10_000, help="number of hand-overs (default 10000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first script (default 0)")
    parser.add_argument("--faults", type=float, default=0.3, help="chance of a damaged block at each operation")
    parser.add_argument("--tcp", action="store_true", help="send the blocks through TCP connections")
    parser.add_argument("--one-sided", action="store_true", help="with --tcp: contents outside the connections")
    parser.add_argument("--tier-blocks", type=int, default=0, help="host blocks of each replica's KV tiers (default 0)")
    options = parser.parse_args()
    if options.one_sided and not options.tcp:
        parser.error("--one-sided needs --tcp")
    begin = time.process_time()
    ways = {"tcp": options.tcp, "one_sided": options.one_sided}
    seen = run(options.hand_overs, options.seed, options.faults, tier_hosts=options.tier_blocks, **ways)
    ended = seen["completed"] + seen["misses"]
    print(f"{ended} hand-overs in {seen['scripts']} scripts: 0 wrong texts, 0 leaked blocks")
    shown = (*_SHOWN, *_SHOWN_WITH_TCP) if options.tcp else _SHOWN
    print(", ".join(f"{name}: {seen[name]}" for name in shown))
    print(f"{time.process_time() - begin:.0f} s of CPU time")


if __name__ == "__main__":
    sys.exit(run_program(main))
