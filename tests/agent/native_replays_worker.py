"""Runs one agent of a group in a separate process.

The agent runs the same native steps as replays of recorded launches and by the graph. Also plants faults that prevent
one agent from replaying.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from group_program import print_models, start_driver  # noqa: E402
from runner_worker import decodes, native_replays, prompts_and_chunks  # noqa: E402
from step_driver import Part, StepDriver, blocks_for  # noqa: E402

from agent.group.exchange import all_agree  # noqa: E402
from agent.kernels import recordings_bytes  # noqa: E402
from agent.kernels.launches import RecordedLaunches  # noqa: E402
from llm_serving.planning.kernel_memory import MOST_REPLAYED_TOKENS  # noqa: E402
from support.agent_group import Setup  # noqa: E402
from support.golden_files import golden_of  # noqa: E402
from support.position_bits import FORCED_STEPS  # noqa: E402

PLANTS = ("unnamed", "differs", "differs later", "refuses")
"""Faults that a test plants in agent 0.

- The recording does not name the parameters' memory.
- The first or the second replay has wrong bits.
- An operator refuses its inputs during a replay.
"""


PLANTED_STEPS = 10
"""Number of tokens that each sequence decodes with a planted fault. All faults appear in the first three steps."""


def run_model(setup: Setup, model: dict[str, Any], rank: int) -> dict[str, Any]:
    golden, driver = golden_of(model["name"]), start_driver(setup, model, rank)
    graph, prompts = driver.runner._graph, [case["prompt"] for case in golden["cases"][:3]]
    tokens = golden["cases"][0]["tokens"][:FORCED_STEPS]

    def steps() -> list[str]:
        return decodes(driver, prompts, tokens) + prompts_and_chunks(driver) + large_steps(driver)

    result: dict[str, Any] = {"replayed": steps()}
    runs = counted_runs(graph)
    result |= {"replayed again": steps(), "runs of the graph": len(runs)} | native_replays(graph)
    caches = {each.name: each for kind in graph._graphs.values() for each in kind.parameters()}
    result["bytes of replays"] = recordings_bytes()
    result["bytes of a cache"] = min(each.nbytes for name, each in caches.items() if name.endswith("key_cache"))
    graph.replays = {}
    result["by the graph"] = steps()
    if setup.tensor_parallel > 1:
        few = tokens[:PLANTED_STEPS]
        result["decodes by the graph"] = decodes(driver, prompts, few)
        result["planted"] = {name: run_planted(driver, name, rank, prompts, few) for name in PLANTS}
    return result


def large_steps(driver: StepDriver) -> list[str]:
    """Runs a step with more tokens than replays usually have, if the config allows it. Returns digests of the results.
    """
    length = driver.config.max_model_len - 6
    if driver.config.max_num_batched_tokens <= MOST_REPLAYED_TOKENS:
        return []
    driver.runner.reset()
    prompts = [[3 + (7 + row) * index % (driver.config.shape.vocab_size - 3) for index in range(length)]
               for row in range(3)]  # fmt: skip
    parts = [Part(prompt, 0, blocks_for(row), row) for row, prompt in enumerate(prompts)]
    return [output.digest for output in driver.prefill(*parts)]


def counted_runs(graph: Any) -> list[None]:
    """Returns a list to which each later run of a graph by MindSpore adds an element."""
    runs: list[None] = []
    for kind, compiled in graph._graphs.items():

        def run(tensors: Any, inner: Any = compiled.run) -> Any:
            runs.append(None)
            return inner(tensors)

        compiled.run = graph.replays[kind]._run_graph = run
    return runs


def run_planted(driver: StepDriver, plant: str, rank: int, prompts: Any, tokens: Any) -> dict[str, Any]:
    """Runs decode steps while agent 0 has the fault ``plant``, which is one of ``PLANTS``.

    Returns the digests of the steps, and the reason that the agent reports for not replaying them.
    """
    from agent.step_graph.dynamic_cell import GraphKind
    from agent.step_graph.replay.native import (
        NativeReplays,  # this import loads MindSpore, which must be set up before
    )

    graph, asked = driver.runner._graph, [0]
    decode = graph._graphs[GraphKind.DECODE]

    def agrees(vote: bool) -> bool:
        asked[0] += 1
        lies = rank == 0 and asked[0] == {"differs": 2, "differs later": 3}.get(plant)
        return all_agree(graph._part, vote and not lies)

    tensors = [] if plant == "unnamed" and rank == 0 else [*decode.parameters(), *decode.constants()]
    limits = driver.config.slot_limits()
    replays = NativeReplays("decode", decode.run, tensors, limits, agrees, inserts_ids=graph._inserts_ids)
    replays.record(graph._empty_entry, is_decode=True)
    graph.replays = {GraphKind.DECODE: replays}
    honest = RecordedLaunches.agrees
    if plant == "refuses" and rank == 0:
        slots = replays._slots

        def without_slots(self: RecordedLaunches, result: Any) -> bool:
            saved = slots.copy()
            slots[:] = 2**27
            try:
                return honest(self, result)
            finally:
                slots[:] = saved

        RecordedLaunches.agrees = without_slots  # type: ignore[method-assign]
    found = {"digests": decodes(driver, prompts, tokens), "problem": replays.problem}
    found["confirmed"] = replays.is_confirmed
    RecordedLaunches.agrees = honest  # type: ignore[method-assign]
    graph.replays = {}
    return found


if __name__ == "__main__":
    print_models(run_model)
