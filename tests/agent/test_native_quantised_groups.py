"""Tests native operators with quantised weights that several agents share. Each setup is a group of real processes.

Except for ties, a group chooses the tokens of one agent with native operators. The tokens also equal those of fused
operators with the same number of agents. The bits do not depend on the chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from performance.models.folders import write_model
from performance.models.variants import FAMILY_VARIANTS, VARIANTS
from support.agent_group import Setup, run_group, with_layers
from support.golden_files import golden_of
from support.position_bits import check_position_bits
from support.sweeps import with_sweeps
from tools.quantization.convert import quantise_folder
from tools.quantization.rounding import Settings

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).resolve().parents[2]
EXPERTS = FAMILY_VARIANTS["qwen3_moe"]
OWN = {"vocab_size": 420, "attention_bias": True}
SEEDED = {**VARIANTS, **FAMILY_VARIANTS, "qwen3_moe": replace(EXPERTS, config={**EXPERTS.config, **OWN})}
"""The models of these tests. ``qwen3_moe`` has biases, and another vocabulary than the model of the golden tokens.

In int4, an output layer with an odd vocabulary would be floats on one agent, but integers on two agents, whose parts
are even.
"""
PAIRS = {
    "int8": Setup(2, 1, "bfloat16", "native", "int8"),
    "int8_weight_only": Setup(2, 1, "float16", "native", "int8_weight_only"),
    "int4": Setup(2, 1, "bfloat16", "native", "int4"),
    "int8 cache": Setup(2, 1, "float16", "native", "int8_weight_only", "int8"),
    "int8 stored": Setup(2, 1, "float16", "native", "int8_weight_only"),
    "int4 stored": Setup(2, 1, "float16", "native", "int4"),
    "int8 stages": Setup(2, 1, "bfloat16", "native", "int8"),
}
ALL_LAYERS = ("int4", "int8 stages")
"""Names of the setups with all layers of a model. int4 is also compared with the oracle, and stages divide the layers.

Other setups have one layer: its sums and the output layer are all that two agents compute together.
"""
CASES = [("int8", "qwen3_moe"), ("int4 stored", "mha")]
"""Models with experts and with biases before and after the sum, and with uneven columns."""
SWEPT_CASES = [
    *(("int8", model) for model in ("llama_yarn_bias", "gqa_tied", "tiny_llama", "llama_linear_mqa", "qwen3_tied")),
    *(("int8_weight_only", model) for model in ("llama3_rope", "qwen2_tied", "mixtral")),
    *(("int4", model) for model in ("llama3_rope", "qwen3_moe", "mha", "gqa_tied")),
    *(("int8 cache", model) for model in ("gqa_tied", "tiny_llama")),
    *(("int8 stored", model) for model in ("mha", "mixtral")),
]
"""These run in ``make test-sweeps`` only: a tied output layer, a shared key-value head, and repetitions."""
STORED = {"int8 stored": Settings(8, 0, False, "float32"), "int4 stored": Settings(4, 32, True, "float32")}
LARGER = [("int8", "gqa_tied", 3), ("int8", "gqa_tied", 4), ("int4", "llama3_rope", 4)]
"""Setups with uneven heads, and their numbers of agents.

Three agents have 2, 1 and 3 of 6 query heads, and two of them share a key-value head. Four agents have 2, 1, 2 and 1
query heads, and pairs of them share a key-value head. Each of four agents of ``llama3_rope`` has one head of 128, and
pairs of them share a key-value head. test_native_parts.py loads the integers of uneven parts in ``make test``.
"""
EVEN = (("int8", "llama_yarn_bias"), ("int4 stored", "mha"))
"""Models of whose weights and cache each of two agents has about half."""
WITH_EXPERTS = ("qwen3_moe", "mixtral")
ROUTE_MARGIN = 0.6
"""Limit for replaced experts: a token may prefer its own experts by at most this difference of router logits.

