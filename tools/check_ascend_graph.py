"""Compiles the Ascend graphs of configs without an NPU, and checks them.

    python tools/check_ascend_graph.py llama_7b_kbk_pa_dyn.yaml ...
    python tools/check_ascend_graph.py --all
    python tools/check_ascend_graph.py --all --write       store the current graphs as golden
    python tools/check_ascend_graph.py NAME.yaml --set lora_config.max_adapters=4

A graph must pass MindSpore's inference of types and shapes and the rules of ``tools/ascend_graph/rules.py``. Its
listing must be equal to the golden listing in ``tools/ascend_graph/golden``, unless ``--set`` changes the config.
``--all`` includes the variants of ``tools/ascend_graph/variants.py``. The program prints a line per config and graph.
The exit code is 1 if any graph fails.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from llm_serving.commands.own_python import use_own_python

if __name__ == "__main__":
    use_own_python()

from agent.backends.ascend.context import environment
from llm_serving.config import Config
from llm_serving.config.lookup import find_config_file
from llm_serving.errors import LLMServingError
from llm_serving.formats.strict_yaml import read_yaml_mapping
from tools.ascend_graph.front_end import ascend_config, compile_graphs, forms_of, set_up
from tools.ascend_graph.fusions import predicted_fusions
from tools.ascend_graph.listing import Wiring, list_graph
from tools.ascend_graph.mind_ir import Graph
from tools.ascend_graph.rules import check_graph
from tools.ascend_graph.variants import VARIANTS, deployments, variant_of

GOLDEN = Path(__file__).resolve().parent / "ascend_graph" / "golden"
MAX_LINES = 12
"""Maximum number of lines that are shown of a difference or an error."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks the graphs of the given configs. Returns the exit code: 0, or 1 if a graph fails."""
    options = _parse(arguments)
    names = options.config or []
    if options.all:
        names = [*deployments(), *VARIANTS]
    set_up()
    failures = sum(check_config(name, options.overrides, write=options.write) for name in names)
    _write(f"{len(names)} configs, {failures} graphs failed")
    return 1 if failures else 0


def check_config(name: str, overrides: Sequence[str] = (), *, write: bool = False) -> int:
    """Prints a line per graph of a config or a variant, and returns the number of failures.

    ``overrides`` are settings of the form ``section.key=value``. With overrides, the graphs are not compared with
    golden listings.
    """
    stem = name if name in VARIANTS else Path(name).stem
    name, settings = variant_of(name)
    golden = None if overrides else stem
    if _is_mindformers(name):
        _write(f"skip {stem}: model_type mindformers, whose graph belongs to that package (docs/mindformers.md)")
        return 0
    try:
        config = ascend_config(name, [*settings, *overrides])
    except LLMServingError as error:
        _write(f"FAIL {stem}: {error}")
        return 1
    failures, start = 0, time.perf_counter()
    try:
        for kind, graph in compile_graphs(config):
            problems = problems_of(golden, kind, graph, config, write=write)
            seconds, start = time.perf_counter() - start, time.perf_counter()
            size = (
                f"{config.shape.num_layers} layers, {len(graph.nodes)} nodes{_fusion(graph, config)}, {seconds:.1f} s"
            )
            _write(f"{'FAIL' if problems else 'ok  '} {stem} {kind}: {size}", *_cut(problems))
            failures += bool(problems)
    except (LLMServingError, RuntimeError, TypeError, ValueError) as error:
        _write(f"FAIL {stem}: the front end rejects a graph", *_cut(str(error).strip().splitlines()))
        failures += 1
    return failures


def _write(line: str, *details: str) -> None:
    """Prints a line and its details immediately, because a check takes long and its output may go to a file."""
    print(line, *details, sep="\n       ", flush=True)


def _fusion(graph: Graph, config: Config) -> str:
    """Returns a text about the effect of graph-kernel fusion on the number of operators, or "" if fusion is off."""
    flags = environment(config).get("MS_DEV_GRAPH_KERNEL_FLAGS")
    if flags is None:
        return ""
    before, fusions = sum(1 for _ in Wiring(graph).calls()), predicted_fusions(graph, flags)
    after = before - sum(name.count("+") for name in fusions)
    return f", fusion {before} to {after} operators"


def _is_mindformers(name: str) -> bool:
    """Returns True for a MindFormers config.

    Returns False if the file cannot be read, because ``ascend_config`` then raises an error with the reason.
    """
    try:
        section = read_yaml_mapping(find_config_file(name)).get("model_config")
    except LLMServingError:
        return False
    return isinstance(section, dict) and section.get("model_type") == "mindformers"


def problems_of(stem: str | None, kind: str, graph: Graph, config: Config, *, write: bool) -> list[str]:
    """Returns the rules that a graph breaks, and the lines in which it differs from the golden listing ``stem``.

    If ``stem`` is None, compares no listing.
    """
    problems = check_graph(kind, graph, config, forms_of(config))
    if stem is None:
        return problems
    lines, golden = list_graph(graph), GOLDEN / f"{stem}.{kind}.txt"
    if write and not problems:
        golden.parent.mkdir(exist_ok=True)
        golden.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if not golden.is_file():
        return [*problems, f"there is no {golden.name} to compare with; check the graph, then use --write"]
    return [*problems, *_differences(golden.read_text(encoding="utf-8").splitlines(), lines)]


def _differences(golden: list[str], lines: list[str]) -> Iterator[str]:
    for line in difflib.unified_diff(golden, lines, "golden", "now", lineterm="", n=0):
        if not line.startswith(("---", "+++", "@@")):
            yield line


def _cut(lines: list[str]) -> list[str]:
    left = len(lines) - MAX_LINES
    return lines if left <= 0 else [*lines[:MAX_LINES], f"... and {left} lines more"]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compiles and checks the Ascend graphs of configs without an NPU.")
    parser.add_argument("config", nargs="*", help="name or path of a config, or name of a variant")
    parser.add_argument("--all", action="store_true", help="all configs except MindFormers' models, all variants")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        help="override a key, as for start_server.py; can be repeated",
    )
    parser.add_argument("--write", action="store_true", help="write the golden listings of graphs without errors")
    options = parser.parse_args(arguments)
    if not options.config and not options.all:
        parser.error("name a config, or --all")
    if options.overrides and (options.all or options.write):
        parser.error("--set changes a named config, whose stored listings stay: leave out --all and --write")
    return options


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # does not wait for MindSpore's threads
