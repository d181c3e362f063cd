"""Runs one agent with graph-kernel fusion in a separate process.

The agent runs the same native steps as replays of recorded launches and by the graph. test_graph_kernel_fusion.py
starts this program.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from group_program import print_models, start_driver  # noqa: E402
from runner_worker import decodes, native_replays, prompts_and_chunks  # noqa: E402

from llm_serving.config import Config  # noqa: E402
from support.agent_group import Setup  # noqa: E402
from support.golden_files import golden_of  # noqa: E402
from support.position_bits import FORCED_STEPS  # noqa: E402


class FusedSetup(Setup):
    """A setup that acts as if its MindFormers YAML had ``context.enable_graph_kernel: True``."""

    def config(self, folder: Path) -> Config:
        config = super().config(folder)
        return replace(config, context=replace(config.context, enable_graph_kernel=True))


def run_model(setup: Setup, model: dict[str, Any], rank: int) -> dict[str, Any]:
    parallel = (setup.tensor_parallel, setup.pipeline_parallel)
    fused = FusedSetup(*parallel, setup.dtype, setup.op_table, setup.weights, setup.kv)
    golden, driver = golden_of(model["name"]), start_driver(fused, model, rank)
    graph, prompts = driver.runner._graph, [case["prompt"] for case in golden["cases"][:3]]
    tokens = golden["cases"][0]["tokens"][:FORCED_STEPS]

    def steps() -> list[str]:
        return decodes(driver, prompts, tokens) + prompts_and_chunks(driver)

    result: dict[str, Any] = {way: steps() for way in ("replayed", "replayed again")} | native_replays(graph)
    result["before"] = {kind: each.before for kind, each in graph.operators().items()}
    result["laid out caches"] = len(driver.runner._model.ops.hooks.laid_out_caches)
    result["summary"] = driver.runner.summary()
    graph.replays = {}
    result["by the graph"] = steps()
    return result


if __name__ == "__main__":
    print_models(run_model)
