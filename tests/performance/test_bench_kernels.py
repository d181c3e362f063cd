"""Tests the kernel benchmark: its cases, its kernel calls, and the rows of its table."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from performance.bench import kernel_cases
from performance.bench.kernel_cases import Case, attention_call, linear_cases, linear_shapes
from performance.bench.kernel_main import (
    MIN_PASSES,
    alternating_passes,
    build_parser,
    main,
    median_call_seconds,
    names_out_of,
    row_of,
)
from performance.bench.roofline import Numbers, Operator
from performance.bench.step_kernels import StepKernels, step_of
from support.small_configs import REPOSITORY
from support.some_machine import CEILINGS, SHAPE

SMALL = replace(
    SHAPE, hidden_size=128, intermediate_size=256, num_layers=2, num_attention_heads=2, num_key_value_heads=1,
    vocab_size=512,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cases, "ROTATION_BYTES", 1)


def test_every_size_of_linear_layer_is_measured_once() -> None:
    sizes = linear_shapes(["llama_160m", "llama_7b"])
    assert sizes[(2304, 768)] == ["160m.qkv"]
    assert sizes[(22016, 4096)] == ["7b.gate_up"]
    assert len(sizes) == 10


@pytest.mark.parametrize("weight_format", kernel_cases.LINEAR_FORMATS)
def test_a_linear_case_runs_over_copies_of_its_weight(weight_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cases, "load_shape", lambda name: SMALL)
    cases = list(linear_cases(["llama_small"], [1, 3], [weight_format]))
    assert [case.shape.split()[0] for case in cases[:2]] == ["1x256x128", "3x256x128"]
    assert {len(case.calls) for case in cases} == {2}
    assert all(median_call_seconds(case.calls, 0.0) > 0 for case in cases)


def test_another_build_runs_alternately_on_the_same_arrays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This test compares this tree's build of the kernels with itself, so it needs no second build."""
    monkeypatch.setattr(kernel_cases, "load_shape", lambda name: SMALL)
    monkeypatch.setattr("performance.bench.kernel_main.measure_ceilings", lambda threads: CEILINGS)
    arguments = ["--rows", "1", "--formats", "int8", "--models", "llama_160m", "--seconds", "0.01"]
    for kernels in ("linear", "attention decode"):
        assert main([*arguments, "--only", kernels, "--against", str(REPOSITORY)]) == 0
        lines = capsys.readouterr().out.splitlines()
        header = next(number for number, line in enumerate(lines) if line.startswith("kernel"))
        assert lines[header].endswith("ratio")
        ratios = [float(line.split()[-1]) for line in lines[header + 1 :] if line.startswith(kernels)]
        assert ratios
        assert all(ratio > 0 for ratio in ratios)


def test_passes_alternate() -> None:
    seen: list[str] = []
    own, others = alternating_passes([[lambda: seen.append("own")], [lambda: seen.append("other")]], 0.0)
    assert seen[:6] == ["own", "other"] * 3
    assert len(own) == len(others) == MIN_PASSES


@pytest.mark.parametrize("path", ["no such file", __file__])
def test_a_file_that_is_not_a_build_of_the_kernels_is_rejected(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["--against", path])
    assert refused.value.code == 2
    assert "no build of the kernels" in capsys.readouterr().err


@pytest.mark.parametrize("kv_format", ["bfloat16", "int8"])
@pytest.mark.parametrize(("seqs", "queries", "context"), [(3, 1, 40), (1, 33, 33), (1, 8, 40)])
def test_the_attention_kernel_accepts_the_call(kv_format: str, seqs: int, queries: int, context: int) -> None:
    attention_call((2, 1, 64), seqs, queries, context, kv_format)()


@pytest.mark.parametrize("weight_format", ["bfloat16", "int4"])
def test_the_kernels_of_a_step_add_up(weight_format: str) -> None:
    kernels = StepKernels(SMALL, Numbers("bfloat16", weight_format, "int8"))
    assert kernels.seconds(rows=2, sequences=2, queries=1, context=20) > 0


def test_the_step_of_a_row_is_its_prefill_or_its_middle_decode() -> None:
    decode = {"kind": "decode", "batch": 8, "prompt": 64, "new": 128}
    assert step_of(decode) == {"rows": 8, "sequences": 8, "queries": 1, "context": 128}
    prefill = {"kind": "prefill", "batch": 4, "prompt": 1024, "new": 1}
    assert step_of(prefill) == {"rows": 4096, "sequences": 4, "queries": 1024, "context": 1024}


def test_a_row_has_the_fraction_of_the_ceiling_and_its_bound() -> None:
    operator = Operator("linear", num_bytes=40e6, operations=80e6, unit="int8_gops")
    row = row_of(Case("linear", "1x2x3", "int8", [], operator), 0.002, CEILINGS)
    assert (row.share_of_ceiling, row.bound, row.threads) == (pytest.approx(0.5), "read", 2)
    assert (row.gb_s, row.gop_s) == (pytest.approx(20.0), pytest.approx(40.0))


def test_unknown_names_are_rejected() -> None:
    parse = names_out_of(("int8", "int4"))
    assert parse("int4,int8") == ("int4", "int8")
    with pytest.raises(argparse.ArgumentTypeError, match="int2: expected some of int8, int4"):
        parse("int4,int2")
    assert build_parser().parse_args(["--threads", "1,2"]).threads == (1, 2)


def test_a_run_writes_rows_ceilings_and_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("performance.bench.kernel_main.measure_ceilings", lambda threads: CEILINGS)
    from performance.bench.plots import plot_kernels  # imports matplotlib, which most test processes do not need

    result = tmp_path / "kernels.json"
    assert main(["--only", "sample greedy", "--seconds", "0", "--json", str(result)]) == 0
    content = json.loads(result.read_text())
    assert set(content["ceilings"]) >= {"read_gb_s", "bf16_gflops", "int8_gops", "fp32_gflops"}
    assert [row["shape"] for row in content["rows"]] == ["1x32000", "64x32000"]
    assert set(content["rows"][0]) >= {"kernel", "shape", "format", "threads", "share_of_ceiling", "bound"}
    content["rows"][0] |= {"kernel": "linear", "format": "int8"}
    plot_kernels(tmp_path / "roofline.png", content)
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")
