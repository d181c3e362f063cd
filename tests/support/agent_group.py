"""Starts the agents of a group as processes.

Each process has its own StepDriver, and all drivers run the same steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from llm_serving.config import Config
from llm_serving.ipc.exchange import ExchangeLayout, ExchangeMemory
from performance.models.folders import write_model
from performance.models.variants import FAMILY_VARIANTS, VARIANTS, Variant
from support.forked_programs import ForkedProgram
from support.step_config import make_config

FOLDER = Path(__file__).resolve().parents[1] / "agent"
TIMEOUT_S = 850
WAYS = ("free", "forced", "invariance", "penalised")
"""The parts of ``group_worker.py``. ``free`` generates from the model's own tokens, and ``forced`` from the oracle's
tokens. ``invariance`` computes the same positions in several kinds of steps. ``penalised`` generates with penalties.
"""


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings with which the group runs every model."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    dtype: str = "float32"
    op_table: str = "fused"
    weights: str = "auto"
    kv: str = "auto"
    extra: dict[str, Any] = field(default_factory=dict)

    def config(self, folder: Path) -> Config:
        parallel = {
            "parallel_config.tensor_parallel": self.tensor_parallel,
            "parallel_config.pipeline_parallel": self.pipeline_parallel,
        }
        return make_config(folder, self.dtype, self.op_table, self.weights, self.kv, extra={**parallel, **self.extra})

    def __str__(self) -> str:
        parallel = f"tp{self.tensor_parallel}-pp{self.pipeline_parallel}"
        return "-".join([parallel, self.dtype, self.op_table, self.weights, self.kv])


def run_group(
    setup: Setup,
    folders: dict[str, Path],
    worker: str = "group_worker.py",
    routes: Mapping[str, Sequence[int]] | None = None,
    ways: Sequence[str] = WAYS,
) -> list[dict[str, Any]]:
    """Runs a group of agents with these models. Returns the output of each rank.

    ``ways`` are the parts that ``group_worker.py`` runs.

    If an agent fails, the test fails with the messages of all agents. If ``routes`` is given, the agents record the
    experts that compute each token. If ``routes`` has a list of experts for a model, the tokens of this model are sent
    to these experts.
    """
    with ExitStack() as stack:
        models = []
        for name, folder in folders.items():
            model: dict[str, Any] = {"name": name, "folder": str(folder), "exchange": None, "ways": list(ways)}
            if routes is not None:
                model["routes"] = list(routes.get(name, ()))
            config = setup.config(folder)
            if config.parallel_config.group_size > 1:
                layout = ExchangeLayout.of(config.shape, config.slot_limits(), config.parallel_config)
                exchange = ExchangeMemory.create(layout)
                stack.callback(exchange.close)
                model["exchange"] = exchange.name
            models.append(model)
        job = json.dumps({"setup": asdict(setup), "models": models})
        ranks = range(setup.tensor_parallel * setup.pipeline_parallel)
        agents = [stack.enter_context(ForkedProgram(FOLDER / worker, str(rank), job)) for rank in ranks]
        ended = [agent.wait(TIMEOUT_S) for agent in agents]
    problems = [agent.stderr[-3000:] for agent in ended if agent.returncode != 0]
    assert not problems, "\n".join(problems)
    return [json.loads(agent.stdout.splitlines()[-1]) for agent in ended]


def with_layers(variant: Variant, number: int) -> Variant:
    """Returns the model with at most its first ``number`` layers.

    It is for tests that compare runs with each other and not with an oracle. The compilation of native graphs takes
    time in proportion to the number of layers.
    """
    number = min(number, variant.config_json()["num_hidden_layers"])
    kinds = {key: value[:number] for key, value in variant.config.items() if key == "layer_types"}
    return replace(variant, config={**variant.config, "num_hidden_layers": number, **kinds})


def seeded_runs(
    setups: Mapping[str, Setup], scratch: Path, worker: str, num_layers: Callable[[str], int] = lambda name: 2
) -> Callable[[str, str], list[dict[str, Any]]]:
    """Returns a function that runs a seeded model in a named setup and returns the output of each agent.

    Each pair of model and setup runs only once. The models have ``num_layers(name)`` layers, where ``name`` is that of
    the setup.
    """
    seeded = {**VARIANTS, **FAMILY_VARIANTS}

    @cache
    def run(name: str, model: str) -> list[dict[str, Any]]:
        folder = scratch / f"{model} {num_layers(name)}"
        if not folder.exists():
            write_model(with_layers(seeded[model], num_layers(name)), folder)
        return [agent[model] for agent in run_group(setups[name], {model: folder}, worker)]

    return run
