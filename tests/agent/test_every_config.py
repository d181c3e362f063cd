"""Runs small versions of all configs with native operators on the CPU, and compares the executed graphs with Ascend's.

The graph that runs must be the stored listing of the config (``tools/ascend_graph/golden``) apart from sizes. ``make
test`` runs a subset of the configs that contains every primitive of every config, with its types. ``make test-sweeps``
runs the others. The tokens must be those of fused operators, which other tests compare with transformers. ``make test``
compares the tokens of the configs in ``RELIED_ON``. A new config or variant is a new case.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from llm_serving.ipc.exchange import ExchangeLayout, ExchangeMemory
from support.forked_programs import ForkedProgram
from support.narrow_configs import narrow_config
from support.sweeps import with_sweeps
from tools.ascend_graph.variants import VARIANTS, deployments

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("configs_program.py")
CONFIGS = (*deployments(), *VARIANTS)
TIMEOUT_S = 400
CHOSEN_EXPERTS = ("deepseek", "gpt_oss")
"""Beginnings of the names of configs whose router may choose other experts after a rounding. Then any token may differ.
"""
ALTERNATING_LAYERS = ("gpt_oss",)
"""Beginnings of the names of configs in which layers with and without a window alternate."""
RELIED_ON = ("gpt_oss_20b_kbk_pa_dyn.yaml", "deepseek_small_cpu.yaml")
"""Configs whose tokens ``make test`` must compare, because test_families.py leaves their architecture to this file.

test_model_runner.py, test_native_quantised_groups.py and test_expert_parallel.py compare the tokens of other native
operators: int4, int8 with experts, and groups.
"""
Results = dict[str, Any]
Run = Callable[[str, bool], Results]


@cache
def listing_of(name: str) -> dict[str, tuple[str, ...]]:
    """Returns the stored listing of each graph of a config without sizes, by the kind of the graph.

    Leaves out the graph ``draws``, which only devices that launch steps ahead have (test_run_ahead.py executes it).
    """
    stem = name.removesuffix(".yaml")
    files = (ROOT / "tools/ascend_graph/golden").glob(f"{stem}.*.txt")
    files = [file for file in files if not file.name.endswith(".draws.txt")]
    return {
        file.name[len(stem) + 1 : -4]: without_sizes(name, file.read_text(encoding="utf-8").splitlines())
        for file in files
    }


def without_sizes(name: str, lines: Sequence[str]) -> tuple[str, ...]:
    """Returns a listing of a config without sizes, numbers of values, and attributes that only a device adds.

    A layer is left out if it equals the layer before it. If two kinds of layers alternate, a layer is also left out if
    it equals the layer two places before it.

    Two things of the graph of whole prompts differ on a CPU (test_check_ascend_graph.py): the type of ``q_seq_lens``,
    and the operators that convert it.
    """
    lines = [line for line in lines if "TensorToTuple(" not in line and "Cast(q_seq_lens" not in line]
    lines = [re.sub(r"^layers? [0-9].*", "layer", line) for line in lines]
    lines = [re.sub(r" input_is_dynamic_shape=\w+| output_is_dynamic_shape=\w+", "", line) for line in lines]
    lines = [re.sub(r"^  q_seq_lens .*", "  q_seq_lens", line) for line in lines]
    lines = [re.sub(r"(step|before|layer[0-9]+|output)?%[0-9]+", "%", line) for line in lines]
    lines = [re.sub(r"(\w+\[[0-9, ]*\]) (of \S+?|from \S+ to \S+, sha256 \w+)(?=[,)])", r"\1", line) for line in lines]
    lines = [re.sub(r"(?<![\w.])-?[0-9][0-9.e-]*", "#", line) for line in lines]
    kept, num_kinds = list[list[str]](), 2 if name.startswith(ALTERNATING_LAYERS) else 1
    for _, group in groupby(lines, key=_SectionCounter()):
        section = list(group)
        if section not in kept[-num_kinds:]:
            kept.append(section)
    return tuple(line for section in kept for line in section)


@pytest.mark.parametrize(("name", "num_layers"), [("llama_7b_kbk_pa_dyn.yaml", 3), ("gpt_oss_20b_kbk_pa_dyn.yaml", 2)])
def test_only_alternating_layers_are_compared_with_the_layer_two_places_before(name: str, num_layers: int) -> None:
    lines = ["layer 0", "  MatMul", "layer 1", "  MatMul", "layer 2", "  Add", "layer 3", "  MatMul"]
    assert without_sizes(name, lines).count("layer") == num_layers


class _SectionCounter:
    """A callable that returns the number of the section of a line. The first line of a section is not indented."""

    def __init__(self) -> None:
        self._number = 0

    def __call__(self, line: str) -> int:
        self._number += not line.startswith(" ")
        return self._number


WHOLE_PROMPTS = "prefill"
"""Kind of a graph whose primitives ``make test`` may run in a graph of another kind.

