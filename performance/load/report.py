"""Presents a load test's run as text and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from performance.load.client import LoadRun
from performance.load.options import LoadOptions
from performance.load.statistics import LATENCIES, LoadFigures, RequestFigures
from performance.terminal import format_number, format_summaries, format_table

SHOWN_FAILURES = 3
"""Maximum number of failures of each kind that the report shows."""

COLUMNS: dict[str, Callable[[LoadFigures], float | None]] = {
    "requests/s": lambda figures: figures.qps,
    "total s": lambda figures: figures.total_time_s,
    "tokens/s": lambda figures: figures.output_tokens_per_s,
    "TTFT mean ms": lambda figures: figures.ttft_ms.mean,
    "TTFT p50 ms": lambda figures: figures.ttft_ms.p50,
    "TTFT p99 ms": lambda figures: figures.ttft_ms.p99,
    "TBT p50 ms": lambda figures: figures.tbt_ms.p50,
    "TBT p99 ms": lambda figures: figures.tbt_ms.p99,
    "TPOT mean ms": lambda figures: figures.tpot_ms.mean,
    "goodput %": lambda figures: 100 * figures.goodput_fraction,
    "failed": lambda figures: figures.failed,
}
"""The possible columns of tables that compare runs.

The function of a column calculates the column's value, or returns None if no request has this value.
"""


def objective_text(options: LoadOptions) -> str:
    text = f"TTFT <= {options.slo_ttft_ms:g} ms, TPOT <= {options.slo_tpot_ms:g} ms"
    if options.slo_tbt_ms is not None:
        text += f", no pause > {options.slo_tbt_ms:g} ms"
    return text


def load_text(run: LoadRun) -> str:
    """Returns a line that describes the load: server, model, rate, duration and seed."""
    options = run.options
    return (
        f"{options.endpoint.url} {options.api} model {run.model}: {options.rate:g} requests/s ({options.arrivals}) "
        f"for {options.duration:g} s, seed {options.seed}"
    )


def format_report(run: LoadRun, figures: LoadFigures) -> str:
    """Returns the text that the program prints at the end."""
    parts = [
        load_text(run),
        f"All Tasks Done; Exec Time is {figures.total_time_s:.2f} s",
        *figure_tables(figures),
        _last_lines(run, figures),
    ]
    if figures.failures:
        parts.insert(3, _failure_text(figures))
    return "\n\n".join(parts)


def figure_tables(figures: LoadFigures) -> tuple[str, str]:
    """Returns two tables: counts and rates, and latencies."""
    rows = [
        ["requests", str(figures.requests)],
        ["failed", str(figures.failed)],
        ["QPS", format_number(figures.qps)],
        ["prompt tokens", "-" if figures.prompt_tokens is None else str(figures.prompt_tokens)],
        ["output tokens", str(figures.output_tokens)],
        ["output tokens/s", format_number(figures.output_tokens_per_s)],
    ]
    latencies = [(title, getattr(figures, name)) for name, title in LATENCIES.items() if title is not None]
    return format_table(rows[0], rows[1:]), format_summaries("latency", latencies)


def goodput_text(options: LoadOptions, figures: LoadFigures) -> str:
    """Returns a line with the goodput: the requests that met their objectives, as a fraction and per second."""
    return (
        f"goodput  {100 * figures.goodput_fraction:.1f} % of requests, {format_number(figures.goodput_per_s)} per "
        f"second ({objective_text(options)})"
    )


def _last_lines(run: LoadRun, figures: LoadFigures) -> str:
    lines = [
        f"  {goodput_text(run.options, figures)}",
        f"  client   {figures.client_cpu_percent:.0f} % of a core; maximum delay of sending "
        f"{format_number(figures.lateness_ms.max)} ms (p99 {format_number(figures.lateness_ms.p99)} ms)",
    ]
    lines += _cost_lines(run.server_cost.as_dict(figures.output_tokens))
    if figures.client_was_bottleneck:
        lines.append("  WARNING: the client was too busy; the latencies include its own delays")
    if figures.sends_were_late:
        lines.append(
            f"  WARNING: requests were sent {format_number(figures.lateness_ms.mean)} ms late on average; TTFT "
            f"counted from the due time is {format_number(figures.ttft_from_due_ms.mean)} ms"
        )
    if figures.tokens_are_counted_pieces:
        lines.append("  note: the server does not report token counts; streamed pieces were counted instead")
    if run.interrupted:
        lines.append(f"  note: interrupted after {figures.requests} of {run.options.count} requests")
    return "\n".join(lines)


def _cost_lines(cost: Mapping[str, float | None]) -> list[str]:
    """Returns the line about the server's processor time and energy. Empty if the server does not measure them."""
    cpu_s, joules = cost["cpu_s_per_1000_tokens"], cost["joules_per_1000_tokens"]
    if cpu_s is None:
        return []
    energy = "" if joules is None else f"; {format_number(joules)} J (processors and memory of the machine)"
    return [f"  server   {format_number(cpu_s)} CPU seconds for 1000 output tokens{energy}"]


