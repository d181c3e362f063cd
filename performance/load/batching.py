"""The study of batching modes: one engine, one load, each mode of batching in turn.

    none         one request at a time
    static       what waits when the device becomes free runs as one batch, to the end of its longest request
    dynamic      a batch leaves when it is full or late, the next one waits until it has ended
    continuous   requests join and leave at any step; each reserves contiguous room for its longest answer
    paged        the same, with blocks on demand (paged attention)

Clients in a closed loop send prompts of 64 to 256 random tokens (160 in the mean, as the conversations of ShareGPT have
161: Kwon et al. 2023) that want 64, 128 or 256 tokens (end tokens are ignored); both are drawn by seed and the same in
every mode. So are the answers, which is checked.

How far behind static and dynamic batching are depends on ``--batch-size``: a larger batch serves more clients at a
time, and each waits for the longest of more. docs/scheduling.md has several.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_serving.telemetry.text_table import format_number, format_table
from performance.load.closed_loop import run_closed_loop
from performance.load.errors import UsageError
from performance.load.exit_codes import told_errors
from performance.load.metric_watch import MetricWatch
from performance.load.options import LoadOptions, positive
from performance.load.progress import progress_display
from performance.load.report import figures_json, write_json
from performance.load.server_process import START_SERVER, configured_server
from performance.load.statistics import LoadFigures, measure
from performance.load.workload import LoadRequest, study_workload
from performance.simulation.presets import PRESETS

__all__ = ["MODES", "Measured", "main", "mode_settings", "results_json"]

MODES: dict[str, tuple[str, bool]] = {
    "none": ("none", True),
    "static": ("static", False),
    "dynamic": ("dynamic", False),
    "continuous": ("continuous", False),
    "paged": ("continuous", True),
}
"""``batching_strategy`` and ``page_attention``. Batches are of a time before paged attention; one request at a time
has the cache to itself."""
DEFAULT_MODES = ("static", "dynamic", "continuous", "paged")
PROMPT_LEN = (64, 256)
OUTPUTS = (64, 128, 256)
VOCAB = 1000
BATCH_SIZE = 16
"""Of static and dynamic batching."""
BATCH_WAIT_S = 0.05
WARM_UP = 4
KV_WASTE, RUNNING = "llm_serving_kv_waste_ratio", "llm_serving_requests_running"
RATIOS = (("continuous", "dynamic"), ("paged", "continuous"), ("paged", "dynamic"), ("paged", "none"))


@dataclass(frozen=True, slots=True)
class Measured:
    """The load under one mode."""

    mode: str
    figures: LoadFigures
    kv_waste: float | None
    texts: tuple[str | None, ...] = ()
    """Answers in order of the requests; none in a simulation."""

    def as_json(self) -> dict[str, Any]:
        return {"requests_per_s": self.figures.qps, "kv_waste": self.kv_waste, **figures_json(self.figures)}


@told_errors
def main(arguments: Sequence[str] | None = None, program: Path = START_SERVER) -> int:
    """0; 1 when requests failed or answers differ between modes, 2 when a server did not start."""
    parsed = _parser().parse_args(arguments)
    _check(parsed)
    requests = study_workload(parsed.requests, parsed.seed, PROMPT_LEN, OUTPUTS, VOCAB)
    if parsed.simulate is not None:
        from performance.simulation.batching import simulate_mode

        measured = [simulate_mode(mode, requests, parsed) for mode in parsed.modes]
    else:
        measured = [_measure(mode, requests, parsed, program) for mode in parsed.modes]
    results = results_json(measured, parsed)
    print(format_results(measured, results))
    if parsed.json is not None:
        write_json(parsed.json, results)
    return 1 if results["texts_identical"] is False or any(one.figures.failed for one in measured) else 0


def mode_settings(mode: str, batch_size: int, batch_wait_s: float) -> list[str]:
    """The mode as ``--set`` takes it."""
    strategy, paged = MODES[mode]
    settings = [f"model_config.batching_strategy={strategy}", f"model_config.page_attention={str(paged).lower()}"]
    if strategy in ("static", "dynamic"):
        settings.append(f"model_config.batch_size={batch_size}")
    if strategy == "dynamic":
        settings.append(f"model_config.batch_waiting_time={batch_wait_s}")
    return settings


def _measure(mode: str, requests: Sequence[LoadRequest], parsed: argparse.Namespace, program: Path) -> Measured:
    with tempfile.TemporaryDirectory(prefix="compare_batching_") as folder:
        print(f"starting the server for {mode}", file=sys.stderr)
        settings = [*mode_settings(mode, parsed.batch_size, parsed.batch_wait), *parsed.settings]
        server = configured_server(mode, parsed.config, settings, Path(folder), parsed.start_timeout, program)
        with server as endpoint:
            options = LoadOptions(
                endpoint,
                seed=parsed.seed,
                token_ids=True,
                ignore_eos=True,
                keep_text=True,
                warmup=WARM_UP,
                timeout_s=parsed.timeout,
            )
            with progress_display() as display, MetricWatch(options.endpoint, KV_WASTE, RUNNING) as watch:
                run = run_closed_loop(options, requests, parsed.clients, display)
    if run.interrupted:
        raise KeyboardInterrupt
    measured = Measured(mode, measure(run), watch.mean, tuple(record.text for record in run.records))
    print(f"{mode}: {format_number(measured.figures.qps)} requests/s", file=sys.stderr)
    return measured


def results_json(measured: Sequence[Measured], parsed: argparse.Namespace) -> dict[str, Any]:
    """``modes`` by name; ``ratios`` of requests a second; ``texts_identical`` is None where there are no texts."""
    by_mode = {one.mode: one for one in measured}
    texts = [one.texts for one in measured if one.texts]
    return {
        "config": parsed.config,
        "settings": parsed.settings,
        "device": "real" if parsed.simulate is None else parsed.simulate,
        "clients": parsed.clients,
        "requests": parsed.requests,
        "seed": parsed.seed,
        "batch_size": parsed.batch_size,
        "modes": {one.mode: one.as_json() for one in measured},
        "ratios": {
            f"{better}/{worse}": by_mode[better].figures.qps / by_mode[worse].figures.qps
            for better, worse in RATIOS
            if better in by_mode and worse in by_mode and by_mode[worse].figures.qps > 0
        },
        "texts_identical": all(each == texts[0] for each in texts) if texts else None,
    }


def format_results(measured: Sequence[Measured], results: dict[str, Any]) -> str:
    header = ["", "requests/s", "tokens/s", "TTFT p50 ms", "p99", "TBT p50 ms", "p99", "KV waste %", "failed"]
    rows = []
    for one in measured:
        figures = one.figures
        numbers = (
            figures.qps,
            figures.output_tokens_per_s,
            figures.ttft_ms.p50,
            figures.ttft_ms.p99,
            figures.tbt_ms.p50,
            figures.tbt_ms.p99,
            None if one.kv_waste is None else 100 * one.kv_waste,
        )
        rows.append([one.mode, *(format_number(number) for number in numbers), str(figures.failed)])
    lines = [format_table(header, rows), ""]
    lines += [f"  {name}: {ratio:.2f}" for name, ratio in results["ratios"].items()]
    if results["texts_identical"] is not None:
        same = "the same in every mode" if results["texts_identical"] else "NOT the same in every mode"
        lines.append(f"  answers: {same}")
    return "\n".join(lines)


def _check(parsed: argparse.Namespace) -> None:
    for name in ("clients", "requests", "batch_size"):
        if getattr(parsed, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(parsed, name)}: the least is 1")


def _modes(text: str) -> tuple[str, ...]:
    modes = tuple(text.split(","))
    for mode in modes:
        if mode not in MODES:
            raise argparse.ArgumentTypeError(f"{mode!r}: there are {', '.join(MODES)}")
    return modes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="llama_160m_cpu.yaml", help="default %(default)s")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help="for all modes"
    )
    parser.add_argument("--clients", type=int, default=50, help="in a closed loop (default %(default)s)")
    parser.add_argument("--requests", type=int, default=1000, help="in all (default %(default)s)")
    parser.add_argument(
        "--modes", type=_modes, default=DEFAULT_MODES, metavar="M,M", help=f"default {','.join(DEFAULT_MODES)}"
    )
    parser.add_argument(
        "--batch-size", type=int, default=BATCH_SIZE, help="of static and dynamic batching (default %(default)s)"
    )
    parser.add_argument(
        "--batch-wait",
        type=positive,
        default=BATCH_WAIT_S,
        metavar="S",
        help="seconds a dynamic batch that is not full waits (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts and lengths (default %(default)s)")
    parser.add_argument("--simulate", choices=sorted(PRESETS), metavar="DEVICE", help="in the simulator: %(choices)s")
    parser.add_argument("--recording", type=Path, metavar="F", help="with --simulate cpu: fit the device from this")
    parser.add_argument("--timeout", type=positive, default=3600.0, help="seconds for one request")
    parser.add_argument("--start-timeout", type=positive, default=600.0, help="seconds for a server to be ready")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    return parser