At present, these are bfloat16 products, and sums among agents. test_model_runner.py runs such products of whole
prompts, and test_native_replays.py such sums.
"""


@cache
def primitives_of(name: str) -> frozenset[tuple[str, str]]:
    """Returns the primitives of a config's graphs: the kind of the graph, and its line without names of weights.

    Each primitive is also returned with the kind "any". The primitives of ``WHOLE_PROMPTS`` are returned with "any"
    only.
    """
    return frozenset(
        (each, re.sub(r"[a-zA-Z_][\w.]*(?= [a-z]+[0-9]+\[)", "weight", line))
        for kind, lines in listing_of(name).items()
        for line in lines
        if line.startswith(" ")
        for each in ("any", "any" if kind == WHOLE_PROMPTS else kind)
    )


@cache
def unswept() -> frozenset[str]:
    """Returns the configs that ``make test`` runs: they have each primitive of each config, also in graphs of its kind.

    None of them can be left out. The native primitives of the variants have tests of their own (tests/lora,
    test_integer_cache.py).
    """
    chosen = sorted(deployments(), key=lambda name: len(primitives_of(name)))
    for name in tuple(chosen):
        others = [other for other in chosen if other != name]
        if primitives_of(name) <= frozenset().union(*map(primitives_of, others)):
            chosen = others
    return frozenset(chosen)


def test_configs_that_other_tests_rely_on_are_not_left_to_the_sweeps() -> None:
    assert unswept() >= set(RELIED_ON)


def is_swept(name: str) -> bool:
    """Returns whether only ``make test-sweeps`` runs a config."""
    return name not in unswept()


def is_compared(name: str) -> bool:
    """Returns whether the process that runs a config for its graphs also runs it with fused operators."""
    return is_swept(name) or name in RELIED_ON


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Returns a function that gives the results of a config, with those of fused operators if the second argument is
    true. One process runs all configs of ``make test`` that have one agent.
    """

    @cache
    def printed(names: tuple[str, ...], compared: tuple[str, ...]) -> Results:
        folder = tmp_path_factory.mktemp("configs")
        with ExitStack() as stack:
            job: dict[str, tuple[str | None, bool]] = {}
            for name in names:
                config, exchange_name = narrow_config(name, "native"), None
                if config.parallel_config.group_size > 1:
                    layout = ExchangeLayout.of(config.shape, config.slot_limits(), config.parallel_config)
                    exchange = ExchangeMemory.create(layout)
                    stack.callback(exchange.close)
                    exchange_name = exchange.name
                job[name] = (exchange_name, name in compared)
            ranks = range(agents_of(names[0]))
            agents = [
                stack.enter_context(ForkedProgram(PROGRAM, str(rank), json.dumps(job), folder=folder)) for rank in ranks
            ]
            ended = [agent.wait(TIMEOUT_S) for agent in agents]
        problems = [agent.stderr[-3000:] for agent in ended if agent.returncode != 0]
        assert not problems, "\n".join(problems)
        found: Results = json.loads(ended[0].stdout.splitlines()[-1])
        return found

    def of_config(name: str, with_fused: bool) -> Results:
        alike = [other for other in CONFIGS if (is_swept(other), agents_of(other)) == (is_swept(name), agents_of(name))]
        if with_fused and not is_compared(name):
            alike = [other for other in alike if not is_compared(other)]
            return dict(printed(tuple(alike), tuple(alike))[name])
        return dict(printed(tuple(alike), tuple(filter(is_compared, alike)))[name])

    return of_config


@cache
def agents_of(name: str) -> int:
    return narrow_config(name, "native").parallel_config.tensor_parallel


@pytest.mark.parametrize("name", with_sweeps([(name,) for name in CONFIGS], is_swept))
def test_the_executed_graphs_are_those_of_the_config(run: Run, name: str) -> None:
    executed = {kind: without_sizes(name, lines) for kind, lines in run(name, False)["graphs"].items()}
    assert executed == listing_of(name)


@pytest.mark.parametrize("name", with_sweeps([(name,) for name in CONFIGS], lambda name: name not in RELIED_ON))
def test_native_tokens_are_those_of_fused_operators(run: Run, name: str) -> None:
    """A token may differ where two logits are nearly equal.

    The difference is stated in units of the range of the best 32 logits, which is about 1.5 standard deviations.
    """
    found = run(name, True)
    gaps, sampled = [], 0
    for ours, theirs in zip(found["native"], found["fused"], strict=True):
        sampled += ours["token"] == theirs["token"]
        logits = theirs["logits"]
        if ours["ids"][0] != theirs["ids"][0]:
            place = theirs["ids"].index(ours["ids"][0])
            gaps.append((logits[0] - logits[place]) / (logits[0] - logits[-1]))
    total = len(found["native"])
    widest = max(gaps, default=0)
    print(f"{name}: {len(gaps)} of {total} best tokens differ, widest {widest:.3f}; {sampled} sampled tokens are equal")
    assert len({each["token"] for each in found["native"]}) >= 5, "a constant text would test little"
    if not name.startswith(CHOSEN_EXPERTS):
        assert widest < 0.1
    assert len(gaps) <= total // 5
    assert sampled >= total // 2
