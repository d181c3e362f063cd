"""Tests the figures of an engine benchmark, calculated from given times."""

import argparse
import json

import pytest

from llm_serving.config import load_config
from performance.bench.engine import StepTime, Times
from performance.bench.engine_main import build_parser, cases_of, overrides, table
from performance.bench.engine_rows import Case, figures, median_row, numbers_of, prefill_case, random_prompts
from performance.bench.roofline import Numbers, decode_seconds, prefill_seconds
from performance.program import parse_count, parse_counts
from support.some_machine import CEILINGS, SHAPE

CONFIG = load_config("llama_160m_cpu.yaml", ["serving_config.agent_ports=[0]"])


def two_requests() -> Times:
    """Returns the times of two requests of four tokens each.

    The first tokens arrive at 0.5 s and 1 s. Each request then gets a token every half second.
    """
    return Times(
        first_tokens=[0.5, 1.0],
        tokens=[(0.5, 1), (1.0, 2), (1.5, 2), (2.0, 2), (2.5, 1)],
        steps=[
            StepTime("prefill", 1, 64, 0.4, 0.05),
            StepTime("decode", 2, 2, 0.3, 0.1),
            StepTime("decode", 2, 2, 0.5, 0.1),
        ],
    )


def test_the_decode_rate_counts_tokens_after_the_last_first_token() -> None:
    row = figures(Case("decode", 2, 64, 4), two_requests(), SHAPE, Numbers(), CEILINGS)
    assert row["decode_tokens_per_s"] == pytest.approx(5 / 1.5)
    assert row["prefill_tokens_per_s"] == pytest.approx(128 / 1.0)
    assert row["end_to_end_tokens_per_s"] == pytest.approx(8 / 2.5)
    assert row["ttft_ms"] == pytest.approx(750.0)
    assert row["agent_share"] == pytest.approx(1.0 / 1.5)
    assert (row["graph_ms"], row["sample_ms"]) == (pytest.approx(400.0), pytest.approx(100.0))


def test_the_fraction_of_the_ceiling_is_minimum_time_over_measured_time() -> None:
    row = figures(Case("decode", 2, 64, 4), two_requests(), SHAPE, Numbers(), CEILINGS)
    least = decode_seconds(SHAPE, 2, 66, 2, Numbers(), CEILINGS)
    assert row["share_of_ceiling"] == pytest.approx(least / 1.5)
    by_blocks = decode_seconds(SHAPE, 2, 66, 2, Numbers(), CEILINGS, by_blocks=True)
    assert row["share_by_blocks"] == pytest.approx(by_blocks / 1.5)


def test_a_prefill_row_has_no_decode_rate() -> None:
    times = Times(first_tokens=[0.25], tokens=[(0.25, 1)], steps=[StepTime("prefill", 1, 1024, 0.2, 0.01)])
    row = figures(prefill_case(1024, 2047), times, SHAPE, Numbers(), CEILINGS)
    assert row["decode_tokens_per_s"] is None
    assert row["share_by_blocks"] is None
    assert row["prefill_tokens_per_s"] == pytest.approx(4096.0)
    assert row["share_of_ceiling"] == pytest.approx(prefill_seconds(SHAPE, [1024], Numbers(), CEILINGS) / 0.25)


@pytest.mark.parametrize(("tokens", "expected"), [(1024, (1, 1024)), (4096, (4, 1024)), (2048, (2, 1024))])
def test_a_prefill_beyond_the_models_limit_is_divided_into_equal_prompts(
    tokens: int, expected: tuple[int, int]
) -> None:
    case = prefill_case(tokens, 2047)
    assert (case.batch, case.prompt) == expected
    assert case.name == f"prefill {tokens}"


def test_prompts_depend_on_the_seed_and_are_all_different() -> None:
    case = Case("decode", 8, 16, 4)
    prompts = random_prompts(case, 32000, 1)
    assert prompts == random_prompts(case, 32000, 1)
    assert prompts != random_prompts(case, 32000, 2)
    assert len({tuple(prompt) for prompt in prompts}) == 8
    assert all(10 <= token < 32000 for prompt in prompts for token in prompt)


def test_options_become_keys_of_the_config() -> None:
    parsed = build_parser().parse_args(["--weights", "int8", "--kv", "int8", "--op-table", "fused", "--threads", "2"])
    assert overrides(parsed) == [
        "serving_config.agent_ports=[0]",
        "model_config.weight_format=int8",
        "model_config.kv_format=int8",
        "model_config.op_table=fused",
        "model_config.cpu_threads=2",
    ]
    config = load_config("llama_160m_cpu.yaml", overrides(parsed))
    assert numbers_of(config) == Numbers("bfloat16", "int8", "int8", 64)


def test_the_ceiling_of_int4_depends_on_its_operators() -> None:
    """With native operators, the products of formats ``int4`` and ``int4_weight_only`` multiply floats by int4.

    With fused operators, the products of format ``int4`` multiply integers by int4.
    """
    for op_table, weights, products in (
        ("fused", "int4", "int4"),
        ("native", "int4", "int4_weight_only"),
        ("native", "int4_weight_only", "int4_weight_only"),
    ):
        given = [f"model_config.op_table={op_table}", f"model_config.weight_format={weights}"]
        assert numbers_of(load_config("llama_160m_cpu.yaml", given)).weight_format == products


def test_an_automatic_format_is_the_models_type() -> None:
    assert numbers_of(CONFIG) == Numbers("bfloat16", "bfloat16", "bfloat16", 64)


def test_the_documented_rows_are_measured_by_default() -> None:
    cases = cases_of(build_parser().parse_args([]), CONFIG)
    assert [case.name for case in cases] == [
        "batch 1", "batch 8", "batch 32", "batch 64", "batch 128", "prefill 1024",
    ]  # fmt: skip
    assert {(case.prompt, case.new) for case in cases if case.kind == "decode"} == {(64, 128)}


def test_the_table_has_one_line_per_row() -> None:
    row = {"name": "batch 2", **figures(Case("decode", 2, 64, 4), two_requests(), SHAPE, Numbers(), CEILINGS)}
    assert table([row]).splitlines()[1].split()[:4] == ["batch", "2", "3.33", "3.20"]


def test_the_median_row_has_the_median_of_each_figure() -> None:
    rows = [{"batch": 2, "rate": 1.0, "none": None}, {"batch": 2, "rate": 5.0, "none": None}]
    assert median_row(rows) == {"batch": 2, "rate": 3.0, "none": None}


def test_counts_on_the_command_line() -> None:
    assert parse_counts("1,8,32") == (1, 8, 32)
    assert parse_count("64") == 64
    for text in ("", "0", "1,x"):
        with pytest.raises(argparse.ArgumentTypeError, match="above 0"):
            parse_counts(text)
    with pytest.raises(argparse.ArgumentTypeError, match="one number"):
        parse_count("1,2")


def test_rows_can_be_written_as_json() -> None:
    row = figures(Case("decode", 2, 64, 4), two_requests(), SHAPE, Numbers(), CEILINGS)
    assert json.loads(json.dumps(row)) == row