The standard deviation of router logits is 3. Both compared runs use the experts that one of them chose. Otherwise one
near tie between experts of an early token would change all later logits of a sequence. With AVX2, they changed by 0.31
standard deviations, which is more than the limits below.
"""

Results = dict[str, Any]
Runs = Callable[[Setup, str, str], list[Results]]


def params(*names: str) -> list[Any]:
    """Returns the test parameters of the cases with these names, or of all cases."""
    cases = [case for case in (*CASES, *SWEPT_CASES) if not names or case[0] in names]
    return with_sweeps(cases, lambda *case: case in SWEPT_CASES)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Returns a function that writes the folder of a case on first use and returns its path."""
    scratch = tmp_path_factory.mktemp("native-quantised")

    @cache
    def plain(model: str, has_all_layers: bool) -> Path:
        if model not in SEEDED:
            return ROOT / "models" / model
        folder = scratch / f"{model} {has_all_layers}"
        write_model(SEEDED[model] if has_all_layers else with_layers(SEEDED[model], 1), folder)
        return folder

    @cache
    def folder(name: str, model: str) -> Path:
        source = plain(model, name in ALL_LAYERS)
        if name not in STORED:
            return source
        quantise_folder(source, scratch / f"{name} {model}", STORED[name], lambda *_: None, calibration=None)
        return scratch / f"{name} {model}"

    return folder


@pytest.fixture(scope="module")
def runs(folder_of: Callable[[str, str], Path]) -> Runs:
    """Returns a function that runs a group on first use and returns the output of each agent."""
    known: dict[tuple[str, str, str], list[Results]] = {}

    def run(setup: Setup, name: str, model: str) -> list[Results]:
        key = (str(setup), name, model)
        if key not in known:
            routes: dict[str, list[int]] | None = None
            # The tokens of all groups use the experts that one agent with native operators chose.
            if model in WITH_EXPERTS:
                alone = replace(PAIRS[name], tensor_parallel=1)
                routes = {} if setup == alone else {model: run(alone, name, model)[0]["routes"]}
            ways = ("free", "forced", "invariance") if name == "int8 stages" else ("forced", "invariance")
            agents = run_group(setup, {model: folder_of(name, model)}, routes=routes, ways=ways)
            known[key] = [agent[model] for agent in agents]
        return known[key]

    return run


def check_ties(found: Results, wanted: Results, model: str, *, margin: float, most: float, label: str) -> None:
    """Checks that two runs choose the same tokens from the same inputs, except for a fraction of at most ``most``.

    Where the tokens differ, ``wanted`` must prefer its own token by less than ``margin`` standard deviations of the
    oracle's logits. Both runs send each token to the same experts, even if one would have preferred other experts by a
    near tie.
    """
    if model in WITH_EXPERTS:
        assert len(found["routes"]) == len(wanted["routes"]) > 0
        print(f"{label}: widest tie of experts {found['route_margin']:.3f} and {wanted['route_margin']:.3f}")
        assert max(found["route_margin"], wanted["route_margin"]) < ROUTE_MARGIN, label
    leads, total = [], 0
    for case, ours, theirs in zip(golden_of(model)["cases"], found["best"], wanted["best"], strict=True):
        total += len(theirs)
        for (our_ids, _), (ids, logits) in zip(ours, theirs, strict=True):
            if our_ids[0] != ids[0]:
                assert our_ids[0] in ids, f"{label}: {our_ids[0]} is not among the best {ids}"
                leads.append((logits[0] - logits[ids.index(our_ids[0])]) / case["logit_std"])
    print(f"{label}: {len(leads)} ties in {total} tokens, widest {max(leads, default=0):.3f}")
    assert max(leads, default=0) < margin, label
    assert len(leads) <= most * total, label


WEIGHTS_ALONE = ("int8_weight_only", "int8 stored", "int4 stored")
MARGIN = {"int8": 0.25, "int4": 0.1, "int8 cache": 0.1} | dict.fromkeys(WEIGHTS_ALONE, 0.06)
MOST_TIES = {"int8": 0.13, "int4": 0.06, "int8 cache": 0.06} | dict.fromkeys(WEIGHTS_ALONE, 0.05)
"""Maximum fraction of tokens that differ from those of one agent. In int8, each agent rounds its own part of a row of
weights and activations. In the other formats, only the order and the rounding of the sum differ, in bfloat16 or
float16. An int8 cache rounds these differences to integers once more.
"""

LEAST_AGREEMENT = 0.55
"""Minimum fraction of int4 tokens that are among the oracle's best."""


