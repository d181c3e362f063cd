"""Compares two op tables on a CPU: the native one (MindSpore's inference primitives, as on Ascend) and the fused one.

Two engines with real agents, one for each table, run each row alternately, so that the machine's speed is the same for
both. A row is a decode of --batch prompts of --prompt tokens, or a prefill. The row has the time of a step, measured as
in bench_engine.py. The ratio is the native time divided by the fused time.

By default both tables multiply the same types. Native int4 and fused int4_weight_only multiply floats by int4, but
fused int4 multiplies int8 by int4. --fused-weights selects other weight formats for the fused table. If the two tables
multiply different types, the ratio is marked and --limit does not apply to it. The exit code is 1 if any other ratio
exceeds --limit.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from llm_serving.cli import config_as_yaml
from llm_serving.config import Config, load_config
from llm_serving.hub.fetching import cached_draft
from llm_serving.model.number_formats import AUTO, weight_format
from performance.bench.ceilings import Ceilings, measure_ceilings
from performance.bench.engine import OfflineEngine, offline_engine
from performance.bench.engine_rows import Case, add_case_options, cases_of, measure_case, numbers_of
from performance.program import exits_with_errors, new_parser, write_json
from performance.terminal import format_number, format_table

TABLES = ("fused", "native")
SAME = "same"
FIGURES = ("step_ms", "graph_ms", "sample_ms", "decode_tokens_per_s", "prefill_tokens_per_s")


@exits_with_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison and returns the exit code.

    0: success. 1: a ratio exceeds the limit. 2: a config is wrong, or an engine does not start.
    """
    parsed = build_parser().parse_args(arguments)
    results = [
        compare(name, weights, fused_weights, parsed)
        for name in parsed.config
        for weights in parsed.weights
        for fused_weights in parsed.fused_weights
    ]
    write_json(parsed.json, {"limit": parsed.limit, "repeats": parsed.repeats, "models": results})
    held = [result for result in results if result["same_products"]]
    above = [row for result in held for row in result["rows"] if row["ratio"] > parsed.limit]
    print(f"{len(above)} ratios above {parsed.limit}")
    return 1 if above else 0


def build_parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("--config", nargs="+", default=["llama_160m_cpu.yaml", "llama_1b_cpu.yaml"])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help="override")
    parser.add_argument("--weights", nargs="+", default=["auto"], help="model_config.weight_format (default auto)")
    parser.add_argument(
        *("--fused-weights",),
        nargs="+",
        default=[SAME],
        help=f"weight format of the fused engine; {SAME} (default): the one with the same products",
    )
    add_case_options(parser, batches=(1, 8, 32, 64), new=32, repeats=3)
    parser.add_argument("--threads", type=int, default=0, help="of the agents (default 0: one per processor)")
    parser.add_argument("--limit", type=float, default=1.5, help="maximum ratio (default %(default)s)")
    return parser


def compare(name: str, weights: str, fused_weights: str, parsed: argparse.Namespace) -> dict[str, Any]:
    """Measures a model with the native and the fused op table, and prints the rows."""
    if fused_weights == SAME:
        fused_weights = weights if weights == AUTO else weight_format(weights).on("native").name
    configs = {
        "fused": _config(name, fused_weights, "fused", parsed),
        "native": _config(name, weights, "native", parsed),
    }
    config, ceilings = configs["native"], measure_ceilings(parsed.threads)
    with offline_engine(configs["fused"]) as fused, offline_engine(configs["native"]) as native:
        engines = {"fused": fused, "native": native}
        rows = [_row(case, engines, configs, ceilings, parsed.repeats) for case in cases_of(parsed, config)]
    formats = {table: {"weights": each.weight_format, "products": products(each)} for table, each in configs.items()}
    same = formats["fused"]["products"] == formats["native"]["products"]
    print(_title(config.model_name, formats, same=same, threads=ceilings.threads))
    print(format_table(["", "fused step ms", "native step ms", "ratio"], [_line(row) for row in rows]), flush=True)
    return {
        "model": config.model_name,
        "formats": formats,
        "same_products": same,
        "numbers": asdict(numbers_of(config)),
        "ceilings": asdict(ceilings),
        "rows": rows,
        "config": config_as_yaml(config),
    }


def products(config: Config) -> str:
    """Returns the types that the linear layers multiply, such as ``bfloat16 by int4``."""
    dtype, weights = config.model_config.model_dtype, config.linear_format
    return f"{'int8' if weights.quantises_activations else dtype} by {weights.stored_as or weights.name}"


def _title(model: str, formats: dict[str, dict[str, str]], *, same: bool, threads: int) -> str:
    sides = (f"{table} {formats[table]['weights']} ({formats[table]['products']})" for table in ("native", "fused"))
    note = "" if same else "; different precisions, the limit does not apply"
    return f"{model}, {threads} threads: {' over '.join(sides)}{note}"


def _config(name: str, weights: str, table: str, parsed: argparse.Namespace) -> Config:
    settings = [f"model_config.op_table={table}", f"model_config.weight_format={weights}"]
    settings += [f"model_config.cpu_threads={parsed.threads}"] if parsed.threads else []
    settings = ["serving_config.agent_ports=[0]", *settings, *parsed.settings]
    return load_config(name, settings, fetch=cached_draft)


def _row(
    case: Case, engines: dict[str, OfflineEngine], configs: dict[str, Config], ceilings: Ceilings, repeats: int
) -> dict[str, Any]:
    measured = {table: measure_case(engines[table], case, configs[table], ceilings, repeats) for table in TABLES}
    figures = {table: {key: row[key] for key in FIGURES} for table, row in measured.items()}
    return {"name": case.name, **figures, "ratio": figures["native"]["step_ms"] / figures["fused"]["step_ms"]}


def _line(row: dict[str, Any]) -> list[str]:
    return [row["name"], *(format_number(row[table]["step_ms"]) for table in TABLES), f"{row['ratio']:.2f}"]
