"""Compares the tokens of agents that share a model with the oracle's, through the whole server.

The agents are tensor parallel, pipeline parallel, or both.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from support.golden_files import golden_of
from support.oracle_ties import MOST_TIES, TIE_MARGIN, complete, find_ties
from support.server_process import running_server
from support.small_configs import TINY_LLAMA
from support.sweeps import with_sweeps

GOLDEN = golden_of("tiny_llama")
GROUPS = [(2, 1), (1, 2), (2, 2)]


def overrides(tp: int, pp: int, dtype: str, op_table: str) -> list[str]:
    return [
        f"model_config.model_path={TINY_LLAMA}",
        f"model_config.model_dtype={dtype}",
        f"model_config.op_table={op_table}",
        f"parallel_config.tensor_parallel={tp}",
        f"parallel_config.pipeline_parallel={pp}",
    ]


SAMPLINGS = (
    {"temperature": 0.8, "top_p": 0.9, "seed": 7},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 1.0, "top_k": 20, "seed": 11, "frequency_penalty": 0.4},
)


def sampled(server):
    """Returns the texts of all golden prompts for each of the sampling parameters ``SAMPLINGS``.

    The logits of a group differ from those of one agent in their last bits. These differences change no sampled token
    here.
    """
    return [complete(server, case["prompt"], 24, **each) for case in GOLDEN["cases"] for each in SAMPLINGS]


@pytest.mark.parametrize(("tp", "pp"), with_sweeps(GROUPS, lambda tp, pp: (tp, pp) != (2, 2)))
def test_float32_is_exact_alone_and_together(tmp_path, server, tp, pp):
    cases, expected = GOLDEN["cases"], sampled(server)
    with running_server(tmp_path, overrides(tp, pp, "float32", "fused")) as server:
        for case in cases:
            assert complete(server, case["prompt"], 64) == case["tokens"]
        with ThreadPoolExecutor(8) as pool:  # concurrent requests mix prompts, decodes and prefix hits in the steps
            asked = [case for case in cases for _ in range(2)]
            answers = list(pool.map(lambda case: complete(server, case["prompt"], 64), asked))
        assert answers == [case["tokens"] for case in asked]
        assert sampled(server) == expected
        server.wait_until_idle()


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("tp", "pp", "dtype", "op_table"),
    [(2, 1, "bfloat16", "native"), (1, 2, "float16", "native"), (2, 2, "float16", "fused")],
)
def test_half_precision_is_exact_but_for_ties(tmp_path, tp, pp, dtype, op_table):
    cases = GOLDEN["cases"]
    with running_server(tmp_path, overrides(tp, pp, dtype, op_table)) as server:
        ties = [tie for case in cases for tie in find_ties(server, case, TIE_MARGIN[dtype])]
    print(f"tp {tp} pp {pp} {dtype} {op_table}: {len(ties)} ties in {64 * len(cases)} tokens: {ties}")
    assert len(ties) <= MOST_TIES[dtype] * 64 * len(cases)


@pytest.mark.sweep
def test_int8_with_native_operators_is_near_the_oracle(tmp_path):
    """Tests int8 weights and activations (W8A8) on two agents, as for a model that is too large for one Ascend.

    ``make test`` serves this kind of group in ``test_model_slim.py``, and compares its tokens in
    ``tests/agent/test_native_quantised_groups.py``.
    """
    cases = GOLDEN["cases"]
    settings = [*overrides(2, 1, "bfloat16", "native"), "model_config.weight_format=int8"]
    with running_server(tmp_path, settings) as server:
        ties = [tie for case in cases for tie in find_ties(server, case, TIE_MARGIN["bfloat16"])]
        summary = server.events("agent_ready")[0]["summary"]
        server.wait_until_idle()
    assert (summary["op_table"], summary["weight_format"], summary["agents"]) == ("native", "int8", 2)
    print(f"tp 2 int8 native: {len(ties)} ties in {64 * len(cases)} tokens: {ties}")
    assert len(ties) <= MOST_TIES["bfloat16"] * 64 * len(cases)