@pytest.mark.parametrize(("name", "model"), params())
def test_two_agents_choose_the_tokens_of_one(runs: Runs, name: str, model: str) -> None:
    pair, alone = PAIRS[name], replace(PAIRS[name], tensor_parallel=1)
    found, wanted = (runs(setup, name, model)[0] for setup in (pair, alone))
    label = f"{model} {name}, two agents and one"
    check_ties(found, wanted, model, margin=MARGIN[name], most=MOST_TIES[name], label=label)
    assert found["invariance"] != wanted["invariance"], "otherwise the test compares one setup with itself"


@pytest.mark.parametrize(("name", "model"), params("int8", "int8_weight_only", "int8 cache"))
def test_two_native_agents_choose_the_tokens_of_two_fused_agents(runs: Runs, name: str, model: str) -> None:
    tables = (replace(PAIRS[name], op_table=table) for table in ("native", "fused"))
    found, wanted = (runs(setup, name, model)[0] for setup in tables)
    label = f"{model} {name}, native and fused"
    check_ties(found, wanted, model, margin=MARGIN[name], most=MOST_TIES[name], label=label)


@pytest.mark.parametrize(("name", "model"), [case for case in params("int4") if "qwen3_moe" not in case.values])
def test_int4_is_as_close_to_floats_as_with_fused_operators(runs: Runs, name: str, model: str) -> None:
    """Native and fused int4 predict the oracle's tokens about equally often.

    Fused operators round activations to int8 and a tied output layer to int4. Native primitives keep both as floats.
    """
    cases, same = golden_of(model)["cases"], {}
    for table in ("native", "fused"):
        forced = runs(replace(PAIRS[name], op_table=table), name, model)[0]["forced"]
        pairs = [
            (token, expected, best)
            for case, tokens in zip(cases, forced, strict=True)
            for token, expected, best in zip(tokens, case["tokens"], case["top_ids"], strict=True)
        ]
        assert sum(token in best for token, _, best in pairs) >= LEAST_AGREEMENT * len(pairs)
        same[table] = sum(token == expected for token, expected, _ in pairs) / len(pairs)
    print(f"{model} int4, share of the oracle's tokens: {same}")
    assert same["native"] > same["fused"] - 0.06


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "model", "agents"), LARGER)
def test_shared_and_uneven_heads(runs: Runs, name: str, model: str, agents: int) -> None:
    found = runs(replace(PAIRS[name], tensor_parallel=agents), name, model)[0]
    wanted = runs(replace(PAIRS[name], tensor_parallel=1), name, model)[0]
    label = f"{model} {name}, {agents} agents and one"
    check_ties(found, wanted, model, margin=MARGIN[name], most=MOST_TIES[name], label=label)


@pytest.mark.sweep
def test_stages_change_no_bit(runs: Runs) -> None:
    """Two pipeline stages give the same bits as one.

    A tied output layer stays a float, also if another stage has the embedding.
    """
    pair = PAIRS["int8 stages"]
    found = runs(replace(pair, pipeline_parallel=2), "int8 stages", "gqa_tied")[2]
    wanted = runs(pair, "int8 stages", "gqa_tied")[0]
    for way in ("free", "forced", "invariance"):
        assert found[way] == wanted[way], way


@pytest.mark.parametrize(("name", "model"), params())
def test_a_position_gives_the_same_bits_however_it_is_computed(runs: Runs, name: str, model: str) -> None:
    check_position_bits(runs(PAIRS[name], name, model)[0]["invariance"])


@pytest.mark.parametrize(("name", "model"), [case for case in params() if case.values in EVEN])
def test_agents_share_weights_and_cache_evenly(runs: Runs, name: str, model: str) -> None:
    """Each of two agents has about half of the weights and of the cache of a single agent.

    Both agents have the norms and the shared key-value heads.
    """
    agents = [agent["summary"] for agent in runs(PAIRS[name], name, model)]
    alone = runs(replace(PAIRS[name], tensor_parallel=1), name, model)[0]["summary"]
    assert [agent["weight_format"] for agent in agents] == [alone["weight_format"]] * 2
    for key in ("weight_bytes", "kv_cache_bytes"):
        shares = np.array([agent[key] for agent in agents]) / alone[key]
        assert shares.min() > 0.4
        assert shares.max() < 0.6, (key, shares)
