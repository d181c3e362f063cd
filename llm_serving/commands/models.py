"""``llm-serving models``: lists the models of this machine, and whether this server can serve them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import chain

from llm_serving.cli import AUTO_DTYPE, DEFAULT_CONFIG
from llm_serving.config import load_config
from llm_serving.errors import CheckpointError, ConfigError, MemoryPlanError
from llm_serving.hub.fetching import hub_caches
from llm_serving.hub.inventory import (
    FoundModel,
    as_json,
    hugging_face_models,
    model_scope_models,
    packaged_models,
)
from llm_serving.planning.machine import Machine
from llm_serving.planning.memory_plan import plan_memory
from llm_serving.planning.rank_memory import format_bytes

YES = "yes"
_HEADER = ("model", "size", "format", "architecture", "served")
_EXAMPLES = """\
examples:
  %(prog)s
      one line for each model; the first column is for --model
  %(prog)s --json
      the same as JSON, one object on each line

searched: the package of the default model, the embedded model, the cache of Hugging Face (HF_HOME), and the cache of
ModelScope (MODELSCOPE_CACHE)
"""


def main(argv: Sequence[str]) -> int:
    """Prints the list of models and returns 0."""
    arguments = build_parser().parse_args(argv)
    machine = Machine.detect()
    rows = [(found, verdict(found, machine)) for found in _all_models()]
    if arguments.json:
        sys.stdout.writelines(f"{as_json(found, served)}\n" for found, served in rows)
    else:
        sys.stdout.write(_table(rows))
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of this sub-command."""
    parser = argparse.ArgumentParser(
        description="List the models of this machine: size, format, architecture, and whether they can be served.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON, one object on each line")
    return parser


def verdict(found: FoundModel, machine: Machine) -> str:
    """Returns ``yes``, or ``no`` with the reason why ``llm-serving serve --model NAME`` would refuse the model."""
    try:
        path = f"model_config.model_path={json.dumps(str(found.path))}"
        plan_memory(load_config(DEFAULT_CONFIG, [AUTO_DTYPE, path]), machine)
    except (ConfigError, CheckpointError, MemoryPlanError) as error:
        reason = str(error).splitlines()[0]
        for prefix in (f"{found.path}/", f"{found.path}: "):
            reason = reason.removeprefix(prefix)
        return f"no: {reason}"
    return YES


def _all_models() -> Iterator[FoundModel]:
    hugging_face, model_scope = hub_caches()
    return chain(packaged_models(), hugging_face_models(hugging_face), model_scope_models(model_scope))


def _table(rows: Sequence[tuple[FoundModel, str]]) -> str:
    cells = [_HEADER, *((f.name, format_bytes(f.size), f.format, f.architecture, served) for f, served in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_HEADER) - 1)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in cells
    ]
    return "\n".join(lines) + "\n"