def _failure_text(figures: LoadFigures) -> str:
    lines = []
    for kind, count in figures.failures.items():
        lines.append(f"  failed: {kind}: {count}")
        details = dict.fromkeys(
            one.record.detail for one in figures.per_request if one.record.failure == kind and one.record.detail
        )
        lines += [f"    {detail[:200]}" for detail in list(details)[:SHOWN_FAILURES]]
    return "\n".join(lines)


def figures_json(figures: LoadFigures) -> dict[str, Any]:
    """Returns counts, rates and latencies of a run as JSON, for programs that compare runs."""
    return {
        "requests": figures.requests,
        "failed": figures.failed,
        "total_time_s": figures.total_time_s,
        "qps": figures.qps,
        "output_tokens_per_s": figures.output_tokens_per_s,
        **{name: getattr(figures, name).as_dict() for name in LATENCIES},
    }


def report_json(run: LoadRun, figures: LoadFigures) -> dict[str, Any]:
    """Returns the complete JSON of a run. ``requests`` is the number of requests; ``per_request`` lists them."""
    options = run.options
    return {
        **figures_json(figures),
        "completed": figures.completed,
        "failures": figures.failures,
        "prompt_tokens": figures.prompt_tokens,
        "output_tokens": figures.output_tokens,
        "goodput": {
            "slo_ttft_ms": options.slo_ttft_ms,
            "slo_tpot_ms": options.slo_tpot_ms,
            "slo_tbt_ms": options.slo_tbt_ms,
            "requests": figures.good_requests,
            "fraction": figures.goodput_fraction,
            "requests_per_s": figures.goodput_per_s,
        },
        "client": {
            "cpu_percent": figures.client_cpu_percent,
            "lateness_ms": figures.lateness_ms.as_dict(),
            "was_bottleneck": figures.client_was_bottleneck,
            "sends_were_late": figures.sends_were_late,
        },
        "server": run.server_cost.as_dict(figures.output_tokens),
        "started_at": run.started_at,
        "interrupted": run.interrupted,
        "model": run.model,
        "options": _options_json(options),
        "per_request": [_request_json(one, run.start) for one in figures.per_request],
    }


def _options_json(options: LoadOptions) -> dict[str, Any]:
    names = ("api", "rate", "arrivals", "seed", "token_ids", "prompt_len", "output_len", "temperature", "ignore_eos",
             "warmup", "timeout_s")  # fmt: skip
    return {
        "url": options.endpoint.url,
        "duration_s": options.duration,
        "dataset": None if options.dataset is None else str(options.dataset),
        **{name: getattr(options, name) for name in names},
    }


def _request_json(figures: RequestFigures, start: float) -> dict[str, Any]:
    record = figures.record
    return {
        "index": record.index,
        "request_id": record.request_id,
        "due_s": _rounded(record.due - start),
        "lateness_ms": _rounded(figures.lateness_ms),
        "ttft_ms": _rounded(figures.ttft_ms),
        "tpot_ms": _rounded(figures.tpot_ms),
        "max_tbt_ms": _rounded(figures.max_tbt_ms),
        "e2e_s": _rounded(figures.e2e_s),
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "pieces": len(record.piece_times),
        "finish_reason": record.finish_reason,
        "http_status": record.http_status,
        "failure": record.failure,
        "detail": record.detail,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
