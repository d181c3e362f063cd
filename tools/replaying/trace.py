"""Writes a timeline in Chrome's trace event format, for ``chrome://tracing`` and https://ui.perfetto.dev."""

from __future__ import annotations

from typing import Any

import orjson

from llm_serving.flight.timeline import SpanPhase, Timeline

__all__ = ["chrome_trace"]

_DEVICE, _REQUESTS, _COUNTS = 1, 2, 3


def chrome_trace(timeline: Timeline) -> bytes:
    """Returns the timeline as a JSON trace. Times are microseconds since the timeline's beginning."""
    events: list[dict[str, Any]] = [
        _name(_DEVICE, "device"),
        _name(_REQUESTS, "requests"),
        _name(_COUNTS, "scheduler"),
    ]
    events += [_step(each.step.kind.value, timeline, index) for index, each in enumerate(timeline.steps)]
    for lane in timeline.lanes:
        events.append(
            {"ph": "M", "name": "thread_name", "pid": _REQUESTS, "tid": lane.number, "args": {"name": lane.request_id}}
        )
        events += [
            _complete(_REQUESTS, lane.number, SpanPhase(span.phase).name.lower(), timeline, span.begin, span.end, {})
            for span in lane.spans
        ]
    for counts in timeline.counts:
        stamp = _us(timeline, counts.time)
        values = {"running": counts.running, "waiting": counts.waiting}
        events.append({"ph": "C", "name": "requests", "pid": _COUNTS, "ts": stamp, "args": values})
        blocks = {"free": counts.free_blocks}
        events.append({"ph": "C", "name": "blocks", "pid": _COUNTS, "ts": stamp, "args": blocks})
    return orjson.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _step(kind: str, timeline: Timeline, index: int) -> dict[str, Any]:
    each = timeline.steps[index]
    details = {
        "seq": each.step.seq,
        "sequences": each.step.num_seqs,
        "tokens": each.step.num_tokens,
        "reason": each.step.reason.lower(),
        "scheduled_us": _us(timeline, each.scheduled),
    }
    return _complete(_DEVICE, 1, kind, timeline, each.begin, each.end, details)


def _complete(
    process: int, thread: int, name: str, timeline: Timeline, begin: float, end: float, details: dict[str, Any]
) -> dict[str, Any]:
    start = _us(timeline, begin)
    duration = _us(timeline, end) - start
    return {"ph": "X", "name": name, "pid": process, "tid": thread, "ts": start, "dur": duration, "args": details}


def _name(process: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}


def _us(timeline: Timeline, seconds: float) -> int:
    return round((seconds - timeline.begin) * 1e6)
