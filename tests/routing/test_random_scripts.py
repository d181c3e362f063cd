"""Runs the scheduler's random scripts on two and three replicas behind the router.

After every event, ``RoutedSimulation`` checks that each request is in exactly one place and that all schedulers pass
their checks. No replica is idle while a request waits. At the end, all blocks are free, and each request has the text
that it gets when it runs alone. This also holds if several replicas computed the text.
"""

from __future__ import annotations

from collections import Counter

import pytest

from llm_serving.routing.placement import Routing
from support.routed_simulation import play_routed
from support.script_drawing import draw_script
from support.sweeps import with_sweeps


@pytest.mark.parametrize(
    ("num_replicas", "num_scripts"), with_sweeps([(2, 20), (3, 35), (2, 120), (3, 120)], lambda _, count: count > 35)
)
def test_texts_do_not_depend_on_replicas(num_replicas: int, num_scripts: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(num_scripts):
        routed = play_routed(draw_script(9000 * num_replicas + seed), num_replicas, seed)
        seen.update(routed.seen)
        seen["requests of several replicas"] += sum(len(by) > 1 for by in routed.served_by.values())
        seen["replicas used"] += len(set().union(*routed.served_by.values()))
        for replica in routed.router.replicas:
            seen.update({f"placed by {why.value}": number for why, number in replica.num_placed.items()})
            seen["recalled"] += replica.num_recalled
    missing = [name for name in EXPECTED if not seen[name]]
    assert not missing, (missing, seen)


EXPECTED = (
    "agents lost", "deadlines", "ends from outside", "failed steps", "placed by load", "placed by prefix",
    "preemptions", "recalled", "requests of several replicas", "requests that lost their replica", "swaps",
)  # fmt: skip


@pytest.mark.parametrize("routing", [Routing.LEAST_LOADED, Routing.ROUND_ROBIN])
def test_texts_with_every_routing_rule(routing: Routing) -> None:
    for seed in range(12):
        play_routed(draw_script(500 + seed), 3, seed, routing)
