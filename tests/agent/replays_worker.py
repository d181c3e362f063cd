"""One agent of a group whose decodes are recorded and replayed, beside the same by the graph; in a process of its own,
as ``group_worker`` is. ``extra`` of the setup may plant what keeps one agent's launches from being replayed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from agent_group import Setup  # noqa: E402
from golden_files import golden_of  # noqa: E402
from group_program import print_models, start_driver  # noqa: E402
from position_bits import FORCED_STEPS  # noqa: E402
from runner_worker import decodes  # noqa: E402
from step_driver import StepDriver  # noqa: E402

from agent.kernels.launches import RecordedLaunches  # noqa: E402

PLANTS = ("unnamed", "differs", "differs later", "refuses")
"""What agent 0 finds when it records: its parameters' memory is not named; a replay has other bits, the first or the
second; an operator refuses its inputs in the middle of a replay."""


def run_model(setup: Setup, model: dict[str, Any], rank: int) -> dict[str, Any]:
    golden, driver = golden_of(model["name"]), start_driver(setup, model, rank)
    graph, prompts = driver.runner._graph, [case["prompt"] for case in golden["cases"][:3]]
    tokens, replays = golden["cases"][0]["tokens"][:FORCED_STEPS], graph.replays
    result: dict[str, Any] = {way: decodes(driver, prompts, tokens) for way in ("replayed", "replayed again")}
    result |= {"problem": replays.problem, "sizes": sorted(replays.sizes)}
    graph.replays = None
    result["by the graph"] = decodes(driver, prompts, tokens)
    if setup.tensor_parallel > 1:
        result["planted"] = {name: run_planted(driver, name, rank, prompts, tokens) for name in PLANTS}
    return result


def run_planted(driver: StepDriver, plant: str, rank: int, prompts: Any, tokens: Any) -> dict[str, Any]:
    """The decodes with one of ``PLANTS`` in agent 0: what each of them comes to, and what is given as the reason."""
    from agent.decode_replays import DecodeReplays  # MindSpore must not be imported before the runtime is set up
    from agent.step_graph.dynamic_cell import GraphKind

    graph, asked, ops = driver.runner._graph, [0], driver.runner._graph._ops
    decode = graph._graphs[GraphKind.DECODE]

    def agrees(says_so: bool) -> bool:
        asked[0] += 1
        lies = rank == 0 and asked[0] == {"differs": 2, "differs later": 3}.get(plant)
        answer: bool = ops.stage_agrees(says_so and not lies)
        return answer

    tensors = [] if plant == "unnamed" and rank == 0 else [*decode.parameters(), *decode.constants()]
    replays = graph.replays = DecodeReplays(decode.run, tensors, driver.config.slot_limits(), agrees)
    honest = RecordedLaunches.agrees
    if plant == "refuses" and rank == 0:
        slots = replays._vectors[2]

        def without_slots(self: RecordedLaunches, result: Any) -> bool:
            saved = slots.copy()
            slots[:] = 2**27
            try:
                return honest(self, result)
            finally:
                slots[:] = saved

        RecordedLaunches.agrees = without_slots  # type: ignore[method-assign]
    found = {"digests": decodes(driver, prompts, tokens), "problem": replays.problem, "sizes": sorted(replays.sizes)}
    RecordedLaunches.agrees = honest  # type: ignore[method-assign]
    graph.replays = None
    return found


if __name__ == "__main__":
    print_models(run_model)
