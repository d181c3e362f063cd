"""Generates docs/command_line.md from the ``--help`` of every command."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

INTRODUCTION = """\
# Command line

For users of the programs in this repository. Each section is the `--help` of one program.

<!-- Written by tools/write_reference_docs.py from the programs themselves. Edit there. -->

The command `llm-serving` is in `.venv/bin`. It starts most of the programs below, for example `llm-serving doctor`.
A program of the repository also starts with any Python, for example `python tools/doctor.py`. It continues in `.venv`
if that exists.

"""

PROGRAMS: dict[str, tuple[str, ...]] = {
    "One command": (
        "llm_serving/__main__.py",
        "llm_serving/__main__.py serve",
        "llm_serving/__main__.py chat",
        "llm_serving/__main__.py models",
        "llm_serving/__main__.py plan",
        "llm_serving/__main__.py completion",
        "llm_serving/__main__.py cluster",
        "llm_serving/__main__.py cluster host",
        "llm_serving/__main__.py cluster up",
        "llm_serving/__main__.py cluster drain",
    ),
    "Server": ("start_server.py", "llm_serving/access/__main__.py", "llm_serving/access/__main__.py new"),
    "Tools": (
        "tools/doctor.py",
        "tools/doctor.py explain",
        "tools/doctor.py bundle",
        "tools/analyze_log.py",
        "tools/replay.py",
        "tools/quantize.py",
        "tools/import_chat_configuration.py",
        "tools/quality_gate.py",
        "tools/check_ascend_graph.py",
        "tools/try_attention.py",
        "tools/train_tiny_llama.py",
    ),
    "Load tests and comparisons": (
        "performance/test_serving_performance.py",
        "performance/bench_serving.py",
        "performance/bench_overload.py",
        "performance/mock_client.py",
        "performance/compare_settings.py",
        "performance/compare_batching.py",
        "performance/compare_op_tables.py",
        "performance/compare_peers.py",
        "performance/compare_llama_cpp.py",
    ),
    "Benchmarks": (
        "performance/bench_engine.py",
        "performance/bench_engine_host.py",
        "performance/bench_kernels.py",
        "performance/bench_parallel.py",
        "performance/bench_collectives.py",
        "performance/bench_step_ahead.py",
        "performance/bench_structured.py",
        "performance/bench_speculation.py",
        "performance/bench_lora.py",
        "performance/bench_kv_tiers.py",
        "performance/bench_kv_tier_cost.py",
        "performance/bench_kv_transfer.py",
        "performance/bench_memory.py",
        "performance/bench_models.py",
        "performance/bench_remote_agent.py",
        "performance/bench_recorder.py",
        "performance/bench_reliability_cost.py",
        "performance/bench_quiet.py",
    ),
    "Simulator": ("performance/simulate.py", "performance/validate_simulator.py"),
    "Development": (
        "tools/reliability_report.py",
        "tools/check_language.py",
        "tools/write_reference_docs.py",
        "tools/draw_pictures.py",
        "tools/lock_requirements.py",
        "tools/audit_packages.py",
    ),
}
"""Every program that a user starts, by section of the page. A test checks that no program is missing."""


def command_line_page() -> str:
    """Returns the page docs/command_line.md."""
    parts = [INTRODUCTION]
    for title, programs in PROGRAMS.items():
        parts.append(f"## {title}\n\n")
        parts += [f"### `{_shown(program)}`\n\n```text\n{help_of(program)}\n```\n\n" for program in programs]
    return "".join(parts).rstrip() + "\n"


def _shown(program: str) -> str:
    return program.replace("llm_serving/__main__.py", "llm-serving")


def help_of(program: str) -> str:
    """Returns what ``program --help`` prints, with the default width of the page."""
    path, *arguments = program.split()
    saved, output = (sys.argv, dict(os.environ), list(sys.path)), io.StringIO()
    sys.argv, os.environ["COLUMNS"] = [path, *arguments, "--help"], "110"
    sys.path.insert(0, str((ROOT / path).parent))
    try:
        with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
            runpy.run_path(str(ROOT / path), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = saved[0], saved[2]
        os.environ.clear()
        os.environ.update(saved[1])
    text = output.getvalue().replace(f"{ROOT}/", "")  # the page must not depend on where the repository is
    return re.sub(r"[ \t]+$", "", text.strip(), flags=re.MULTILINE)
