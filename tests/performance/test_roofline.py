"""Compares the computed minimum time of a step with values calculated by hand."""

from dataclasses import replace

import pytest

from performance.bench.ceilings import drift_text
from performance.bench.roofline import (
    Numbers,
    attention,
    decode_seconds,
    kv_token_bytes,
    layer_linears,
    linear,
    prefill_seconds,
    step_operators,
    step_seconds,
    weight_bytes,
)
from support.some_machine import CEILINGS, SHAPE

INT8 = Numbers("bfloat16", "int8", "int8")


@pytest.mark.parametrize(
    ("weight_format", "expected"),
    [("float32", 4 * 64 * 128), ("bfloat16", 2 * 64 * 128), ("int8", 64 * 132), ("int4", 64 * (64 + 2 * 4))],
)
def test_a_weight_is_read_with_its_scales(weight_format: str, expected: int) -> None:
    assert weight_bytes(weight_format, columns=64, depth=128, group=64) == expected


def test_one_row_is_bound_by_reading_and_many_by_the_unit_of_the_format() -> None:
    one, many = (linear("linear", rows, 1000, 500, INT8) for rows in (1, 1000))
    assert one.bound(CEILINGS) == "read"
    assert one.seconds(CEILINGS) == pytest.approx(1000 * 504 / 40e9)
    assert many.bound(CEILINGS) == "compute"
    assert many.seconds(CEILINGS) == pytest.approx(2 * 1000 * 1000 * 500 / 800e9)


@pytest.mark.parametrize(
    ("weight_format", "dtype", "unit"),
    [
        ("int4", "float32", "int8_gops"),
        ("int8_weight_only", "bfloat16", "bf16_gflops"),
        ("int8_weight_only", "float32", "fp32_gflops"),
        ("float16", "float16", "fp32_gflops"),
    ],
)
def test_the_unit_follows_from_weights_and_activations(weight_format: str, dtype: str, unit: str) -> None:
    assert linear("linear", 1, 64, 64, Numbers(dtype, weight_format)).unit == unit


def test_attention_reads_each_context_once_and_computes_its_query_key_pairs() -> None:
    decode = attention("decode", [(1, 10), (1, 30)], 12, 12, 64, Numbers())
    assert decode.num_bytes == 40 * 2 * 12 * 64 * 2
    assert decode.operations == 4 * 40 * 12 * 64
    prefill = attention("prefill", [(3, 5)], 1, 1, 2, Numbers())
    assert prefill.operations == 4 * (3 + 4 + 5) * 2


def test_int8_keys_and_values_have_a_scale_for_each_token_and_head() -> None:
    assert kv_token_bytes("int8", kv_heads=4, head_dim=64) == 2 * 4 * 68
    assert kv_token_bytes("bfloat16", kv_heads=4, head_dim=64) == 2 * 4 * 128


def test_the_linear_layers_of_a_shape_include_all_matrices() -> None:
    weights = sum(columns * depth for columns, depth in layer_linears(SHAPE).values())
    embeddings = 2 * SHAPE.vocab_size * SHAPE.hidden_size
    norms = (2 * SHAPE.num_layers + 1) * SHAPE.hidden_size
    assert SHAPE.num_layers * weights + embeddings + norms == SHAPE.num_parameters


def test_a_step_is_the_sum_of_its_operators_and_the_lm_head_of_sampled_rows() -> None:
    sequences = [(7, 7), (1, 100)]
    operators = step_operators(SHAPE, sequences, INT8)
    assert [each.name for each in operators] == ["qkv", "o", "gate_up", "down", "attention", "lm_head"]
    assert operators[-1].operations == 2 * 2 * 32000 * 768
    expected = 12 * sum(each.seconds(CEILINGS) for each in operators[:-1]) + operators[-1].seconds(CEILINGS)
    assert step_seconds(SHAPE, sequences, INT8, CEILINGS) == pytest.approx(expected)


def test_reading_by_blocks_changes_only_the_rate_of_keys_and_values() -> None:
    sequences = [(1, 100_000)]
    *_, cached, _ = step_operators(SHAPE, sequences, INT8)
    assert cached.bound(CEILINGS) == "read"
    more = step_seconds(SHAPE, sequences, INT8, CEILINGS, by_blocks=True) - step_seconds(
        SHAPE, sequences, INT8, CEILINGS
    )
    assert more == pytest.approx(12e-9 * cached.num_bytes * (1 / CEILINGS.paged_read_gb_s - 1 / CEILINGS.read_gb_s))


def test_one_sequence_decodes_no_faster_than_its_weights_are_read() -> None:
    seconds = decode_seconds(SHAPE, batch=1, first=65, steps=127, numbers=INT8, ceilings=CEILINGS)
    matrices = SHAPE.num_parameters - SHAPE.vocab_size * SHAPE.hidden_size
    assert 127 * matrices / 40e9 < seconds < 1.05 * 127 * matrices / 40e9


def test_a_decode_is_the_sum_over_its_contexts() -> None:
    whole = decode_seconds(SHAPE, batch=64, first=65, steps=3, numbers=INT8, ceilings=CEILINGS)
    steps = [decode_seconds(SHAPE, 64, context, 1, INT8, CEILINGS) for context in (65, 66, 67)]
    assert whole == pytest.approx(sum(steps))


def test_prompts_are_prefilled_in_one_step() -> None:
    together = prefill_seconds(SHAPE, [64, 64], INT8, CEILINGS)
    assert together < 2 * prefill_seconds(SHAPE, [64], INT8, CEILINGS)


def test_a_changed_bandwidth_is_reported() -> None:
    assert drift_text(CEILINGS, replace(CEILINGS, read_gb_s=42.0)) is None
    assert drift_text(CEILINGS, replace(CEILINGS, read_gb_s=65.0)) == (
        "WARNING: read bandwidth was 40.0 GB/s before and 65.0 GB/s after the run"
    )
