"""Measures decode and prefill of the engine without HTTP, and compares them with the machine's limits.

The program starts a real agent and drives scheduler and executor in this process. Decoding is greedy, end tokens are
ignored, and prompts are random token ids from a seed. Every figure is the median of --repeats runs after a warm-up run.

A decode row runs --batch prompts of --prompt tokens together and generates --new tokens for each. Its decode rate
counts the tokens that follow after every prompt has its first token. Its prefill rate and TTFT come from the same run.
A prefill row runs one prompt and generates one token. If the prompt would exceed the model's limit, it is divided into
several prompts of equal length.

"of ceiling" is the minimum time divided by the measured time. The minimum time of a step is a sum over its operators.
Each operator takes the longer of two times: reading its data, and computing (performance/bench/roofline.py). "by
blocks" is the same ratio if keys and values are read block by block, which is slower. "agent" is the fraction of the
measured time that the agent spent in graphs and sampler. "kernels" is the fraction that the step's kernels take when
they are called one by one after the run. The remaining time is spent in the graph, Python, messages and sampling.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agent.kernels import set_threads
from llm_serving.cli import config_as_yaml
from llm_serving.config import Config, load_config
from llm_serving.hub.fetching import cached_draft
from performance.bench.against import add_against_options, compare_trees
from performance.bench.ceilings import drift_text, measure_ceilings
from performance.bench.engine import offline_engine
from performance.bench.engine_rows import Case, add_case_options, cases_of, measure_case, numbers_of
from performance.bench.step_kernels import add_kernel_shares
from performance.program import exits_with_errors, new_parser, write_json
from performance.terminal import format_number, format_table

EPILOG = """\
examples:
  %(prog)s --config llama_tiny_cpu.yaml
  %(prog)s --weights int8 --batch 1,8 --repeats 3
  %(prog)s --config smollm2_135m_cpu.yaml --set model_config.model_path=/models/llama --json results.json
"""

COLUMNS = (
    ("decode tok/s", "decode_tokens_per_s"),
    ("end to end tok/s", "end_to_end_tokens_per_s"),
    ("prefill tok/s", "prefill_tokens_per_s"),
    ("TTFT ms", "ttft_ms"),
    ("step ms", "step_ms"),
    ("graph ms", "graph_ms"),
    ("sample ms", "sample_ms"),
)


@exits_with_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the engine without HTTP. Returns 0, or 2 if the config is wrong or the engine does not start."""
    parsed = build_parser().parse_args(arguments)
    if parsed.against is not None:
        return compare_trees("performance/bench_engine.py", arguments, "name", "step_ms")
    config = load_config(parsed.config, overrides(parsed), fetch=cached_draft)
    result = run(config, cases_of(parsed, config), parsed)
    write_json(parsed.json, result)
    if parsed.png is not None:
        from performance.bench.plots import plot_engine

        plot_engine(parsed.png, result)
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__, "llama_160m_cpu.yaml", epilog=EPILOG)
    parser.add_argument("--weights", help="model_config.weight_format")
    parser.add_argument("--kv", help="model_config.kv_format")
    parser.add_argument("--op-table", help="model_config.op_table")
    add_case_options(parser, batches=(1, 8, 32, 64, 128), new=128, repeats=5)
    parser.add_argument("--threads", type=int, default=0, help="of the agent (default 0: one per processor)")
    parser.add_argument("--no-kernels", action="store_true", help="do not measure the step's kernels separately")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a picture to this file")
    add_against_options(parser)
    return parser


def overrides(parsed: argparse.Namespace) -> list[str]:
    """Returns the config overrides of options such as ``--weights`` and ``--kv``.

    The first override lets the system choose a free port for the agent.
    """
    named = {"weight_format": parsed.weights, "kv_format": parsed.kv, "op_table": parsed.op_table}
    named["cpu_threads"] = parsed.threads or None
    settings = [f"model_config.{key}={value}" for key, value in named.items() if value is not None]
    return ["serving_config.agent_ports=[0]", *settings, *parsed.settings]


def run(config: Config, cases: Sequence[Case], parsed: argparse.Namespace) -> dict[str, Any]:
    """Measures all cases and prints each row when it is complete."""
    ceilings = measure_ceilings(parsed.threads)
    numbers = numbers_of(config)
    print(f"{config.model_name}: weights {numbers.weight_format}, KV {numbers.kv_format}, {config.op_table} operators")
    print(ceilings.text(), flush=True)
    rows = []
    with offline_engine(config) as engine:
        for case in cases:
            rows.append({"name": case.name, **measure_case(engine, case, config, ceilings, parsed.repeats)})
            print(f"  {case.name}: {_rate(rows[-1]):.0f} tok/s", file=sys.stderr, flush=True)
    after = measure_ceilings(parsed.threads)
    if not parsed.no_kernels:
        set_threads(parsed.threads)
        add_kernel_shares(rows, config.shape, numbers)
    print(table(rows))
    if (warning := drift_text(ceilings, after)) is not None:
        print(warning)
    return {
        "model": config.model_name,
        "numbers": asdict(numbers),
        "op_table": config.op_table,
        "repeats": parsed.repeats,
        "ceilings": asdict(ceilings),
        "ceilings_after": asdict(after),
        "rows": rows,
        "config": config_as_yaml(config),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    header = ["", *(title for title, _ in COLUMNS), "of ceiling", "by blocks", "agent", "kernels"]
    return format_table(header, [_line(row) for row in rows])


def _line(row: Mapping[str, Any]) -> list[str]:
    shares = (row["share_of_ceiling"], row["share_by_blocks"], row["agent_share"], row.get("kernel_share"))
    return [
        row["name"],
        *(format_number(row[key]) for _, key in COLUMNS),
        *("-" if share is None else f"{100 * share:.0f} %" for share in shares),
    ]


def _rate(row: Mapping[str, Any]) -> float:
    rate: float = row["decode_tokens_per_s"] or row["prefill_tokens_per_s"]
    return rate
