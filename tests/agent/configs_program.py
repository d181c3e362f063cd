"""Runs small versions of configs with native operators, and prints the executed graphs and the results as JSON.

python tests/agent/configs_program.py RANK JSON

The argument JSON has the names of configs. For each config, it has the name of its exchange, which is null for an agent
without a group, and whether the agent of rank 0 also runs it with fused operators on one agent. test_every_config.py
starts it.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "agent")]

from step_driver import Part, Sampled, StepDriver, blocks_for  # noqa: E402

from agent.backends.runtime import start_runtime  # noqa: E402
from llm_serving.ipc.exchange import ExchangeLayout, ExchangeMemory  # noqa: E402
from support.narrow_configs import VOCAB, narrow_config  # noqa: E402

DECODES = 12
SAMPLING: tuple[dict[str, float], ...] = (
    {},
    {"temperature": 0.05, "top_k": 30, "seed": 11},
    {"temperature": 0.05, "top_k": 100, "seed": 12},
)
"""Sampling parameters: greedy, random among the candidates of the device, and random among whole logits (``top_k``
above 64).

The temperatures fit logits with a standard deviation of about 0.3.
"""


def run_steps(driver: StepDriver) -> list[dict[str, Any]]:
    """Runs whole prompts, then a prompt in two chunks together with a decode, then decodes. Returns the results of each
    sampled position.

    The input tokens are fixed in advance, so that one different sampled token does not change all later positions.
    """
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, VOCAB, size).tolist() for size in (9, 20, 40)]
    texts = [[*prompt, *rng.integers(0, VOCAB, DECODES + 1).tolist()] for prompt in prompts]

    def part(row: int, start: int, end: int) -> Part:
        samples, known = end >= len(prompts[row]), len(prompts[row])
        return Part(texts[row][start:end], start, blocks_for(row, 64), row, samples, max(end - known, 0),
                    sampling=SAMPLING[row])  # fmt: skip

    outputs = driver.prefill(part(0, 0, 9), part(1, 0, 20))
    driver.prefill(part(2, 0, 24))
    outputs += driver.prefill(part(2, 24, 40), part(0, 9, 10))
    for step in range(DECODES):
        outputs += driver.decode(*[part(row, len(prompts[row]) + step, len(prompts[row]) + step + 1) for row in (1, 2)])
    return [_values(output) for output in outputs]


def _values(output: Sampled) -> dict[str, Any]:
    return {"token": output.token, "ids": output.top_ids, "logits": output.top_logits}


def executed_graphs(driver: StepDriver) -> dict[str, list[str]]:
    """Returns the listing of each graph that MindSpore has compiled for the CPU and executed, by the graph's kind."""
    from mindspore.graph.api import _cell_graph_executor

    from tools.ascend_graph.listing import list_graph
    from tools.ascend_graph.mind_ir import read_graph

    steps: Any = driver.runner._graph
    graphs = {kind.value: graph for kind, graph in steps._graphs.items()}
    graphs |= {"candidates": steps._sampling._candidates, "rows": steps._sampling._rows}
    return {
        kind: list_graph(read_graph(_cell_graph_executor._get_func_graph_proto(graph.cell, graph._phase, "mind_ir")))
        for kind, graph in graphs.items()
    }


def run_config(name: str, segment: str | None, with_fused: bool, rank: int) -> dict[str, Any]:
    config = narrow_config(name, "native")
    start_runtime(config)
    exchange = None
    if segment is not None:
        layout = ExchangeLayout.of(config.shape, config.slot_limits(), config.parallel_config)
        exchange = ExchangeMemory.attach(segment, layout)
    driver = StepDriver(config, rank, exchange)
    results = run_steps(driver)
    if rank > 0:
        return {}
    found = {"native": results, "graphs": executed_graphs(driver)}
    if not with_fused:
        return found
    fused = narrow_config(name, "fused")
    alone = replace(fused.parallel_config, tensor_parallel=1)
    found["fused"] = run_steps(StepDriver(replace(fused, parallel_config=alone)))
    return found


if __name__ == "__main__":
    number, job = int(sys.argv[1]), json.loads(sys.argv[2])
    print(json.dumps({name: run_config(name, *given, number) for name, given in job.items()}), flush=True)
    os._exit(0)
