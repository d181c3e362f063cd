"""Converts the analysis of a log to JSON. Latencies have the keys and units of the load test's JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from llm_serving.request import PARTS
from llm_serving.telemetry.statistics import Distribution
from tools.log_analysis.analysis import LogAnalysis
from tools.log_analysis.reader import LogReader
from tools.log_analysis.records import RequestEnd
from tools.log_analysis.timeline import Cell
from tools.log_analysis.why_slow_report import why_slow_json

Figures = dict[str, float | int | None]


def to_json(analysis: LogAnalysis, reader: LogReader) -> dict[str, Any]:
    phases, seconds = analysis.phases, analysis.total_time_s
    return {
        "max_token_len": analysis.max_token_len,
        "max_token_request": analysis.max_token_request,
        "requests": analysis.requests,
        "completed": analysis.completed,
        "refused_requests": analysis.refused,
        "unfinished_requests": analysis.unfinished_requests,
        "finish_reasons": dict(analysis.finish_reasons.most_common()),
        "total_time_s": seconds,
        "qps": _ratio(analysis.completed, seconds),
        "prompt_tokens": analysis.prompt_tokens,
        "cached_tokens": analysis.cached_tokens,
        "output_tokens": analysis.output_tokens,
        "output_tokens_per_s": _ratio(analysis.output_tokens, seconds),
        **{f"{part}_ms": _figures(phases.parts[part]) for part in PARTS},
        "ttft_ms": _figures(phases.ttft),
        "tpot_ms": _figures(phases.tpot),
        "e2e_s": _figures(phases.e2e, scale=0.001),
        "normalized_latency_ms": _figures(phases.normalized),
        "percentiles_are_exact": phases.e2e.is_exact,
        "preemptions": analysis.preemptions,
        "preempted_requests": analysis.preempted_requests,
        "swaps": analysis.swaps,
        "objectives": {name: analysis.objectives[name] for name in ("met", "missed")},
        "replicas": {str(replica): asdict(share) for replica, share in sorted(analysis.replicas.items())},
        "engine": _engine_json(analysis),
        "agents": {
            "ready": analysis.events.get("agent_ready", 0),
            "lost": analysis.events.get("agent_lost", 0),
            "restarts": analysis.agent_restarts,
        },
        "errors": analysis.errors,
        "warnings": analysis.warnings,
        "messages": [asdict(message) for message in analysis.messages],
        "slowest": [_request_json(end) for end in analysis.slowest],
        "why_slow": why_slow_json(analysis.why_slow),
        "runs": analysis.runs,
        "earlier_runs": analysis.earlier_runs,
        "apis": dict(analysis.apis.most_common()),
        "events": dict(analysis.events.most_common()),
        "first_time": analysis.first_time,
        "last_time": analysis.last_time,
        "lines": reader.lines,
        "bad_lines": reader.bad_lines,
        "bad_examples": reader.bad_examples,
    }


def _figures(distribution: Distribution, scale: float = 1.0) -> Figures:
    figures: Figures = distribution.summary().as_dict()
    return {key: value if value is None or key == "count" else value * scale for key, value in figures.items()}


def _engine_json(analysis: LogAnalysis) -> dict[str, Any]:
    engine, timeline = analysis.engine, analysis.timeline
    return {
        "state_lines": engine.lines,
        "running": _cell(timeline.total("running")),
        "waiting": _cell(timeline.total("waiting")),
        "kv_use": _cell(timeline.total("kv_use")),
        "kv_waste": _cell(timeline.total("kv_waste")),
        "swapped": _cell(timeline.total("swapped")),
        "decode_batch_mean": engine.decode_batch_mean,
        **engine.sums,
    }


def _cell(cell: Cell) -> Figures:
    return {"mean": cell.mean, "max": cell.max} if cell.count else {"mean": None, "max": None}


def _request_json(end: RequestEnd) -> dict[str, Any]:
    return {
        "request_id": end.request_id,
        "e2e_s": None if end.e2e_ms is None else end.e2e_ms / 1000.0,
        **{f"{part}_ms": getattr(end, f"{part}_ms") for part in PARTS},
        "ttft_ms": end.ttft_ms,
        "tpot_ms": end.tpot_ms,
        "prompt_tokens": end.prompt_tokens,
        "output_tokens": end.output_tokens,
        "finish_reason": end.finish_reason,
        "preemptions": end.preemptions,
        "swaps": end.swaps,
    }


def _ratio(amount: float, whole: float) -> float:
    return amount / whole if whole > 0 else 0.0
