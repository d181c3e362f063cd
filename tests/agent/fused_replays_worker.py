"""Runs one agent of a group in a separate process.

The agent runs the same fused steps as replays of recorded launches and by the graph.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from group_program import print_models, start_driver  # noqa: E402
from runner_worker import decodes  # noqa: E402
from step_driver import Part, StepDriver, blocks_for  # noqa: E402

from agent.group.exchange import all_agree  # noqa: E402
from support.agent_group import Setup  # noqa: E402
from support.golden_files import golden_of  # noqa: E402
from support.position_bits import FORCED_STEPS  # noqa: E402

PLANTS = ("unnamed", "no launches", "differs", "differs later", "writes nothing")
"""Faults that a test plants in agent 0.

- The recording does not name the parameters' memory.
- The agent reports that it has no recording.
- The first or the second replay has wrong bits.
- The replay writes nothing.
"""


def run_model(setup: Setup, model: dict[str, Any], rank: int) -> dict[str, Any]:
    golden, driver = golden_of(model["name"]), start_driver(setup, model, rank)
    graph, prompts = driver.runner._graph, [case["prompt"] for case in golden["cases"][:3]]
    tokens = golden["cases"][0]["tokens"][:FORCED_STEPS]
    result: dict[str, Any] = {way: decodes(driver, prompts, tokens) for way in ("replayed", "replayed again")}
    result |= {"problem": graph.replays.problem, "replays": graph.replays.is_confirmed}
    honest = graph.replays
    result["recorded by large steps"] = recorded_by_large_steps(driver, honest)
    result["planted"] = {name: run_planted(driver, honest, name, rank, prompts, tokens) for name in PLANTS}
    honest._launches, honest._confirmed, honest._problem = None, False, "asked for"
    graph.replays = honest
    result["by the graph"] = decodes(driver, prompts, tokens)
    return result


def recorded_by_large_steps(driver: StepDriver, usual: Any) -> bool:
    """Returns whether launches are recorded from two steps that are larger than ``MAX_COMPARED_TOKENS``.

    In a step of this size, the agent does not compare the replay with the graph.
    """
    from agent.step_graph.replay.fused import MAX_COMPARED_TOKENS, FusedReplays

    graph = driver.runner._graph
    graph.replays = FusedReplays(usual._run_graph, usual._tensors, usual._all_agree)
    for _ in range(2):
        driver.runner.reset()
        driver.prefill(Part([5] * (MAX_COMPARED_TOKENS + 1), 0, blocks_for(0), 0))
    return graph.replays._launches is not None


def run_planted(driver: StepDriver, usual: Any, plant: str, rank: int, prompts: Any, tokens: Any) -> dict[str, Any]:
    """Runs decode steps while agent 0 has the fault ``plant``, which is one of ``PLANTS``.

    Returns the digests of the steps, and the reason that the agent reports for not replaying them.
    """
    from agent.kernels.launches import RecordedLaunches  # this import loads MindSpore, which must be set up before
    from agent.step_graph.replay.fused import FusedReplays

    graph, asked = driver.runner._graph, [0]
    tensors = usual._tensors

    def agrees(vote: bool) -> bool:
        asked[0] += 1
        lies = rank == 0 and asked[0] == {"no launches": 1, "differs": 3, "differs later": 4}.get(plant)
        return all_agree(driver.runner._part, vote and not lies)

    honest = RecordedLaunches.run
    if plant == "writes nothing" and rank == 0:
        results: list[Any] = []

        def keeps(self: RecordedLaunches, *, keeps_pace: bool = False) -> Any:
            before = [result.copy() for result in results]
            answer = honest(self, keeps_pace=keeps_pace)
            for result, values in zip(results, before, strict=True):
                result[...] = values
            return answer

        results += [graph._logits] if graph._logits.size else [graph._stream]
        RecordedLaunches.run = keeps  # type: ignore[method-assign]
    named = tensors[:1] if plant == "unnamed" and rank == 0 else tensors
    graph.replays = FusedReplays(usual._run_graph, named, agrees)
    found = {"digests": decodes(driver, prompts, tokens), "problem": graph.replays.problem}
    found["replays"] = graph.replays.is_confirmed
    RecordedLaunches.run = honest  # type: ignore[method-assign]
    return found


if __name__ == "__main__":
    print_models(run_model)
